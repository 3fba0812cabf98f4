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

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.wire import decode, encode
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.plan.buffering import CacheKey

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
    return decode(frames).with_places(chunk.places)


def _created(path: Path, partial: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return partial.open("wb")
    except OSError as error:
        raise FailedPreconditionError(
            f"the cache '{path}' cannot be written: {error.strerror or error}; name a file in a "
            "folder that you may write to"
        ) from error


_MAGIC = b"HRCACHE3"
_FAMILY = b"HRCACHE"
_HEAD = struct.Struct("<8sqH")  # magic, seed, bytes of the identity, which follows
_COUNT = struct.Struct("<qq")  # elements in the frame, buffers in the frame
_LENGTH = struct.Struct("<q")
_PLACE = np.dtype("<u8")  # in the last buffer of a frame, for each element or for none


class FileStore(Store):
    """Frames in a file: written under another name, renamed when complete.

    The file begins with the identity of the plan whose elements it holds, so that it is not served
    to another one.
    """

    def __init__(self, path: Path, partial: Path | None, seed: int, identity: str) -> None:
        self.seed = seed
        self._path = path
        self._partial = partial
        self._starts: list[tuple[int, int, int]] = []  # first element, elements, offset
        self._loaded: tuple[int, Chunk] | None = None  # number of a frame, and the frame
        if partial is not None:
            self._file: BinaryIO = _created(path, partial)
            name = identity.encode()
            self._file.write(_HEAD.pack(_MAGIC, seed, len(name)) + name)
        else:
            self._file = path.open("rb")
            try:
                self._check_head(identity)
                self._index()
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
        return FileStore(path, None, 0, identity) if path.exists() else None

    @staticmethod
    def create(filename: str, seed: int, identity: str) -> FileStore:
        """Return a new cache to be filled.

        Args:
            filename: Its name once it is complete.
            seed: Seed of the run whose elements these are.
            identity: What tells the plan whose elements these are from others.
        """
        path = Path(filename)
        partial = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:8]}")
        return FileStore(path, partial, seed, identity)

    def _check_head(self, identity: str) -> None:
        head = self._file.read(_HEAD.size)
        if not head.startswith(_FAMILY):
            raise DataLossError(f"{self._path} is not a cache file; remove it or name another")
        if not head.startswith(_MAGIC):
            raise FailedPreconditionError(
                f"cache file {self._path} was written by another version of Headrace; remove it, "
                "and it is written again"
            )
        if len(head) < _HEAD.size:
            raise self._cut_short()
        _, self.seed, length = _HEAD.unpack(head)
        found = self._exactly(length).decode(errors="replace")
        if found != identity:
            raise FailedPreconditionError(
                f"cache file {self._path} holds the elements of another pipeline ({found}, this "
                f"one is {identity}); remove it if that pipeline was changed into this one, or "
                "name another file"
            )

    def _index(self) -> None:
        first, offset, size = 0, self._file.tell(), os.fstat(self._file.fileno()).st_size
        while offset < size:
            self._file.seek(offset)
            elements, lengths = self._frame_head(size)
            self._starts.append((first, elements, offset))
            first += elements
            offset = self._file.tell() + sum(lengths)
        if offset != size:
            raise self._cut_short()

    def _frame_head(self, size: int) -> tuple[int, tuple[int, ...]]:
        """Read how many elements a frame has, and the length of each of its buffers."""
        elements, buffers = _COUNT.unpack(self._exactly(_COUNT.size))
        if elements < 1 or not 0 <= buffers * _LENGTH.size <= size:
            raise self._damaged()
        lengths = struct.unpack(f"<{buffers}q", self._exactly(_LENGTH.size * buffers))
        if any(not 0 <= length <= size for length in lengths):
            raise self._damaged()
        return elements, lengths

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise self._cut_short()
        return data

    def _damaged(self) -> DataLossError:
        return DataLossError(f"cache file {self._path} is damaged; remove it")

    def _cut_short(self) -> DataLossError:
        return DataLossError(f"cache file {self._path} ends inside a frame; remove it")

    def append(self, chunk: Chunk) -> None:
        places = b"" if chunk.places is None else chunk.places.astype(_PLACE).tobytes()
        frames = [memoryview(frame).cast("B") for frame in (*encode(chunk), places)]
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
        elements, lengths = self._frame_head(os.fstat(self._file.fileno()).st_size)
        *frames, places = [bytearray(self._exactly(length)) for length in (lengths or (0,))]
        chunk = decode(frames)
        if chunk.size != elements or len(places) not in (0, elements * _PLACE.itemsize):
            raise self._damaged()
        return chunk.with_places(np.frombuffer(places, _PLACE)) if places else chunk

    def close(self) -> None:
        self._file.close()
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
            self._partial = None
