"""Find files by pattern and open them, on local disks and wherever fsspec reaches.

A name is a local path or an fsspec URL such as `memory://dir/file`. Local files take the short way
past fsspec.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias, cast

import fsspec
import numpy as np
from fsspec.core import url_to_fs
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.errors import FailedPreconditionError, NotFoundError, UnavailableError
from headrace.plan.source import IndexedSource
from headrace.sources.compression import ByteStream, Compression, InflatingStream

__all__ = [
    "FileName",
    "FileNamesSource",
    "as_names",
    "create_file",
    "expand_braces",
    "is_local",
    "match_files",
    "open_file",
]

FileName: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""A path or URL; also a NumPy scalar or array without axes that holds one."""

_MAGIC = re.compile(r"[*?\[]")
#: Braces with no others inside: `{a,b}`, or a range of numbers `{0..3}`.
_BRACES = re.compile(r"\{([^{}]*)\}")
_LIST_IN_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MOST_NAMES = 1 << 20
_SKIP_BLOCK = 1 << 20


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
            names = _match_local(expanded) if is_local(expanded) else _match_remote(expanded)
            if not names and not _MAGIC.search(expanded):
                raise _no_such_file(expanded)
            found.update(names)
    if not found:
        raise _nothing_matched(wanted)
    return tuple(sorted(found))


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
    return NotFoundError(f"No files matched pattern: {shown}{advice}")


def _match_local(pattern: str) -> list[str]:
    if os.path.isfile(pattern):
        return [pattern]
    return [name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]


def _match_remote(pattern: str) -> list[str]:
    try:
        system, path = url_to_fs(pattern)
        if system.isfile(path):
            return [pattern]
        if not _MAGIC.search(path):
            return []
        listed = system.glob(path, detail=True)
    except OSError as error:
        raise UnavailableError(f"files of {pattern!r} cannot be listed: {error}") from error
    paths = [str(found) for found, info in listed.items() if info["type"] == "file"]
    first, chained, rest = pattern.partition("::")
    if not chained:
        return [system.unstrip_protocol(found) for found in paths]
    if "://" in first:
        # An archive within another file: `zip://*.csv::s3://bucket/all.zip`.
        protocol = first.partition("://")[0]
        return [f"{protocol}://{found.lstrip('/')}::{rest}" for found in paths]
    # A cache in front of another file system: `simplecache::s3://bucket/*.csv`.
    protocol = rest.partition("://")[0]
    return [f"{first}::{protocol}://{found}" for found in paths]


def open_file(name: str, compression: Compression = "", offset: int = 0) -> ByteStream:
    """Open a file for reading in blocks.

    Args:
        name: A local path or an fsspec URL.
        compression: `""`, `"GZIP"` or `"ZLIB"`.
        offset: Where to begin, counted in bytes of the inflated content.

    Raises:
        NotFoundError: The file does not exist.
        FailedPreconditionError: It is a folder, or may not be read.
        UnavailableError: Its file system does not answer.
        DataLossError: The content before `offset` is damaged.
    """
    try:
        stream = cast(ByteStream, _open(name.removeprefix("file://"), "rb"))
        if not compression:
            if offset:
                cast(BinaryIO, stream).seek(offset)
            return stream
    except OSError as error:
        raise _explain(name, error) from error
    inflating = InflatingStream(stream, compression, name)
    try:
        while offset:
            skipped = inflating.read(min(offset, _SKIP_BLOCK))
            if not skipped:
                break
            offset -= len(skipped)
    except BaseException:
        inflating.close()
        raise
    return inflating


def create_file(name: str) -> BinaryIO:
    """Open a file for writing, empty; what the name held before is gone.

    Raises:
        NotFoundError: Its folder does not exist.
        FailedPreconditionError: It is a folder, or may not be written.
        UnavailableError: Its file system does not answer.
    """
    try:
        return cast(BinaryIO, _open(name.removeprefix("file://"), "wb"))
    except OSError as error:
        raise _explain(name, error) from error


def _open(name: str, mode: str) -> Any:
    if not is_local(name):
        return fsspec.open(name, mode).open()
    # Readers ask for large blocks themselves; a buffer in between would only copy.
    return io.FileIO(name, "r") if mode == "rb" else open(name, "wb")


def _explain(name: str, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError):
        is_pattern = _MAGIC.search(name) or _LIST_IN_BRACES.search(name)
        advice = "; it looks like a pattern: use Dataset.list_files" if is_pattern else ""
        return NotFoundError(f"No such file: {name!r}{advice}")
    if isinstance(error, IsADirectoryError):
        return FailedPreconditionError(f"{name!r} is a folder; name the files in it")
    if isinstance(error, PermissionError):
        return FailedPreconditionError(f"{name!r} may not be opened: {error.strerror or error}")
    return UnavailableError(f"{name!r} cannot be opened: {error}")


@dataclass(frozen=True)
class FileNamesSource(IndexedSource):
    """The names of files, one str an index.

    Names that sharding by file recognises: each worker may take its own part of them.

    Args:
        patterns: The patterns that were asked for.
        names: The names that they matched, in the order in which they are to be given.
    """

    patterns: tuple[str, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", as_names("patterns", self.patterns))
        object.__setattr__(self, "names", as_names("names", self.names))

    @classmethod
    def matching(cls, patterns: FileName | Iterable[FileName]) -> FileNamesSource:
        """Return the sorted names of all files that match; see `match_files`."""
        wanted = as_names("patterns", patterns)
        return cls(wanted, match_files(wanted))

    @property
    def size(self) -> int:
        """Number of names."""
        return len(self.names)

    @property
    def element_spec(self) -> Spec | None:
        """One str."""
        return ArraySpec((), np.dtype("U"))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return an object array of names with the shape of `indices`."""
        names = self.names
        column = np.empty(indices.size, object)
        column[:] = [names[index] for index in indices.ravel().tolist()]
        return column.reshape(indices.shape)
