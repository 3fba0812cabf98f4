"""Open and create files by name: a local path, or a URL that fsspec knows.

Local files take the short way past fsspec.

Folders that are filled by one program and read by others meanwhile: by path or by URL.

Rule 1. A large file is created, written, and *published* when it is whole, under a name that it
        gets then: only then do others see it. What was not published is a leftover, of a process
        that is at work or was killed.
Rule 2. A small file is written whole or not at all.
Rule 3. What was published survives the process at once. Where a small file is found after a power
        cut, all that was published before it is whole, as far as the store keeps its promises.

On a local disk the file is renamed. Other stores cannot rename, or copy the file to do it: there it
keeps the name under which it was created, and a second, tiny file has the other one.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from headrace import storage
from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from headrace.storage.compression import ByteStream, Compression, InflatingStream
from headrace.storage.names import FileName, as_names, is_local, is_pattern

__all__ = ["Folder", "LocalFolder", "create_file", "open_file", "open_folder"]


class Folder(ABC):
    """A folder of files, which need not exist yet.

    Attributes:
        url: Its path or URL.
        is_local: Whether its files can be mapped into memory by their paths.
    """

    url: str
    is_local: bool = False

    @abstractmethod
    def path(self, name: str) -> str:
        """Return the path or URL of a file in it."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names under which files were published, sorted; there may be others."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return the names of files that were created, and may not be published, sorted."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return what a file holds.

        Raises:
            NotFoundError: There is none of this name.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file, in place of one of this name."""

    @abstractmethod
    def create(self, name: str) -> BinaryIO:
        """Open a file for writing, empty; the folder is made if need be."""

    @abstractmethod
    def publish(self, name: str, public: str) -> None:
        """Let others see a file that was created, written and closed. May be called twice.

        Args:
            name: The name under which it was created.
            public: The name under which others see it.
        """

    @abstractmethod
    def found_as(self, name: str, public: str) -> str:
        """Return under which of its two names a file that was published is opened."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, published or not, if it is there."""


def open_folder(url: FileName) -> Folder:
    """Return the folder of this path or URL; nothing is looked at yet."""
    (name,) = as_names("path", [url])
    name = name.removeprefix("file://")
    return LocalFolder(name) if is_local(name) else storage.remote.RemoteFolder(name)


class LocalFolder(Folder):
    """A folder of this machine's file system."""

    is_local = True

    def __init__(self, path: str) -> None:
        self.url = path

    def path(self, name: str) -> str:
        """Return the path of a file in it."""
        return os.path.join(self.url, name)

    def names(self) -> list[str]:
        """Return the names under which files were published, and others, sorted."""
        return sorted(name for name in self._listed() if not name.endswith(_PARTIAL))

    def leftovers(self) -> list[str]:
        """Return the names of files that were created and not published, sorted."""
        return sorted(n.removesuffix(_PARTIAL) for n in self._listed() if n.endswith(_PARTIAL))

    def read(self, name: str) -> bytes:
        """Return what a file holds."""
        path = self.path(name)
        with _explained(path), open(path, "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, in place of one of this name."""
        with self.create(name) as file, _explained(self.path(name)):
            rest = memoryview(data)
            while rest.nbytes:  # an unbuffered file takes less at a time where a disk is full
                rest = rest[file.write(rest) :]
        self.publish(name, name)
        # With it, the names of all that was published before are on the disk.
        with _explained(self.url):
            _flush(self.url)

    def create(self, name: str) -> BinaryIO:
        """Open a file for writing, empty; the folder is made if need be."""
        path = self.path(name)
        with _explained(path):
            os.makedirs(self.url, exist_ok=True)
            return open(path + _PARTIAL, "wb", buffering=0)

    def publish(self, name: str, public: str) -> None:
        """Let others see a file that was created, written and closed."""
        path, partial = self.path(public), self.path(name) + _PARTIAL
        with _explained(path):
            if os.path.exists(path) and not os.path.exists(partial):
                return
            _flush(partial)
            os.replace(partial, path)

    def found_as(self, name: str, public: str) -> str:
        """Return under which of its two names a file that was published is opened."""
        return public

    def remove(self, name: str) -> None:
        """Remove a file, published or not, if it is there."""
        path = self.path(name)
        with _explained(path):
            for either in (path, path + _PARTIAL):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(either)

    def _listed(self) -> list[str]:
        try:
            with _explained(self.url):
                return os.listdir(self.url)
        except NotFoundError:
            return []


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"No such file: {path!r}") from error
    except (NotADirectoryError, FileExistsError) as error:
        raise FailedPreconditionError(
            f"{path!r} cannot be used: a part of the path is a file, and a folder is needed"
        ) from error
    except (PermissionError, IsADirectoryError) as error:
        raise FailedPreconditionError(f"{path!r} cannot be used: {error.strerror}") from error
    except OSError as error:
        raise UnavailableError(f"{path!r} cannot be used: {error.strerror or error}") from error


_PARTIAL = ".partial"


_LIST_IN_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
_SKIP_BLOCK = 1 << 20


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
        DataLossError: The content before `offset` is damaged, or there is less.
    """
    try:
        stream = cast(ByteStream, _open(name.removeprefix("file://"), "rb"))
        if not compression:
            if offset:
                _seek(cast(BinaryIO, stream), offset, name)
            return stream
    except OSError as error:
        raise _explain(name, error) from error
    inflating = InflatingStream(stream, compression, name)
    left = offset
    try:
        while left:
            skipped = inflating.read(min(left, _SKIP_BLOCK))
            if not skipped:
                raise _too_short(name, offset - left, offset)
            left -= len(skipped)
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
    except FileNotFoundError as error:
        folder = os.path.dirname(name)
        raise NotFoundError(
            f"{name!r} cannot be written: the folder {folder!r} does not exist; create it first"
        ) from error
    except OSError as error:
        raise _explain(name, error) from error


def _open(name: str, mode: str) -> Any:
    if not is_local(name):
        return storage.remote.open_url(name, mode)
    # Readers ask for large blocks themselves; a buffer in between would only copy.
    return io.FileIO(name, "r") if mode == "rb" else open(name, "wb")


def _seek(stream: BinaryIO, offset: int, name: str) -> None:
    size = stream.seek(0, os.SEEK_END)
    if size < offset:
        stream.close()
        raise _too_short(name, size, offset)
    stream.seek(offset)


def _too_short(name: str, size: int, offset: int) -> DataLossError:
    return DataLossError(
        f"{name!r} has {size} bytes, but {offset} were read before the state was saved; restore it "
        "with the same data"
    )


def _explain(name: str, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError):
        looks_so = is_pattern(name) or _LIST_IN_BRACES.search(name)
        advice = "; it looks like a pattern: use Dataset.list_files" if looks_so else ""
        return NotFoundError(f"No such file: {name!r}{advice}")
    if isinstance(error, IsADirectoryError):
        return FailedPreconditionError(f"{name!r} is a folder; name the files in it")
    if isinstance(error, PermissionError):
        return FailedPreconditionError(f"{name!r} may not be opened: {error.strerror or error}")
    return UnavailableError(f"{name!r} cannot be opened: {error}")
