"""File names and patterns given by users, and the files that match them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from headrace import storage
from headrace.errors import NotFoundError
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = [
    "FileName",
    "as_names",
    "expand_braces",
    "expand_names",
    "is_local",
    "is_pattern",
    "match_files",
]


FileName: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""A path or URL; may also be a NumPy scalar or 0-d array that contains one."""

_WILDCARD = re.compile(r"[*?\[]")
#: Braces without nested ones: `{a,b}`, or a range of numbers `{0..3}`.
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MAX_NAMES = 1 << 20


def as_names(argument: str, names: FileName | Iterable[FileName]) -> tuple[str, ...]:
    """Return file names or patterns as a tuple of str.

    Args:
        argument: Name of the argument, for messages.
        names: One name, or several.

    Raises:
        TypeError: If an item is not a name.
        ValueError: If a name is empty, or there are no names.
    """
    given: Any = names
    single_name = _as_name(given)
    if single_name is None and (hasattr(given, "read") or not isinstance(given, Iterable)):
        raise TypeError(
            f"{argument} must be a name (str, bytes or os.PathLike) or a sequence of these, got "
            f"{_name_type_error(given)}"
        )
    found: list[str] = []
    for name in given if single_name is None else (single_name,):
        text = _as_name(name)
        if text is None:
            raise TypeError(
                f"{argument} must contain names (str, bytes or os.PathLike), got "
                f"{_name_type_error(name)} at index {len(found)}"
            )
        if not text:
            raise ValueError(f"{argument} has an empty name at index {len(found)}")
        found.append(text)
    if not found:
        raise ValueError(f"{argument} is empty; give at least one name")
    return tuple(found)


def _as_name(value: Any) -> str | None:
    """Return a name as str; None if the value is not a name."""
    if type(value) is str:
        return value
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value.item()
    if isinstance(value, str | bytes | os.PathLike):
        # Convert instances of a subclass such as np.str_.
        return str.__str__(os.fsdecode(value))
    return None


def _name_type_error(value: Any) -> str:
    if hasattr(value, "read"):
        name = getattr(value, "name", None)
        fix = f"pass its name, {name!r}" if isinstance(name, str) else "pass the file's name"
        return f"an open file ({type(value).__name__}); {fix}"
    return f"{value!r} ({type(value).__name__})"


def is_local(name: str) -> bool:
    """Return whether a name is a path of the local file system."""
    return "://" not in name and "::" not in name


def is_pattern(name: str) -> bool:
    """Return whether a name contains `*`, `?` or `[`."""
    return _WILDCARD.search(name) is not None


def expand_braces(pattern: str) -> list[str]:
    """Expand braces like a shell: `s{0..2}.{a,b}` becomes `s0.a`, `s0.b`, `s1.a` and so on.

    Numbers keep leading zeros, as in `{00..12}`. Braces without a comma or a range stay unchanged.

    Raises:
        ValueError: If there are more than a million names.
    """
    for braces in _BRACES.finditer(pattern):
        inside = braces.group(1)
        numbers = _NUMBERS.fullmatch(inside)
        if numbers is not None:
            parts: Iterable[str] = _expand_range(numbers.group(1), numbers.group(2), pattern)
        elif "," in inside:
            parts = inside.split(",")
        else:
            continue
        before, after = pattern[: braces.start()], pattern[braces.end() :]
        made: dict[str, None] = {}
        for part in parts:
            made.update(dict.fromkeys(expand_braces(before + part + after)))
            if len(made) > _MAX_NAMES:
                raise _too_many_names_error(pattern)
        return list(made)
    return [pattern]


def _expand_range(first: str, last: str, pattern: str) -> Iterable[str]:
    begin, end = int(first), int(last)
    if abs(end - begin) >= _MAX_NAMES:
        raise _too_many_names_error(pattern)
    padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-")[0] == "0" for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    step = 1 if begin <= end else -1
    return [f"{number:0{width}d}" for number in range(begin, end + step, step)]


def _too_many_names_error(pattern: str) -> ValueError:
    return ValueError(f"the braces of {pattern!r} expand to more than {_MAX_NAMES} names; use *")


def expand_names(
    argument: str, names: FileName | Iterable[FileName], options: StorageOptions = NO_OPTIONS
) -> tuple[str, ...]:
    """Return the names of files, with patterns replaced by the files that match.

    Patterns are those of `match_files`. The files of a pattern with wildcards are sorted; those of
    braces keep the order of the braces, and need not exist. A local file with exactly the given
    name is not a pattern. In HTTP URLs, where `?` and `*` have other meanings, only braces are
    expanded.

    Args:
        argument: Name of the argument, for messages.
        names: One name or pattern, or several.
        options: Options of the file systems of URLs.

    Raises:
        TypeError, ValueError: As for `as_names`.
        NotFoundError: If no file matches a pattern.
    """
    found: list[str] = []
    for given in as_names(argument, names):
        if not is_pattern(given) and "{" not in given:
            found.append(given)
            continue
        name = given.removeprefix("file://")
        if is_local(name) and os.path.isfile(name):
            found.append(name)
            continue
        has_wildcards = not name.startswith(("http://", "https://"))
        for expanded in expand_braces(name):
            if has_wildcards and is_pattern(expanded):
                found += match_files(expanded, options)
            else:
                found.append(expanded)
    return tuple(found)


def match_files(
    patterns: FileName | Iterable[FileName], options: StorageOptions = NO_OPTIONS
) -> tuple[str, ...]:
    """Return the names of all files that match any of `patterns`, sorted, without duplicates.

    Patterns support `*`, `?`, `[...]`, `**` (any number of folders), `{a,b}` (alternatives) and
    `{0..3}` (each number). A pattern that is the exact name of a file matches that file, whatever
    characters it contains. Folders do not match.

    Raises:
        NotFoundError: If no file matches at all, or a name without wildcards does not exist.
    """
    patterns_given = as_names("patterns", patterns)
    found: set[str] = set()
    for given in patterns_given:
        pattern = given.removeprefix("file://")
        if is_local(pattern) and os.path.isfile(pattern):
            found.add(pattern)
            continue
        for expanded in expand_braces(pattern):
            names = (
                _match_local(expanded)
                if is_local(expanded)
                else storage.remote.match_urls(expanded, options)
            )
            if not names and not is_pattern(expanded):
                raise _missing_file_error(expanded)
            found.update(names)
    if not found:
        raise _no_match_error(patterns_given)
    return tuple(sorted(found))


def _missing_file_error(name: str) -> NotFoundError:
    kind = "folder, not a file; write" if is_local(name) and os.path.isdir(name) else ""
    advice = f": it is a {kind} {os.path.join(name, '*')!r} for the files in it" if kind else ""
    return NotFoundError(f"No such file: {name!r}{advice}")


def _no_match_error(patterns: Sequence[str]) -> NotFoundError:
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
        advice = _describe_existing_prefix(local[0])
    return NotFoundError(f"No files matched pattern: {shown}{advice}")


def _describe_existing_prefix(pattern: str) -> str:
    """Return a hint on which folders of a pattern exist, up to its first wildcard."""
    folder = os.path.dirname(pattern)
    while is_pattern(folder) or "{" in folder:
        folder = os.path.dirname(folder)
    folder = folder or "."
    missing = ""
    while not os.path.isdir(folder):
        missing, folder = folder, os.path.dirname(folder) or "."
    if missing:
        return (
            f"; the folder {missing!r} does not "
            f"exist{'' if folder != '.' else f' in {os.getcwd()!r}'}"
        )
    try:
        is_empty = not os.listdir(folder)
    except OSError as error:
        return f"; cannot read the folder {folder!r}: {error.strerror}"
    return (
        f"; the folder {folder!r} is empty"
        if is_empty
        else f"; nothing in the folder {folder!r} matches"
    )


def _match_local(pattern: str) -> list[str]:
    if os.path.isfile(pattern):
        return [pattern]
    return [name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
