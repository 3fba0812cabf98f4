"""Files of frames: chunks one after the other, each as `wire` makes it, found again by number.

A frame is stored as: the number of its elements, the number of its buffers, the length of each
buffer, the buffers. The last buffer holds the places of the elements, 8 bytes each, or nothing.
Numbers are little endian. What stands before the first frame is whose file it is.

Rule 1. A number from a file is believed only when the file is as long as it says.
Rule 2. Whatever is wrong with the frames is a DataLossError that names the file.
Rule 3. A reader and a writer belong to one thread at a time.
"""

from __future__ import annotations

import bisect
import os
import struct
from typing import BinaryIO

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.wire import decode, encode
from headrace.errors import DataLossError

__all__ = ["FrameReader", "FrameWriter", "read_exactly"]

_COUNT = struct.Struct("<qq")  # elements in the frame, buffers in the frame
_LENGTH = struct.Struct("<q")
_PLACE = np.dtype("<u8")


class FrameWriter:
    """Appends chunks to a file.

    Args:
        file: Open for writing; whoever opened it closes it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def append(self, chunk: Chunk) -> None:
        """Write a chunk, with the places of its elements if it has any."""
        places = b"" if chunk.places is None else chunk.places.astype(_PLACE).tobytes()
        buffers = [memoryview(buffer).cast("B") for buffer in (*encode(chunk), places)]
        self._file.write(_COUNT.pack(chunk.size, len(buffers)))
        for buffer in buffers:
            self._file.write(_LENGTH.pack(buffer.nbytes))
        for buffer in buffers:
            self._file.write(buffer)


class FrameReader:
    """Reads elements by number. The heads of all frames are read first.

    Args:
        file: Open for reading, at its first frame; whoever opened it closes it.
        name: What errors call it.

    Raises:
        DataLossError: It does not hold whole frames.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._starts: list[tuple[int, int, int]] = []  # first element, elements, offset
        self._loaded: tuple[int, Chunk] | None = None  # number of a frame, and the frame
        self._index()

    def read(self, start: int, limit: int) -> Chunk | None:
        """Return 1 to `limit` elements from number `start` on, in fresh memory; None: no more."""
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

    def _index(self) -> None:
        first, offset, size = 0, self._file.tell(), os.fstat(self._file.fileno()).st_size
        while offset < size:
            self._file.seek(offset)
            elements, lengths = self._head(size)
            self._starts.append((first, elements, offset))
            first += elements
            offset = self._file.tell() + sum(lengths)
        if offset != size:
            raise _cut_short(self._name)

    def _head(self, size: int) -> tuple[int, tuple[int, ...]]:
        """Read how many elements a frame has, and the length of each of its buffers."""
        elements, buffers = _COUNT.unpack(read_exactly(self._file, _COUNT.size, self._name))
        if elements < 1 or not 0 <= buffers * _LENGTH.size <= size:
            raise self._damaged()
        packed = read_exactly(self._file, _LENGTH.size * buffers, self._name)
        lengths = struct.unpack(f"<{buffers}q", packed)
        if any(not 0 <= length <= size for length in lengths):
            raise self._damaged()
        return elements, lengths

    def _load(self, offset: int) -> Chunk:
        self._file.seek(offset)
        elements, lengths = self._head(os.fstat(self._file.fileno()).st_size)
        *buffers, places = [
            bytearray(read_exactly(self._file, length, self._name)) for length in (lengths or (0,))
        ]
        chunk = decode(buffers)
        if chunk.size != elements or len(places) not in (0, elements * _PLACE.itemsize):
            raise self._damaged()
        return chunk.with_places(np.frombuffer(places, _PLACE)) if places else chunk

    def _damaged(self) -> DataLossError:
        return DataLossError(f"{self._name} is damaged; remove it")


def read_exactly(file: BinaryIO, count: int, name: str) -> bytes:
    """Return the next `count` bytes of a file.

    Raises:
        DataLossError: It ends before.
    """
    data = file.read(count)
    if len(data) != count:
        raise _cut_short(name)
    return data


def _cut_short(name: str) -> DataLossError:
    return DataLossError(f"{name} ends inside a frame; remove it")
