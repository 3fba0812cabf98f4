"""Where `cache` keeps elements: chunks in memory, or frames in a file.

A store is filled by one iterator and read by others once it is complete: the chunks of a complete
store do not change, so several threads read a `MemoryStore` without a lock. Whose store becomes the
plan's is decided under the lock of its `PlanCache`. A `FileStore` belongs to one iterator.
"""

from __future__ import annotations

import bisect
import os
import struct
import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO

from headrace.element.chunk import Chunk
from headrace.element.frame_file import FrameReader, FrameWriter, read_exactly
from headrace.element.wire import copied, decode, encode
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.plan.buffering import CacheKey

__all__ = ["FileFilling", "FileStore", "Filling", "MemoryStore", "PlanCache", "Store", "plan_cache"]


class Store(ABC):
    """Elements in the order in which they were appended, all of them."""

    seed: int
    """Seed of the run whose elements these are."""

    @abstractmethod
    def read(self, start: int, limit: int) -> Chunk | None:
        """Return a copy of 1 to `limit` elements from number `start` on; None: no more."""

    def lend(self, start: int, limit: int) -> Chunk | None:
        """Return what `read` does, for somebody who only reads it: perhaps without a copy."""
        return self.read(start, limit)

    @abstractmethod
    def close(self) -> None:
        """Release files."""


class Filling(ABC):
    """A store that is being filled."""

    @abstractmethod
    def append(self, chunk: Chunk) -> None:
        """Add elements."""

    @abstractmethod
    def complete(self) -> None:
        """Say that these are all; from now on others may read them."""

    @abstractmethod
    def close(self) -> None:
        """Release files; throw away what was not completed."""


# --- in memory ----------------------------------------------------------------------------------


class PlanCache:
    """The in-memory cache of one plan: filled by whichever iterator completes a pass first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: MemoryStore | None = None

    def complete_store(self) -> MemoryStore | None:
        """Return the cache if it is complete."""
        return self._complete

    def offer(self, store: MemoryStore) -> None:
        """Make `store` the cache, unless there is one."""
        with self._lock:
            if self._complete is None:
                self._complete = store


_plan_caches: weakref.WeakKeyDictionary[CacheKey, PlanCache] = weakref.WeakKeyDictionary()
_plan_caches_lock = threading.Lock()


def plan_cache(key: CacheKey) -> PlanCache:
    """Return the in-memory cache of a plan; it lives as long as the plan does."""
    with _plan_caches_lock:
        return _plan_caches.setdefault(key, PlanCache())


class MemoryStore(Store, Filling):
    """Chunks in memory."""

    def __init__(self, cache: PlanCache | None, seed: int) -> None:
        self.seed = seed
        self._cache = cache
        self._chunks: list[Chunk] = []
        self._starts: list[int] = []
        self._size = 0

    def append(self, chunk: Chunk) -> None:
        # Copied: whoever gets the same elements now may write into them. Nobody writes here.
        frames = [memoryview(bytearray(frame)).toreadonly() for frame in encode(chunk)]
        self._starts.append(self._size)
        self._chunks.append(decode(frames).with_places(chunk.places))
        self._size += chunk.size

    def complete(self) -> None:
        if self._cache is not None:
            self._cache.offer(self)

    def read(self, start: int, limit: int) -> Chunk | None:
        lent = self.lend(start, limit)
        return None if lent is None else copied(lent)

    def lend(self, start: int, limit: int) -> Chunk | None:
        if start >= self._size:
            return None
        at = bisect.bisect_right(self._starts, start) - 1
        offset = start - self._starts[at]
        chunk = self._chunks[at]
        return chunk.slice(offset, min(offset + limit, chunk.size))

    def close(self) -> None:
        return


# --- in a file ----------------------------------------------------------------------------------

_MAGIC = b"HRCACHE3"
_FAMILY = b"HRCACHE"
_HEAD = struct.Struct("<qH")  # after the magic: seed, bytes of the identity, which follows


class FileStore(Store):
    """A complete cache file.

    It begins with the identity of the plan whose elements it holds, so that it is not served to
    another one.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._file: BinaryIO = path.open("rb")
        try:
            self.seed = self._check_head(path, identity)
            self._frames = FrameReader(self._file, f"cache file {path}")
        except BaseException:
            self._file.close()
            raise

    @staticmethod
    def find(filename: str, identity: str) -> FileStore | None:
        """Return the complete cache of this name, if there is one.

        Raises:
            FailedPreconditionError: It holds the elements of another plan, or is of a version that
                does not say whose elements it holds.
            DataLossError: It is no cache file, or a damaged one.
        """
        path = Path(filename)
        return FileStore(path, identity) if path.exists() else None

    def _check_head(self, path: Path, identity: str) -> int:
        """Check whose file it is; return the seed of its elements."""
        head = self._file.read(len(_MAGIC))
        if not head.startswith(_FAMILY):
            raise DataLossError(f"{path} is not a cache file; remove it or name another")
        if head != _MAGIC:
            raise FailedPreconditionError(
                f"cache file {path} was written by another version of Headrace; remove it, "
                "and it is written again"
            )
        name = f"cache file {path}"
        seed: int
        seed, length = _HEAD.unpack(read_exactly(self._file, _HEAD.size, name))
        found = read_exactly(self._file, length, name).decode(errors="replace")
        if found != identity:
            raise FailedPreconditionError(
                f"cache file {path} holds the elements of another pipeline ({found}, this "
                f"one is {identity}); remove it if that pipeline was changed into this one, or "
                "name another file"
            )
        return seed

    def read(self, start: int, limit: int) -> Chunk | None:
        return self._frames.read(start, limit)

    def close(self) -> None:
        self._file.close()


class FileFilling(Filling):
    """A cache file that is being written: under another name, renamed when complete.

    Args:
        filename: Its name once it is complete.
        seed: Seed of the run whose elements these are.
        identity: What tells the plan whose elements these are from others.

    Raises:
        FailedPreconditionError: It cannot be written.
    """

    def __init__(self, filename: str, seed: int, identity: str) -> None:
        self._path = Path(filename)
        self._partial = self._path.with_name(f"{self._path.name}.partial-{uuid.uuid4().hex[:8]}")
        self._file = self._created()
        name = identity.encode()
        self._file.write(_MAGIC + _HEAD.pack(seed, len(name)) + name)
        self._frames = FrameWriter(self._file)

    def _created(self) -> BinaryIO:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._partial.open("wb")
        except OSError as error:
            raise FailedPreconditionError(
                f"the cache '{self._path}' cannot be written: {error.strerror or error}; name a "
                "file in a folder that you may write to"
            ) from error

    def append(self, chunk: Chunk) -> None:
        self._frames.append(chunk)

    def complete(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)

    def close(self) -> None:
        self._file.close()
        # Nothing is there under this name once it is complete.
        self._partial.unlink(missing_ok=True)
