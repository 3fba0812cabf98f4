"""Open remote files that survive transient errors, and may be cached on a local disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.spec import AbstractBufferedFile

from headrace.storage.block_cache import BLOCK_BYTES, BlockCache
from headrace.storage.file_systems import convert_error, is_object_store
from headrace.storage.options import StorageCache
from headrace.storage.retrying import retry_read

__all__ = ["RemoteStream", "read_version"]

T = TypeVar("T")

_FIRST_READ_BYTES = 64 << 10
_MAX_READ_BYTES = 8 << 20


def read_version(url: str, system: Any, path: str) -> tuple[int | None, str]:
    """Return the size of a file (None if unknown), and a text that changes with its contents."""

    def read() -> tuple[Any, str]:
        info = system.info(path)
        return info, info.get("e_tag") or str(system.ukey(path))

    try:
        info, version = retry_read(read, url, 0)
    except Exception as error:
        raise convert_error(error) from error
    if info["type"] == "directory":
        raise IsADirectoryError(url)
    size = info.get("size")
    return None if size is None else int(size), f"{size}:{version}"


class RemoteStream:
    """A remote file, open for reading.

    A read that fails for a transient reason is repeated at its offset, in a new connection.

    Args:
        url: URL of the file, for messages.
        system: Its fsspec file system.
        path: Path of the file in the file system.
        cache: Cache of the blocks of files; None reads them directly.

    Raises:
        OSError: If the file does not exist, or cannot be opened.
        UnavailableError: If it could not be opened before the deadline of retries.
    """

    def __init__(self, url: str, system: Any, path: str, cache: StorageCache | None) -> None:
        self._url = url
        self._offset = 0
        self._buffer = memoryview(b"")
        #: Offset of the buffer.
        self._base = 0
        self._blocks: BlockCache | None = None
        self._file: _ObjectFile | _HandleFile
        size = None
        if cache is not None:
            size, version = read_version(url, system, path)
            if size is not None:
                self._blocks = BlockCache(cache, url, version)
        if is_object_store(system):
            if size is None:
                size, _ = read_version(url, system, path)
            self._file = _ObjectFile(system, path, size or 0)
        else:
            self._file = _HandleFile(system, path, size)
            if self._blocks is None:
                self._retry(self._file.open)

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.is_closed

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, or fewer at the end; all of them if it is negative.

        Raises:
            OSError: If the file cannot be read.
            UnavailableError: If reading failed until the deadline of retries.
        """
        if self.closed:
            raise ValueError("the file is closed")
        pieces = []
        while size:
            piece = self._read_some(size)
            if not piece:
                break
            self._offset += len(piece)
            size -= len(piece) if size > 0 else 0
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._offset

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset of the next read, and return it."""
        if whence == os.SEEK_CUR:
            offset += self._offset
        elif whence == os.SEEK_END:
            size = self._file.size
            offset += self._retry(self._file.find_size) if size is None else size
        self._offset = offset
        return offset

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._buffer = memoryview(b"")
        self._file.close()

    def _read_some(self, size: int) -> bytes:
        """Return 1 to `size` bytes at the offset, or none at the end."""
        at = self._offset - self._base
        if not 0 <= at < len(self._buffer):
            if self._blocks is not None:
                at = self._fetch_block(self._blocks)
            elif self._file.reads_ahead:
                # The file has a buffer, so another one would only be a copy.
                return self._fetch(self._offset, _MAX_READ_BYTES if size < 0 else size)
            else:
                self._fetch_ahead(size)
                at = 0
        end = len(self._buffer) if size < 0 else at + size
        return bytes(self._buffer[at:end])

    def _fetch_block(self, blocks: BlockCache) -> int:
        """Fill the buffer with the block at the offset, and return where in it the offset is."""
        number, at = divmod(self._offset, BLOCK_BYTES)
        start = self._offset - at
        size = self._file.size
        expected = BLOCK_BYTES if size is None else max(0, min(BLOCK_BYTES, size - start))
        data = blocks.read(number, expected, lambda: self._fetch(start, expected))
        self._buffer, self._base = memoryview(data), start
        return at

    def _fetch_ahead(self, size: int) -> None:
        """Fill the buffer from the offset on: with more and more as long as reading is sequential.

        A request costs a round trip.
        """
        is_sequential = self._offset == self._base + len(self._buffer)
        ahead = 2 * len(self._buffer) if is_sequential else 0
        wanted = max(size, _FIRST_READ_BYTES, min(ahead, _MAX_READ_BYTES))
        wanted = _MAX_READ_BYTES if size < 0 else wanted
        self._buffer, self._base = memoryview(self._fetch(self._offset, wanted)), self._offset

    def _fetch(self, offset: int, size: int) -> bytes:
        """Read from the file: `size` bytes, or fewer at its end."""
        file = self._file

        def read() -> bytes:
            left = size if file.size is None else max(0, min(size, file.size - offset))
            data = file.read(offset, left) if left else b""
            if file.size is not None and len(data) < left:
                raise ConnectionError(f"only {len(data)} of {left} bytes were received")
            return data

        return self._retry(read, offset)

    def _retry(self, call: Callable[[], T], offset: int | None = None) -> T:
        try:
            return retry_read(call, self._url, self._offset if offset is None else offset)
        except Exception as error:
            converted = convert_error(error)
            if converted is error:
                raise
            raise converted from error


class _ObjectFile:
    """A file of an object store, read by ranges. Each method makes one attempt."""

    reads_ahead = False

    def __init__(self, system: Any, path: str, size: int) -> None:
        self.size: int | None = size
        self.is_closed = False
        self._system, self._path = system, path

    def read(self, offset: int, size: int) -> bytes:
        data: bytes = self._system.cat_file(self._path, start=offset, end=offset + size)
        return data

    def find_size(self) -> int:
        return self.size or 0

    def close(self) -> None:
        self.is_closed = True


class _HandleFile:
    """A file of fsspec, which is opened again after an error. Each method makes one attempt.

    Its size is None if it is unknown whether all bytes can be expected to be readable.
    """

    reads_ahead = True

    def __init__(self, system: Any, path: str, size: int | None) -> None:
        self.size = size
        self.is_closed = False
        self._system, self._path = system, path
        self._handle: Any = None

    def open(self) -> Any:
        if self._handle is None:
            self._handle = self._system.open(self._path, "rb")
            if isinstance(self._handle, AbstractBufferedFile) and self._handle.size is not None:
                self.size = int(self._handle.size)
        return self._handle

    def read(self, offset: int, size: int) -> bytes:
        try:
            handle = self.open()
            # Several handles of a file in memory share one position.
            if handle.tell() != offset:
                handle.seek(offset)
            data: bytes = handle.read(size)
        except BaseException:
            self._discard()
            raise
        return data

    def find_size(self) -> int:
        try:
            return int(self.open().seek(0, os.SEEK_END))
        except BaseException:
            self._discard()
            raise

    def close(self) -> None:
        self.is_closed = True
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def _discard(self) -> None:
        """Close the handle, which may be broken."""
        handle, self._handle = self._handle, None
        try:
            if handle is not None:
                handle.close()
        except Exception:
            pass  # the error that broke it is raised
