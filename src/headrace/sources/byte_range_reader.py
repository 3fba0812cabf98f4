"""Reader of the records of parts of text files, in any format.

A format (`RecordFormat`) decodes blocks of complete records. This module does the rest for all
formats: parts, blocks, positions and errors.

Rule 1. A position is `[index, offset, records]`: a number of records after a byte offset at which a
        record of the part begins. The start of the range stands for the first record of the part.
        Offsets refer to uncompressed data.
Rule 2. Records before damaged data are returned before the error is raised. Reading continues at
        the next record, or at the next part if the file cannot be read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.element.chunk import Chunk
from headrace.errors import DataLossError, FailedPreconditionError, HeadraceError, UnavailableError
from headrace.plan.source import Position, check_limit
from headrace.storage.compression import ByteStream, Compression
from headrace.storage.files import open_file
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["ByteRangeReader", "DecodedBlock", "FilePart", "RecordFormat"]

_TAIL_BYTES = 16 << 10
"""Number of bytes to read beyond the end of a part at first, to complete its last record."""


class FilePart(NamedTuple):
    """A byte range of a file."""

    name: str
    start: int
    stop: int | None
    """Offset after the range; None for the end of the file, wherever it is."""


@dataclass(slots=True)
class DecodedBlock:
    """The elements of the records at the start of a block.

    Attributes:
        chunk: Elements of these records; None if there are none.
        consumed_bytes: Number of bytes of these records, and of the damaged record after them if
            there is one.
        error: Defect of the record after them, if any.
    """

    chunk: Chunk | None
    consumed_bytes: int
    error: HeadraceError | None = None


class RecordFormat(ABC):
    r"""A format of text files whose records end with `\n`. Used by one reader."""

    def find_first_record(self, name: str, compression: Compression) -> int:
        """Return the offset of the first record of a file, after its header.

        Raises:
            HeadraceError: If the file cannot be read, or its header is invalid.
        """
        return 0

    def count_complete_bytes(self, data: bytes, name: str, offset: int) -> int:
        """Return the number of bytes of the complete records at the start of `data`.

        Raises:
            HeadraceError: If the end of a record cannot be determined.
        """
        return data.rfind(b"\n") + 1

    @abstractmethod
    def decode(self, block: bytes, name: str, offset: int) -> DecodedBlock:
        """Decode complete records up to the first damaged one.

        Args:
            block: Records; the last one of a file may lack its terminator.
            name: Name of the file, for messages.
            offset: Offset of the block in the file.
        """


class ByteRangeReader:
    """Reads the records of several parts of files, one part after another.

    Args:
        find_part: Function that returns the part at an index.
        start: Index of the first part to read.
        stop: Index after the last part.
        record_format: Format of the records.
        compression: Compression of the files.
        block_bytes: Number of bytes to read and decode at once.
        position: Position to start from; None starts at the first record.
        options: Options of the file systems of URLs.
    """

    def __init__(
        self,
        find_part: Callable[[int], FilePart],
        start: int,
        stop: int,
        record_format: RecordFormat,
        compression: Compression,
        block_bytes: int,
        position: Position = None,
        options: StorageOptions = NO_OPTIONS,
    ) -> None:
        self._find_part = find_part
        self._stop = stop
        self._format = record_format
        self._compression = compression
        self._block_bytes = block_bytes
        self._options = options
        self._chunk: Chunk | None = None
        self._error: HeadraceError | None = None
        self._stream: ByteStream | None = None
        #: Data that was read but not decoded yet, from `_next_offset` on.
        self._undecoded = b""
        self._decode_before_read = False
        self._at_end = False
        self._is_closed = False
        self._start_part(start)
        if position is not None:
            self._restore(position, start)

    def _start_part(self, index: int) -> None:
        """Set the position to the start of a part."""
        self._index = index
        self._part = self._find_part(index) if index < self._stop else _NO_PART
        self._chunk = None
        #: Offset of the current elements, and of the data after them.
        self._offset = self._next_offset = self._restored_offset = self._part.start
        #: Number of the current elements that were returned. It exceeds their number while a
        #: restored reader still has to skip some.
        self._num_returned = self._restored_count = 0

    def _restore(self, position: Position, start: int) -> None:
        if (
            not isinstance(position, list | tuple)
            or len(position) != 3
            or not all(type(value) is int and value >= 0 for value in position)
            or not start <= position[0] <= self._stop
        ):
            raise ValueError(
                f"position must be [index, offset, records] with an index from {start} to "
                f"{self._stop}, got {position!r}"
            )
        index, offset, num_returned = position
        self._start_part(index)
        if offset < self._part.start:
            raise ValueError(
                f"position {position!r} is before byte {self._part.start}, where index {index} "
                "begins; restore the state with the same files"
            )
        self._offset = self._next_offset = self._restored_offset = offset
        self._num_returned = self._restored_count = num_returned

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._is_closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        while True:
            chunk, start = self._chunk, self._num_returned
            if chunk is not None and start < chunk.size:
                self._num_returned = stop = min(start + limit, chunk.size)
                return chunk.slice(start, stop)
            if self._error is not None:
                self._raise_error()
            if self._index >= self._stop:
                return None
            try:
                self._advance()
            except HeadraceError:
                self._finish_part()
                raise
            except OSError as error:
                name, offset = self._part.name, self._next_offset + len(self._undecoded)
                self._finish_part()
                raise UnavailableError(
                    f"{name!r} cannot be read at byte {offset}: {error}"
                ) from error
            except BaseException:
                # Usually a MemoryError. The stream may be ahead of the recorded position.
                self._close_stream()
                raise

    def get_position(self) -> Position:
        size = 0 if self._chunk is None else self._chunk.size
        if not self._error and self._num_returned == size:
            return [self._index, self._next_offset, 0]
        return [self._index, self._offset, self._num_returned]

    def close(self) -> None:
        self._is_closed = True
        self._close_stream()
        if self._chunk is not None and not self._error and self._num_returned == self._chunk.size:
            self._offset, self._num_returned = self._next_offset, 0
        self._chunk = None

    def _raise_error(self) -> None:
        """Raise the pending error, with the position after it."""
        error, self._error = self._error, None
        assert error is not None
        self._chunk, self._num_returned = None, 0
        self._offset = self._next_offset
        raise error

    def _advance(self) -> None:
        """Decode the next block of the part, or go to the next part at its end."""
        stop = self._part.stop
        if stop is not None and self._next_offset >= stop:
            self._check_all_returned()
            self._finish_part()
            return
        if self._stream is None:
            self._open_part()
            return
        undecoded = self._undecoded
        if not self._decode_before_read:
            block = self._stream.read(self._choose_read_size())
            self._at_end = not block
            self._undecoded = undecoded = undecoded + block if undecoded else block
        self._decode_before_read = False
        if self._at_end and not undecoded:
            self._check_all_returned()
            self._finish_part()
            return
        name, offset = self._part.name, self._next_offset
        size = self._count_bytes_of_part(undecoded)
        if size:
            decoded = self._format.decode(undecoded[:size], name, offset)
            self._accept(decoded)

    def _choose_read_size(self) -> int:
        """Return the number of bytes to read next."""
        num_undecoded = len(self._undecoded)
        size = self._block_bytes
        if self._part.stop is not None:
            # Little more is read than the part.
            left = self._part.stop - self._next_offset - num_undecoded
            size = min(size, max(left, 0) + _TAIL_BYTES)
        # The record is larger than the data: double it, so that joining stays linear.
        return max(size, num_undecoded)

    def _count_bytes_of_part(self, data: bytes) -> int:
        """Return the number of bytes of complete records that begin in the part."""
        size = len(data)
        if not self._at_end:
            size = self._format.count_complete_bytes(data, self._part.name, self._next_offset)
        if self._part.stop is not None:
            limit = self._part.stop - self._next_offset
            if size > limit:
                # `limit` is positive. A record that ends at it is the last.
                size = data.find(b"\n", limit - 1) + 1 or size
        return size

    def _accept(self, decoded: DecodedBlock) -> None:
        """Replace the current elements by decoded ones."""
        if self._chunk is not None:
            self._num_returned -= self._chunk.size
        self._offset = self._next_offset
        self._next_offset += decoded.consumed_bytes
        self._undecoded = self._undecoded[decoded.consumed_bytes :]
        self._chunk, self._error = decoded.chunk, decoded.error
        # After a damaged record the rest of the block is decoded before more is read.
        self._decode_before_read = decoded.error is not None and bool(self._undecoded)

    def _open_part(self) -> None:
        """Open the file, at the first record of the part or at the restored offset."""
        name, start, _ = self._part
        offset = self._next_offset
        first = self._format.find_first_record(name, self._compression)
        if start < offset < first:
            raise self._changed_error(offset)
        if offset <= first:
            self._set_offset(first)
            self._stream = self._open_file(first)
        elif offset == start:
            self._stream = self._open_before(offset)
            self._skip_partial_record(self._stream)
        else:
            self._stream = self._open_file(offset - 1)
            if self._stream.read(1) != b"\n" and self._stream.read(1):
                raise self._changed_error(offset)

    def _open_file(self, offset: int) -> ByteStream:
        return open_file(self._part.name, self._compression, offset, self._options)

    def _open_before(self, start: int) -> ByteStream:
        try:
            return self._open_file(start - 1)
        except DataLossError as error:
            raise DataLossError(
                f"{self._part.name!r} ends before byte {start}, but was longer when the dataset "
                "was created; create the dataset again"
            ) from error

    def _skip_partial_record(self, stream: ByteStream) -> None:
        """Skip the record that begins before the part."""
        offset, stop = self._next_offset - 1, self._part.stop
        while block := stream.read(self._block_bytes):
            size = block.find(b"\n") + 1
            if size:
                self._set_offset(offset + size)
                self._undecoded = block[size:]
                self._decode_before_read = bool(self._undecoded)
                return
            offset += len(block)
            if stop is not None and offset >= stop:
                break
        self._set_offset(offset)

    def _set_offset(self, offset: int) -> None:
        """Set the offset of the first record of the part."""
        self._offset = self._next_offset = offset

    def _changed_error(self, offset: int) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"no record of {self._part.name!r} begins at byte {offset}, but one did when the state "
            "was saved; restore the state with the same data"
        )

    def _check_all_returned(self) -> None:
        """Raise an error if fewer records were found than had been returned before."""
        size = 0 if self._chunk is None else self._chunk.size
        missing = self._num_returned - size
        if missing > 0:
            raise DataLossError(
                f"{self._part.name!r} has {self._restored_count - missing} records from byte "
                f"{self._restored_offset} on, but at least {self._restored_count} were read before "
                "the state was saved; restore the state with the same data"
            )

    def _finish_part(self) -> None:
        self._close_stream()
        self._start_part(self._index + 1)

    def _close_stream(self) -> None:
        """Discard undecoded data; the file will be reopened where it begins."""
        stream, self._stream = self._stream, None
        self._undecoded, self._decode_before_read, self._at_end = b"", False, False
        if stream is not None:
            stream.close()


_NO_PART = FilePart("", 0, 0)
