"""Where `cache` keeps elements: chunks in memory, or frames in a file."""

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
from headrace.element.wire import decode, encode
from headrace.errors import DataLossError
from headrace.plan.buffering import Cache, CacheKey

__all__ = ["FileStore", "MemoryStore", "SharedMemoryStore", "Store", "memory_store"]


class Store(ABC):
    """Elements in the order in which they were appended."""

    seed: int
    """Seed of the run whose elements these are."""

    @abstractmethod
    def append(self, chunk: Chunk) -> None:
        """Add elements."""

    @abstractmethod
    def complete(self) -> None:
        """Say that these are all; from now on others may read them."""

    @abstractmethod
    def read(self, start: int, limit: int) -> Chunk | None:
        """Return a copy of 1 to `limit` elements from number `start` on; None: no more."""

    @abstractmethod
    def close(self) -> None:
        """Release files; throw away what was not completed."""


class SharedMemoryStore:
    """The in-memory cache of one plan: filled by whichever iterator completes a pass first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: MemoryStore | None = None

    def complete_store(self) -> MemoryStore | None:
        """Return the cache if it is complete."""
        with self._lock:
            return self._complete

    def offer(self, store: MemoryStore) -> None:
        """Make `store` the cache, unless there is one."""
        with self._lock:
            if self._complete is None:
                self._complete = store


_memory_stores: weakref.WeakKeyDictionary[CacheKey, SharedMemoryStore] = weakref.WeakKeyDictionary()
_memory_stores_lock = threading.Lock()


def memory_store(key: CacheKey) -> SharedMemoryStore:
    """Return the in-memory cache of a plan; it lives as long as the plan does."""
    with _memory_stores_lock:
        return _memory_stores.setdefault(key, SharedMemoryStore())


class MemoryStore(Store):
    """Chunks in memory."""

    def __init__(self, shared: SharedMemoryStore | None, seed: int) -> None:
        self.seed = seed
        self._shared = shared
        self._chunks: list[Chunk] = []
        self._starts: list[int] = []
        self._size = 0

    def append(self, chunk: Chunk) -> None:
        # Copied: whoever gets the same elements now may write into them.
        self._starts.append(self._size)
        self._chunks.append(_copy(chunk))
        self._size += chunk.size

    def complete(self) -> None:
        if self._shared is not None:
            self._shared.offer(self)

    def read(self, start: int, limit: int) -> Chunk | None:
        if start >= self._size:
            return None
        at = bisect.bisect_right(self._starts, start) - 1
        offset = start - self._starts[at]
        chunk = self._chunks[at]
        return _copy(chunk.slice(offset, min(offset + limit, chunk.size)))

    def close(self) -> None:
        return


def _copy(chunk: Chunk) -> Chunk:
    """Return the same elements in memory of their own."""
    frames = [bytearray(frame) for frame in encode(chunk)]
    return decode(frames)


_MAGIC = b"HRCACHE1"
_HEAD = struct.Struct("<8sq")  # magic, seed
_COUNT = struct.Struct("<qq")  # elements in the frame, buffers in the frame
_LENGTH = struct.Struct("<q")


class FileStore(Store):
    """Frames in a file: written under another name, renamed when complete."""

    def __init__(self, path: Path, partial: Path | None, seed: int) -> None:
        self.seed = seed
        self._path = path
        self._partial = partial
        self._starts: list[tuple[int, int, int]] = []  # first element, elements, offset
        self._loaded: tuple[int, Chunk] | None = None  # number of a frame, and the frame
        if partial is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = partial.open("wb")
            self._file.write(_HEAD.pack(_MAGIC, seed))
        else:
            self._file = path.open("rb")
            try:
                self._index()
            except BaseException:
                self._file.close()
                raise

    @staticmethod
    def find(node: Cache) -> FileStore | None:
        """Return the complete cache of this name, if there is one."""
        path = Path(node.filename)
        return FileStore(path, None, 0) if path.exists() else None

    @staticmethod
    def create(node: Cache, seed: int) -> FileStore:
        """Return a new cache to be filled."""
        path = Path(node.filename)
        return FileStore(path, path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:8]}"), seed)

    def _index(self) -> None:
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size or head[:8] != _MAGIC:
            raise DataLossError(f"{self._path} is not a cache file; remove it or name another")
        self.seed = _HEAD.unpack(head)[1]
        first, offset, size = 0, _HEAD.size, self._path.stat().st_size
        while offset < size:
            self._file.seek(offset)
            elements, buffers = _COUNT.unpack(self._exactly(_COUNT.size))
            lengths = struct.unpack(f"<{buffers}q", self._exactly(_LENGTH.size * buffers))
            self._starts.append((first, elements, offset))
            first += elements
            offset = self._file.tell() + sum(lengths)
        if offset != size:
            raise DataLossError(f"cache file {self._path} ends inside a frame; remove it")

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise DataLossError(f"cache file {self._path} ends inside a frame; remove it")
        return data

    def append(self, chunk: Chunk) -> None:
        frames = [memoryview(frame).cast("B") for frame in encode(chunk)]
        self._file.write(_COUNT.pack(chunk.size, len(frames)))
        for frame in frames:
            self._file.write(_LENGTH.pack(frame.nbytes))
        for frame in frames:
            self._file.write(frame)

    def complete(self) -> None:
        assert self._partial is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)
        self._partial = None

    def read(self, start: int, limit: int) -> Chunk | None:
        at = bisect.bisect_right(self._starts, start, key=lambda entry: entry[0]) - 1
        if at < 0 or start >= self._starts[at][0] + self._starts[at][1]:
            return None
        if self._loaded is None or self._loaded[0] != at:
            self._loaded = (at, self._load(self._starts[at][2]))
        chunk = self._loaded[1]
        offset = start - self._starts[at][0]
        stop = min(offset + limit, chunk.size)
        if stop == chunk.size:
            self._loaded = None  # read from the file again for whoever comes next
        return chunk.slice(offset, stop)

    def _load(self, offset: int) -> Chunk:
        self._file.seek(offset)
        _, buffers = _COUNT.unpack(self._exactly(_COUNT.size))
        lengths = struct.unpack(f"<{buffers}q", self._exactly(_LENGTH.size * buffers))
        return decode([bytearray(self._exactly(length)) for length in lengths])

    def close(self) -> None:
        self._file.close()
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
            self._partial = None
