"""Files by local path or by fsspec URL, and folders that are written and read concurrently.

Local files bypass fsspec.

Rule 1. A large file is created, written, and *published* under another name when it is complete;
        only then do readers see it. An unpublished file belongs to a process that is running or was
        killed.
Rule 2. A small file is written atomically.
Rule 3. Published files survive the process. If a small file exists after a power failure, all files
        published before it are complete, provided that the store keeps its guarantees.

On a local disk, publishing renames the file. Other stores cannot rename, or rename by copying;
there the file keeps its original name, and a tiny second file has the published name.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from headrace import storage
from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.storage.compression import ByteStream, Compression, InflatingStream
from headrace.storage.names import FileName, as_names, is_local, is_pattern
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = [
    "Folder",
    "LocalFolder",
    "create_file",
    "file_error",
    "find_file_size",
    "open_file",
    "open_folder",
    "read_file_version",
]


class Folder(ABC):
    """A folder of files, which need not exist yet.

    Attributes:
        url: Path or URL of the folder.
        is_local: Whether its files can be memory-mapped by path.
    """

    url: str
    is_local: bool = False

    @abstractmethod
    def path(self, name: str) -> str:
        """Return the path or URL of a file in the folder."""

    @abstractmethod
    def list_published(self) -> list[str]:
        """Return the sorted names of published files; the list may contain others."""

    @abstractmethod
    def list_unpublished(self) -> list[str]:
        """Return the sorted names of created files that may be unpublished."""

    @abstractmethod
    def list_tree(self) -> list[str]:
        """Return the sorted names of all files in the folder and below: `"name"`, `"sub/name"`.

        Raises:
            NotFoundError: If the folder does not exist, where the file system has empty folders.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the contents of a file.

        Raises:
            NotFoundError: If there is no such file.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file, replacing an existing one."""

    @abstractmethod
    def create(self, name: str) -> BinaryIO:
        """Open a new file for writing; create the folder if needed."""

    @abstractmethod
    def publish(self, name: str, public: str) -> None:
        """Publish a file that was created, written and closed. Idempotent.

        Args:
            name: Name under which the file was created.
            public: Name under which readers see it.
        """

    @abstractmethod
    def find_name(self, name: str, public: str) -> str:
        """Return which of the two names of a published file to open."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, published or not, if it exists."""


def open_folder(url: FileName, options: StorageOptions = NO_OPTIONS) -> Folder:
    """Return the folder of a path or URL, without accessing it."""
    (name,) = as_names("path", [url])
    name = name.removeprefix("file://")
    return LocalFolder(name) if is_local(name) else storage.remote.RemoteFolder(name, options)


class LocalFolder(Folder):
    """A folder of the local file system."""

    is_local = True

    def __init__(self, path: str) -> None:
        self.url = path

    def path(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.url, name)

    def list_published(self) -> list[str]:
        """Return the sorted names of published files and other files."""
        return sorted(name for name in self._list_names() if not name.endswith(_PARTIAL))

    def list_unpublished(self) -> list[str]:
        """Return the sorted names of created but unpublished files."""
        return sorted(n.removesuffix(_PARTIAL) for n in self._list_names() if n.endswith(_PARTIAL))

    def list_tree(self) -> list[str]:
        """Return the sorted names of all files in the folder and below."""
        names = []
        with _convert_errors(self.url):
            for parent, _, files in os.walk(self.url, onerror=_raise_error, followlinks=True):
                below = os.path.relpath(parent, self.url)
                names += files if below == "." else [f"{below}/{name}" for name in files]
        return sorted(names)

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        path = self.path(name)
        with _convert_errors(path), open(path, "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, replacing an existing one."""
        with self.create(name) as file, _convert_errors(self.path(name)):
            rest = memoryview(data)
            while rest.nbytes:  # on a full disk, an unbuffered file may write fewer bytes
                rest = rest[file.write(rest) :]
        self.publish(name, name)
        # This also makes the names of all files published before durable.
        with _convert_errors(self.url):
            _flush(self.url)

    def create(self, name: str) -> BinaryIO:
        """Open a new file for writing; create the folder if needed."""
        path = self.path(name)
        with _convert_errors(path):
            os.makedirs(self.url, exist_ok=True)
            return open(path + _PARTIAL, "wb", buffering=0)

    def publish(self, name: str, public: str) -> None:
        """Publish a file that was created, written and closed."""
        path, partial = self.path(public), self.path(name) + _PARTIAL
        with _convert_errors(path):
            if os.path.exists(path) and not os.path.exists(partial):
                return
            _flush(partial)
            os.replace(partial, path)

    def find_name(self, name: str, public: str) -> str:
        """Return which of the two names of a published file to open."""
        return public

    def remove(self, name: str) -> None:
        """Remove a file, published or not, if it exists."""
        path = self.path(name)
        with _convert_errors(path):
            for either in (path, path + _PARTIAL):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(either)

    def _list_names(self) -> list[str]:
        try:
            with _convert_errors(self.url):
                return os.listdir(self.url)
        except NotFoundError:
            return []


def _raise_error(error: OSError) -> None:
    raise error


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _convert_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"No such file: {path!r}") from error
    except (NotADirectoryError, FileExistsError) as error:
        raise FailedPreconditionError(
            f"cannot use {path!r}: a parent of it is a file, but must be a folder"
        ) from error
    except (PermissionError, IsADirectoryError) as error:
        raise FailedPreconditionError(f"cannot use {path!r}: {error.strerror}") from error
    except OSError as error:
        raise UnavailableError(f"cannot use {path!r}: {error.strerror or error}") from error


_PARTIAL = ".partial"


_LIST_IN_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
_SKIP_BLOCK = 1 << 20


def open_file(
    name: str,
    compression: Compression = "",
    offset: int = 0,
    options: StorageOptions = NO_OPTIONS,
) -> ByteStream:
    """Open a file for reading in blocks.

    Args:
        name: A local path or an fsspec URL.
        compression: `""`, `"GZIP"` or `"ZLIB"`.
        offset: Offset to start at, in bytes of the decompressed content.
        options: Options of the file system of a URL.

    Raises:
        NotFoundError: If the file does not exist.
        FailedPreconditionError: If it is a folder, or may not be read.
        UnavailableError: If its file system does not respond.
        DataLossError: If the content before `offset` is damaged or shorter.
    """
    try:
        stream = _open(name.removeprefix("file://"), options)
        if not compression:
            if offset:
                _seek(stream, offset, name)
            return cast(ByteStream, stream)
    except OSError as error:
        raise file_error(name, error) from error
    inflating = InflatingStream(stream, compression, name)
    left = offset
    try:
        while left:
            skipped = inflating.read(min(left, _SKIP_BLOCK))
            if not skipped:
                raise _shortfile_error(name, offset - left, offset)
            left -= len(skipped)
    except BaseException:
        inflating.close()
        raise
    return inflating


def find_file_size(name: str, options: StorageOptions = NO_OPTIONS) -> int | None:
    """Return the size of a file in bytes, or None if it cannot be determined.

    Args:
        name: A local path or an fsspec URL.
        options: Options of the file system of a URL.
    """
    try:
        return read_file_version(name, options)[0]
    except (FailedPreconditionError, NotFoundError, UnavailableError):
        return None


def create_file(name: str) -> BinaryIO:
    """Open a new file for writing, replacing an existing one.

    Raises:
        NotFoundError: If its folder does not exist.
        FailedPreconditionError: If it is a folder, or may not be written.
        UnavailableError: If its file system does not respond.
    """
    try:
        path = name.removeprefix("file://")
        if is_local(path):
            return open(path, "wb")
        return cast(BinaryIO, storage.remote.create_url(path))
    except FileNotFoundError as error:
        folder = os.path.dirname(name)
        raise NotFoundError(
            f"cannot write {name!r}: the folder {folder!r} does not exist; create it first"
        ) from error
    except OSError as error:
        raise file_error(name, error) from error


def read_file_version(name: str, options: StorageOptions = NO_OPTIONS) -> tuple[int | None, str]:
    """Return the size of a file in bytes, and a text that changes with its contents.

    The size of a URL may be unknown (None).

    Args:
        name: A local path or an fsspec URL.
        options: Options of the file system of a URL.

    Raises:
        NotFoundError: If the file does not exist.
        FailedPreconditionError: If it is a folder, or may not be accessed.
        UnavailableError: If its file system does not respond.
    """
    try:
        path = name.removeprefix("file://")
        if not is_local(path):
            return storage.remote.read_url_version(path, options)
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(name)
        return status.st_size, f"{status.st_size}:{status.st_mtime_ns}"
    except OSError as error:
        raise file_error(name, error) from error


def _open(path: str, options: StorageOptions) -> Any:
    """Open a file for reading."""
    if not is_local(path):
        return storage.remote.open_url(path, options)
    # Readers request large blocks themselves; a buffer would only add a copy.
    return io.FileIO(path, "r")


def _seek(stream: Any, offset: int, name: str) -> None:
    size = stream.seek(0, os.SEEK_END)
    if size < offset:
        stream.close()
        raise _shortfile_error(name, size, offset)
    stream.seek(offset)


def _shortfile_error(name: str, size: int, offset: int) -> DataLossError:
    return DataLossError(
        f"{name!r} has {size} bytes, but {offset} had been read when the state was "
        "saved; restore it with the same data"
    )


def file_error(name: str, error: OSError) -> Exception:
    """Return the error to raise instead of `error` if a file cannot be opened."""
    if isinstance(error, HeadraceError):
        return error
    if isinstance(error, FileNotFoundError):
        looks_so = is_pattern(name) or _LIST_IN_BRACES.search(name)
        advice = "; it looks like a pattern: use Dataset.list_files" if looks_so else ""
        return NotFoundError(f"No such file: {name!r}{advice}")
    if isinstance(error, IsADirectoryError):
        return FailedPreconditionError(f"{name!r} is a folder; name the files in it")
    if isinstance(error, PermissionError):
        return FailedPreconditionError(f"no permission to open {name!r}: {error.strerror or error}")
    return UnavailableError(f"cannot open {name!r}: {error}")
