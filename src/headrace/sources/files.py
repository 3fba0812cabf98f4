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

from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec, Spec
from headrace.errors import FailedPreconditionError, NotFoundError, UnavailableError
from headrace.plan.source import Position, Reader
from headrace.sources.compression import ByteStream, Compression, InflatingStream
from headrace.sources.memory import IndexedReader, check_range

__all__ = [
    "FileName",
    "FileNamesSource",
    "as_names",
    "create_file",
    "is_local",
    "match_files",
    "open_file",
]

FileName: TypeAlias = str | os.PathLike[str]

_MAGIC = re.compile(r"[*?\[]")
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
    several: Any = [names] if isinstance(names, str | os.PathLike) else names
    if isinstance(several, bytes) or not isinstance(several, Iterable):
        raise TypeError(
            f"{argument} must be a str, an os.PathLike or a sequence of these, got {several!r}"
        )
    found: list[str] = []
    for name in several:
        text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
        if not isinstance(text, str):
            raise TypeError(
                f"{argument} must hold str or os.PathLike, got {name!r} "
                f"({type(name).__name__}) at index {len(found)}"
            )
        if not text:
            raise ValueError(f"{argument} holds an empty name at index {len(found)}")
        found.append(str(text))
    if not found:
        raise ValueError(f"{argument} is empty; give at least one name")
    return tuple(found)


def is_local(name: str) -> bool:
    """Tell whether a name is a path of this machine's file system."""
    return "://" not in name and "::" not in name


def match_files(patterns: FileName | Iterable[FileName]) -> tuple[str, ...]:
    """Return the names of all files that match any of `patterns`, sorted, each once.

    Patterns know `*`, `?`, `[...]` and `**` (any number of folders). A file whose name is exactly
    the pattern is taken as it is, whatever characters it holds. Folders do not match.

    Raises:
        NotFoundError: No file matches at all, or a name without wildcards does not exist.
    """
    wanted = as_names("patterns", patterns)
    found: set[str] = set()
    for pattern in wanted:
        pattern = pattern.removeprefix("file://")
        names = _match_local(pattern) if is_local(pattern) else _match_remote(pattern)
        if not names and not _MAGIC.search(pattern):
            raise NotFoundError(f"No such file: {pattern!r}")
        found.update(names)
    if not found:
        shown = ", ".join(repr(pattern) for pattern in wanted)
        raise NotFoundError(f"No files matched pattern: {shown}")
    return tuple(sorted(found))


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
        return NotFoundError(f"No such file: {name!r}")
    if isinstance(error, IsADirectoryError):
        return FailedPreconditionError(f"{name!r} is a folder; name the files in it")
    if isinstance(error, PermissionError):
        return FailedPreconditionError(f"{name!r} may not be opened: {error.strerror or error}")
    return UnavailableError(f"{name!r} cannot be opened: {error}")


@dataclass(frozen=True)
class FileNamesSource:
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
    def matching(cls, patterns: FileName | Sequence[FileName]) -> FileNamesSource:
        """Return the sorted names of all files that match; see `match_files`."""
        return cls(as_names("patterns", patterns), match_files(patterns))

    @property
    def size(self) -> int:
        """Number of names."""
        return len(self.names)

    @property
    def element_spec(self) -> Spec | None:
        """One str."""
        return ArraySpec((), np.dtype("U"))

    @property
    def elements_per_index(self) -> int | None:
        """Always 1."""
        return 1

    @property
    def splittable(self) -> bool:
        """Always true."""
        return True

    def open(self, start: int, stop: int, position: Position = None) -> Reader:
        """Return a reader of names `start` to `stop` - 1."""
        check_range(start, stop, self.size)
        return IndexedReader(self._read, start, stop, position)

    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return an object array of names with the shape of `indices`."""
        column = np.empty(len(self.names), object)
        column[:] = self.names
        return column.take(indices)

    def _read(self, start: int, stop: int) -> Chunk:
        return Chunk.of_rows(list(self.names[start:stop]))
