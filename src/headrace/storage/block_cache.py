"""Cache of the blocks of remote files in a directory of a local disk, shared by processes.

Each block is one file, whose name is a hash of the URL, the version (size and ETag or modification
time) and the number of the block. It is written under another name and renamed, and ends with its
length and CRC-32C, so a block that is damaged or cut off is never used.

Blocks that were not used for longest are removed when the directory exceeds its limit. Each process
measures the directory after it has written a sixteenth of the limit, so n processes may exceed the
limit by n sixteenths, or by one block each if that is more.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
from collections.abc import Callable

import google_crc32c

from headrace.storage.options import StorageCache

__all__ = ["BLOCK_BYTES", "BlockCache"]

BLOCK_BYTES = 8 << 20
"""Size of a block in bytes, except for the last one of a file."""

_logger = logging.getLogger(__name__)

_SUFFIX = ".block"
_PARTIAL = ".partial"
_ABANDONED_SECONDS = 3600.0
"""Age in seconds from which on a partial file is assumed to be that of a killed process."""
_TRAILER = struct.Struct("<QI")
_MEASURES_PER_LIMIT = 16
"""How often the directory is measured while as many bytes are written as its limit permits."""


class BlockCache:
    """The cached blocks of one version of a file.

    Args:
        cache: The cache.
        url: URL of the file.
        version: Text that changes with the contents of the file.
    """

    def __init__(self, cache: StorageCache, url: str, version: str) -> None:
        self._directory = _find_directory(cache)
        self._identity = f"{url}\0{version}\0{BLOCK_BYTES}"

    def read(self, number: int, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Return a block, which is fetched if it is not in the cache.

        Args:
            number: Number of the block in the file.
            size: Size of the block in bytes.
            fetch: Reads the block from the file.
        """
        if not size:
            return b""
        text = f"{self._identity}\0{number}".encode()
        name = hashlib.blake2b(text, digest_size=16).hexdigest() + _SUFFIX
        data = self._directory.read(name, size)
        if data is None:
            data = fetch()
            if len(data) == size:
                self._directory.write(name, data)
        return data


class _CacheDirectory:
    """A directory of blocks. One object per directory and process; safe for threads."""

    def __init__(self, cache: StorageCache) -> None:
        self._path = cache.directory
        self._max_bytes = cache.max_bytes
        self._lock = threading.Lock()
        #: Bytes that may be written before the directory is measured. The first block measures it.
        self._bytes_until_measured = 0
        self._has_warned = False

    def read(self, name: str, size: int) -> bytes | None:
        """Return a block; None if it is missing or damaged."""
        path = os.path.join(self._path, name)
        try:
            with open(path, "rb") as file:
                stored = file.read()
        except OSError:
            return None
        data, trailer = stored[:size], stored[size:]
        if trailer != _make_trailer(data) or len(data) != size:
            _remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of its last use
        return data

    def write(self, name: str, data: bytes) -> None:
        """Store a block, and remove others if the limit is exceeded. Errors are logged once."""
        size = len(data) + _TRAILER.size
        if size > self._max_bytes:
            return
        path = os.path.join(self._path, name)
        partial = f"{path}.{os.getpid()}.{threading.get_ident()}{_PARTIAL}"
        try:
            os.makedirs(self._path, exist_ok=True)
            self._make_room(size)
            with open(partial, "wb") as file:
                file.write(data)
                file.write(_make_trailer(data))
            os.replace(partial, path)
        except OSError as error:
            _remove(partial)
            self._warn(error)

    def _make_room(self, size: int) -> None:
        """Remove the blocks that were not used for longest, if the limit would be exceeded."""
        with self._lock:
            self._bytes_until_measured -= size
            if self._bytes_until_measured >= 0:
                return
            reserve = max(size, self._max_bytes // _MEASURES_PER_LIMIT)
            blocks = self._list_blocks()
            total = sum(block[1] for block in blocks)
            for _, length, path in sorted(blocks):
                if total + reserve <= self._max_bytes:
                    break
                _remove(path)
                total -= length
            self._bytes_until_measured = reserve - size

    def _list_blocks(self) -> list[tuple[float, int, str]]:
        """Return the time of the last use, the size and the path of each block."""
        blocks = []
        newest = 0.0
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.endswith((_SUFFIX, _PARTIAL)):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        newest = max(newest, status.st_mtime)
                        blocks.append((status.st_mtime, status.st_size, entry.path))
        found = []
        for block in blocks:
            # The file system's own clock decides: others in the directory are as new.
            if block[2].endswith(_PARTIAL) and block[0] > newest - _ABANDONED_SECONDS:
                continue
            found.append(block)
        return found

    def _warn(self, error: OSError) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        _logger.warning(
            "cannot store blocks of remote files in %r (%s); they are read directly",
            self._path,
            error.strerror or error,
        )


def _find_directory(cache: StorageCache) -> _CacheDirectory:
    with _directories_lock:
        directory = _directories.get(cache)
        if directory is None:
            directory = _directories[cache] = _CacheDirectory(cache)
        return directory


_directories: dict[StorageCache, _CacheDirectory] = {}
_directories_lock = threading.Lock()


def _make_trailer(data: bytes) -> bytes:
    return _TRAILER.pack(len(data), google_crc32c.value(data))


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)
