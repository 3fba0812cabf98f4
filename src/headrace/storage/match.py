"""Find files by pattern, on local disks and wherever fsspec reaches."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence

from headrace import storage
from headrace.errors import NotFoundError
from headrace.storage.names import FileName, as_names, expand_braces, is_local, is_pattern

__all__ = ["match_files"]


def match_files(patterns: FileName | Iterable[FileName]) -> tuple[str, ...]:
    """Return the names of all files that match any of `patterns`, sorted, each once.

    Patterns know `*`, `?`, `[...]`, `**` (any number of folders), `{a,b}` (either) and `{0..3}`
    (each number). A file whose name is exactly the pattern is taken as it is, whatever characters
    it holds. Folders do not match.

    Raises:
        NotFoundError: No file matches at all, or a name without wildcards does not exist.
    """
    wanted = as_names("patterns", patterns)
    found: set[str] = set()
    for given in wanted:
        pattern = given.removeprefix("file://")
        if is_local(pattern) and os.path.isfile(pattern):
            found.add(pattern)
            continue
        for expanded in expand_braces(pattern):
            names = _match_local(expanded) if is_local(expanded) else storage.remote.match(expanded)
            if not names and not is_pattern(expanded):
                raise _no_such_file(expanded)
            found.update(names)
    if not found:
        raise _nothing_matched(wanted)
    return tuple(sorted(found))


def _no_such_file(name: str) -> NotFoundError:
    what = "folder, not a file; write" if is_local(name) and os.path.isdir(name) else ""
    advice = f": it is a {what} {os.path.join(name, '*')!r} for the files in it" if what else ""
    return NotFoundError(f"No such file: {name!r}{advice}")


def _nothing_matched(patterns: Sequence[str]) -> NotFoundError:
    shown = ", ".join(repr(pattern) for pattern in patterns)
    local = [pattern.removeprefix("file://") for pattern in patterns]
    folders = [
        name
        for pattern in local
        if is_local(pattern)
        for expanded in expand_braces(pattern)
        for name in glob.glob(expanded, recursive=True)
    ]
    advice = ""
    if folders:
        advice = (
            f"; it matches folders ({len(folders)}) and only files are listed: write "
            f"{os.path.join(local[0], '*')!r} for the files in them"
        )
    elif len(patterns) == 1 and is_local(local[0]):
        advice = _how_far(local[0])
    return NotFoundError(f"No files matched pattern: {shown}{advice}")


def _how_far(pattern: str) -> str:
    """Say how far the folders exist that a pattern names before its first wildcard."""
    folder = os.path.dirname(pattern)
    while is_pattern(folder) or "{" in folder:
        folder = os.path.dirname(folder)
    folder = folder or "."
    missing = ""
    while not os.path.isdir(folder):
        missing, folder = folder, os.path.dirname(folder) or "."
    if missing:
        return f"; there is no folder {missing!r}{'' if folder != '.' else f' in {os.getcwd()!r}'}"
    try:
        is_empty = not os.listdir(folder)
    except OSError as error:
        return f"; the folder {folder!r} cannot be read: {error.strerror}"
    return (
        f"; the folder {folder!r} is empty"
        if is_empty
        else f"; nothing in the folder {folder!r} matches"
    )


def _match_local(pattern: str) -> list[str]:
    if os.path.isfile(pattern):
        return [pattern]
    return [name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
