"""Files of frames: serialized chunks (`wire`) with access by element number.

A frame is stored as: number of elements, number of buffers, CRC-32C of the buffers, length of each
buffer, CRC-32C of all before, the buffers. The last buffer holds the element numbers, 8 bytes each,
or is empty. Integers are little-endian. The owner of the file writes its own header before the
first frame. A frame of no elements and no buffers ends the file, so that a file that was cut
between two frames is detected.

Rule 1. A length read from a file is checked against the size of the file before it is used.
Rule 2. Any defect of the frames raises a DataLossError that names the file.
Rule 3. Readers and writers may be used by one thread at a time.
"""

from __future__ import annotations

import bisect
import os
import struct
from collections.abc import Iterable
from typing import BinaryIO

import google_crc32c
import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.wire import decode, encode
from headrace.errors import DataLossError

__all__ = ["FrameReader", "FrameWriter", "read_exactly"]

_COUNT_HEADER = struct.Struct("<qqI")  # elements, buffers, CRC-32C of the buffers
_LENGTH = struct.Struct("<q")
_CHECKSUM = struct.Struct("<I")
_NUMBER_DTYPE = np.dtype("<u8")


class FrameWriter:
    """Appends chunks to a file.

    Args:
        file: File open for writing; the caller closes it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def append(self, chunk: Chunk) -> None:
        """Write a chunk, with the element numbers if it has them."""
        numbers = b"" if chunk.metadata is None else chunk.metadata.astype(_NUMBER_DTYPE).tobytes()
        buffers = [memoryview(buffer).cast("B") for buffer in (*encode(chunk), numbers)]
        head = _COUNT_HEADER.pack(chunk.size, len(buffers), _checksum(buffers))
        head += b"".join(_LENGTH.pack(buffer.nbytes) for buffer in buffers)
        self._file.write(head + _CHECKSUM.pack(google_crc32c.value(head)))
        for buffer in buffers:
            self._file.write(buffer)

    def finish(self) -> None:
        """Write the end of the file; nothing may be appended after it."""
        head = _COUNT_HEADER.pack(0, 0, 0)
        self._file.write(head + _CHECKSUM.pack(google_crc32c.value(head)))


class FrameReader:
    """Reads elements by number. The constructor reads the headers of all frames.

    Args:
        file: File open for reading, at its first frame; the caller closes it.
        name: Name of the file in errors.

    Raises:
        DataLossError: If the file does not consist of complete frames.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._starts: list[tuple[int, int, int]] = []  # first element, number of elements, offset
        self._loaded: tuple[int, Chunk] | None = None  # number of a frame, and the frame
        self._index_frames()

    def read(self, start: int, limit: int) -> Chunk | None:
        """Return 1 to `limit` elements from number `start` on in new memory, or None at the end."""
        index = bisect.bisect_right(self._starts, start, key=lambda entry: entry[0]) - 1
        if index < 0 or start >= self._starts[index][0] + self._starts[index][1]:
            return None
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = (index, self._load(self._starts[index][2]))
        chunk = self._loaded[1]
        offset = start - self._starts[index][0]
        stop = min(offset + limit, chunk.size)
        if stop == chunk.size:
            self._loaded = None  # a later reader loads the frame again
        return chunk.slice(offset, stop)

    def _index_frames(self) -> None:
        first, offset, size = 0, self._file.tell(), os.fstat(self._file.fileno()).st_size
        while True:
            self._file.seek(offset)
            elements, lengths, _ = self._read_head(size)
            if not lengths:  # the end
                break
            self._starts.append((first, elements, offset))
            first += elements
            offset = self._file.tell() + sum(lengths)
        if self._file.tell() != size:
            raise self._corrupt_error(offset)

    def _read_head(self, size: int) -> tuple[int, tuple[int, ...], int]:
        """Read a frame's number of elements, the lengths of its buffers, and their checksum."""
        offset = self._file.tell()
        head = read_exactly(self._file, _COUNT_HEADER.size, self._name)
        elements, buffers, checksum = _COUNT_HEADER.unpack(head)
        is_end = elements == 0 and buffers == 0
        if not is_end and (elements < 1 or not 1 <= buffers <= size // _LENGTH.size):
            raise self._corrupt_error(offset)
        packed = read_exactly(self._file, _LENGTH.size * buffers, self._name)
        (expected,) = _CHECKSUM.unpack(read_exactly(self._file, _CHECKSUM.size, self._name))
        lengths = struct.unpack(f"<{buffers}q", packed)
        if google_crc32c.value(head + packed) != expected or any(
            not 0 <= length <= size for length in lengths
        ):
            raise self._corrupt_error(offset)
        return elements, lengths, checksum

    def _load(self, offset: int) -> Chunk:
        self._file.seek(offset)
        elements, lengths, checksum = self._read_head(os.fstat(self._file.fileno()).st_size)
        buffers = [bytearray(read_exactly(self._file, length, self._name)) for length in lengths]
        if _checksum(buffers) != checksum:
            raise self._corrupt_error(offset)
        numbers = buffers.pop()
        chunk = decode(buffers)
        if chunk.size != elements or len(numbers) not in (0, elements * _NUMBER_DTYPE.itemsize):
            raise self._corrupt_error(offset)
        return chunk.with_metadata(np.frombuffer(numbers, _NUMBER_DTYPE)) if numbers else chunk

    def _corrupt_error(self, offset: int) -> DataLossError:
        return DataLossError(
            f"{self._name} is damaged: the frame at byte {offset} does not match its checksums; "
            "remove it, so that it is written again"
        )


def _checksum(buffers: Iterable[bytearray | memoryview]) -> int:
    """Return the CRC-32C of all bytes."""
    crc = 0
    for buffer in buffers:
        if len(buffer):
            crc = google_crc32c.extend(crc, np.frombuffer(buffer, np.uint8))
    return crc


def read_exactly(file: BinaryIO, count: int, name: str) -> bytes:
    """Return the next `count` bytes of a file.

    Raises:
        DataLossError: If the file ends before.
    """
    data = file.read(count)
    if len(data) != count:
        raise _truncated_error(name)
    return data


def _truncated_error(name: str) -> DataLossError:
    return DataLossError(f"{name} is cut off; remove it, so that it is written again")
