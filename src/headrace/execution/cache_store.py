"""Stores of `cache`: chunks in memory, or frames in a file.

A store is filled by one iterator and read by others once it is complete. The chunks of a complete
store do not change, so several threads read a `MemoryStore` without a lock. The lock of a
`MemoryCache` decides which store becomes the plan's. A `FileStore` belongs to one iterator.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import glob
import os
import struct
import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from headrace.element.chunk import Chunk
from headrace.element.frame_file import FrameReader, FrameWriter, read_exactly
from headrace.element.wire import copy_chunk, decode, encode
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.plan.buffering import CacheKey

__all__ = [
    "ElementStore",
    "FileStore",
    "FileStoreWriter",
    "MemoryCache",
    "MemoryStore",
    "StoreWriter",
    "memory_cache",
]


class ElementStore(ABC):
    """All elements of an epoch, in the order in which they were appended."""

    seed: int
    """Seed of the run that produced the elements."""

    @abstractmethod
    def read(self, start: int, limit: int) -> Chunk | None:
        """Return a copy of 1 to `limit` elements from number `start` on, or None at the end."""

    def read_borrowed(self, start: int, limit: int) -> Chunk | None:
        """Return the result of `read`, possibly without a copy; the caller must not modify it."""
        return self.read(start, limit)

    @abstractmethod
    def close(self) -> None:
        """Release files."""


class StoreWriter(ABC):
    """A store that is being filled."""

    @abstractmethod
    def append(self, chunk: Chunk) -> None:
        """Add elements."""

    @abstractmethod
    def complete(self) -> None:
        """Mark the store as complete, so that others may read it."""

    @abstractmethod
    def close(self) -> None:
        """Release files and discard an incomplete store."""


# --- in memory ----------------------------------------------------------------------------------


class MemoryCache:
    """The in-memory cache of one plan, filled by the first iterator that completes an epoch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: MemoryStore | None = None

    def complete_store(self) -> MemoryStore | None:
        """Return the cache if it is complete, else None."""
        return self._store

    def offer(self, store: MemoryStore) -> None:
        """Make `store` the cache if there is none yet."""
        with self._lock:
            if self._store is None:
                self._store = store


_memory_caches: weakref.WeakKeyDictionary[CacheKey, MemoryCache] = weakref.WeakKeyDictionary()
_memory_caches_lock = threading.Lock()


def memory_cache(key: CacheKey) -> MemoryCache:
    """Return the in-memory cache of a plan, which lives as long as the plan."""
    with _memory_caches_lock:
        return _memory_caches.setdefault(key, MemoryCache())


class MemoryStore(ElementStore, StoreWriter):
    """Chunks in memory."""

    def __init__(self, cache: MemoryCache | None, seed: int) -> None:
        self.seed = seed
        self._cache = cache
        self._chunks: list[Chunk] = []
        self._starts: list[int] = []
        self._size = 0

    def append(self, chunk: Chunk) -> None:
        # Copied, because the consumer may write into these elements. The copy is read-only.
        frames = [memoryview(bytearray(frame)).toreadonly() for frame in encode(chunk)]
        self._starts.append(self._size)
        self._chunks.append(decode(frames).with_metadata(chunk.metadata))
        self._size += chunk.size

    def complete(self) -> None:
        if self._cache is not None:
            self._cache.offer(self)

    def read(self, start: int, limit: int) -> Chunk | None:
        borrowed = self.read_borrowed(start, limit)
        return None if borrowed is None else copy_chunk(borrowed)

    def read_borrowed(self, start: int, limit: int) -> Chunk | None:
        if start >= self._size:
            return None
        index = bisect.bisect_right(self._starts, start) - 1
        offset = start - self._starts[index]
        chunk = self._chunks[index]
        return chunk.slice(offset, min(offset + limit, chunk.size))

    def close(self) -> None:
        return


# --- in a file ----------------------------------------------------------------------------------

_MAGIC = b"HRCACHE4"
_MAGIC_PREFIX = b"HRCACHE"
_PARTIAL = ".partial-"
_ABANDONED_SECONDS = 3600.0
"""Time since the last write after which a partial file is removed if no process has locked it."""
# Header after the magic: seed, and length of the identity in bytes. The identity follows, and the
# CRC-32C of all before.
_HEADER = struct.Struct("<qH")
_CHECKSUM = struct.Struct("<I")


class FileStore(ElementStore):
    """A complete cache file.

    It begins with the identity of the plan that produced its elements, so that other plans do not
    read it.

    Args:
        path: The file.
        identity: Identity of the plan.
        kind: Step that the file belongs to, for messages: "cache" or "snapshot".
    """

    def __init__(self, path: Path, identity: str, kind: str = "cache") -> None:
        self._file: BinaryIO = path.open("rb")
        try:
            self.seed: int = self._check_header(path, identity, kind)
            self._frames = FrameReader(self._file, f"{kind} file {path}")
        except BaseException:
            self._file.close()
            raise

    @staticmethod
    def find(filename: str, identity: str, kind: str = "cache") -> FileStore | None:
        """Return the complete cache of this name, or None if there is none.

        Raises:
            FailedPreconditionError: If it contains elements of another plan, or was written by a
                version that stored no identity.
            DataLossError: If it is no cache file, or damaged.
        """
        path = Path(filename)
        return FileStore(path, identity, kind) if path.exists() else None

    def _check_header(self, path: Path, identity: str, kind: str) -> int:
        """Check the identity in the header; return the seed."""
        name = f"{kind} file {path}"
        head = self._file.read(len(_MAGIC))
        if not head.startswith(_MAGIC_PREFIX):
            raise DataLossError(f"{path} is not a {kind} file; remove it, or use another file name")
        if head != _MAGIC:
            found, supported = (
                magic[len(_MAGIC_PREFIX) :].decode("ascii", "replace") for magic in (head, _MAGIC)
            )
            raise FailedPreconditionError(
                f"{name} was written by another version of Headrace: it has format {found}, but "
                f"this version reads format {supported}; remove it, so that it is written again"
            )
        seed: int
        header = read_exactly(self._file, _HEADER.size, name)
        seed, length = _HEADER.unpack(header)
        stored = read_exactly(self._file, length, name)
        (expected,) = _CHECKSUM.unpack(read_exactly(self._file, _CHECKSUM.size, name))
        if google_crc32c.value(head + header + stored) != expected:
            raise DataLossError(
                f"{name} is damaged: its header does not match its checksum; remove it, so that "
                "it is written again"
            )
        found = stored.decode()
        if found != identity:
            raise FailedPreconditionError(
                f"{name} contains the elements of another pipeline: {found}, expected "
                f"{identity}; remove the file if you changed the pipeline, or use another file "
                "name"
            )
        return seed

    def read(self, start: int, limit: int) -> Chunk | None:
        return self._frames.read(start, limit)

    def close(self) -> None:
        self._file.close()


class FileStoreWriter(StoreWriter):
    """A cache file being written under a temporary name, and renamed when complete.

    Args:
        filename: Name of the complete file.
        seed: Seed of the run that produces the elements.
        identity: Identity of the plan.
        kind: Step that the file belongs to, for messages: "cache" or "snapshot".

    Raises:
        FailedPreconditionError: If the file cannot be written.
    """

    def __init__(self, filename: str, seed: int, identity: str, kind: str = "cache") -> None:
        self._path = Path(filename)
        self._kind = kind
        self._partial = self._path.with_name(f"{self._path.name}{_PARTIAL}{uuid.uuid4().hex[:8]}")
        self._file = self._create_file()
        self._lock_and_clean_up()
        name = identity.encode()
        header = _MAGIC + _HEADER.pack(seed, len(name)) + name
        self._file.write(header + _CHECKSUM.pack(google_crc32c.value(header)))
        self._frames = FrameWriter(self._file)

    def _create_file(self) -> BinaryIO:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._partial.open("wb")
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot write {self._kind} file '{self._path}': {error.strerror or error}; use a "
                "file in a directory with write access"
            ) from error

    def _lock_and_clean_up(self) -> None:
        """Lock the partial file until it is closed, and remove those of processes that were killed.

        Some network file systems have no locks, or only locks of one host: there, a file that was
        written to lately is not removed.
        """
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            now = os.fstat(self._file.fileno()).st_mtime  # of the file system's clock
            for other in self._path.parent.glob(f"{glob.escape(self._path.name)}{_PARTIAL}*"):
                if other == self._partial or other.stat().st_mtime > now - _ABANDONED_SECONDS:
                    continue
                with contextlib.suppress(BlockingIOError), other.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    other.unlink()

    def append(self, chunk: Chunk) -> None:
        self._frames.append(chunk)

    def complete(self) -> None:
        self._frames.finish()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it writes what is buffered, and the disk may be full
            self._file.close()
        # A complete file was renamed, so this name no longer exists.
        self._partial.unlink(missing_ok=True)
