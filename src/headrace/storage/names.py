"""Names and patterns, as users write them, and the files that match them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from headrace import storage
from headrace.errors import NotFoundError

__all__ = ["FileName", "as_names", "expand_braces", "is_local", "is_pattern", "match_files"]


FileName: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""A path or URL; also a NumPy scalar or array without axes that holds one."""

_MAGIC = re.compile(r"[*?\[]")
#: Braces with no others inside: `{a,b}`, or a range of numbers `{0..3}`.
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MOST_NAMES = 1 << 20


def as_names(argument: str, names: FileName | Iterable[FileName]) -> tuple[str, ...]:
    """Return file names or patterns as a tuple of str.

    Args:
        argument: Name of the argument, for messages.
        names: One name, or several.

    Raises:
        TypeError: Something in it is no name.
        ValueError: A name is empty, or there is none.
    """
    given: Any = names
    only = _as_name(given)
    if only is None and (hasattr(given, "read") or not isinstance(given, Iterable)):
        raise TypeError(
            f"{argument} must be a name (str, bytes or os.PathLike) or a sequence of these, got "
            f"{_not_a_name(given)}"
        )
    found: list[str] = []
    for name in given if only is None else (only,):
        text = _as_name(name)
        if text is None:
            raise TypeError(
                f"{argument} must hold names (str, bytes or os.PathLike), got {_not_a_name(name)} "
                f"at index {len(found)}"
            )
        if not text:
            raise ValueError(f"{argument} holds an empty name at index {len(found)}")
        found.append(text)
    if not found:
        raise ValueError(f"{argument} is empty; give at least one name")
    return tuple(found)


def _as_name(value: Any) -> str | None:
    """Return one name as str; None if it is none."""
    if type(value) is str:
        return value
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value.item()
    if isinstance(value, str | bytes | os.PathLike):
        # A subclass such as np.str_ is made plain.
        return str.__str__(os.fsdecode(value))
    return None


def _not_a_name(value: Any) -> str:
    if hasattr(value, "read"):
        name = getattr(value, "name", None)
        cure = f"pass its name, {name!r}" if isinstance(name, str) else "pass the file's name"
        return f"an open file ({type(value).__name__}); {cure}"
    return f"{value!r} ({type(value).__name__})"


def is_local(name: str) -> bool:
    """Tell whether a name is a path of this machine's file system."""
    return "://" not in name and "::" not in name


def is_pattern(name: str) -> bool:
    """Tell whether a name holds one of the signs `*`, `?` and `[`."""
    return _MAGIC.search(name) is not None


def expand_braces(pattern: str) -> list[str]:
    """Return what a shell makes of braces: `s{0..2}.{a,b}` is `s0.a`, `s0.b`, `s1.a` and so on.

    Numbers keep the zeros that they begin with, as in `{00..12}`. Braces with neither a comma nor
    a range in them stay as they are.

    Raises:
        ValueError: It stands for more than a million names.
    """
    for braces in _BRACES.finditer(pattern):
        inside = braces.group(1)
        numbers = _NUMBERS.fullmatch(inside)
        if numbers is not None:
            parts: Iterable[str] = _count_up(numbers.group(1), numbers.group(2), pattern)
        elif "," in inside:
            parts = inside.split(",")
        else:
            continue
        before, after = pattern[: braces.start()], pattern[braces.end() :]
        made: dict[str, None] = {}
        for part in parts:
            made.update(dict.fromkeys(expand_braces(before + part + after)))
            if len(made) > _MOST_NAMES:
                raise _too_many(pattern)
        return list(made)
    return [pattern]


def _count_up(first: str, last: str, pattern: str) -> Iterable[str]:
    begin, end = int(first), int(last)
    if abs(end - begin) >= _MOST_NAMES:
        raise _too_many(pattern)
    padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-")[0] == "0" for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    step = 1 if begin <= end else -1
    return [f"{number:0{width}d}" for number in range(begin, end + step, step)]


def _too_many(pattern: str) -> ValueError:
    return ValueError(f"the braces of {pattern!r} stand for more than {_MOST_NAMES} names; use *")


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
