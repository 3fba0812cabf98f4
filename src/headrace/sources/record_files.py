"""Reader of files of records in any format.

A format is a function that parses records from a block of bytes (`BlockParser`). This module does
the rest for all formats: sequences of files, compression, blocks, positions and errors. If the
format declares its framing, large records of local files are read one by one (`framed_records`).

Rule 1. A position is `[file, offset, records]`: a number of records after a byte offset at which a
        record begins. Offsets refer to uncompressed data.
Rule 2. Records before damaged data are returned before the error is raised. Reading continues at
        the next record if the format can locate it, else at the next file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from typing import Any, ClassVar, TypeAlias

import numpy as np

from headrace.arguments import check_int
from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec, Spec
from headrace.errors import DataLossError, FailedPreconditionError, HeadraceError, UnavailableError
from headrace.plan.source import (
    IndexKind,
    Position,
    Reader,
    Source,
    check_limit,
    check_range,
)
from headrace.sources.framed_records import RecordFraming, read_framed_records
from headrace.storage.compression import ByteStream, Compression, check_compression
from headrace.storage.files import open_file
from headrace.storage.names import as_names
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = [
    "BLOCK_SIZE",
    "BlockParser",
    "ParsedBlock",
    "RecordFilesReader",
    "RecordFilesSource",
    "check_buffer_size",
]

BLOCK_SIZE = 1 << 20
"""Number of bytes to read and parse at once."""

_MAX_READ_BYTES = 64 << 20
_LARGE_RECORDS_PER_BLOCK = 64
"""Records are large if a block contains at most this many."""


@dataclass(slots=True)
class ParsedBlock:
    """The records at the start of a block.

    Attributes:
        records: Complete records, in order.
        consumed_bytes: Number of bytes of these records, and of the damaged record after them if
            there is one.
        next_record_bytes: Number of bytes of the next record from `consumed_bytes` on; 0 if
            unknown.
        error: Defect of the record after them, if any.
        can_continue: With an error, whether a record begins at `consumed_bytes`.
    """

    records: list[Any]
    consumed_bytes: int
    next_record_bytes: int = 0
    error: HeadraceError | None = None
    can_continue: bool = False


BlockParser: TypeAlias = Callable[[bytes, bool, str, int], ParsedBlock]
"""Parses a block of bytes: `(block, at_end, file_name, offset)`. `at_end` is whether the file ends
with the block, and `offset` the block's position in the file."""


def check_buffer_size(buffer_size: int | None) -> int:
    """Return the number of bytes to read at once.

    Raises:
        ValueError, TypeError: If it is not a positive int or None.
    """
    if buffer_size is None:
        return BLOCK_SIZE
    return check_int("buffer_size", buffer_size, minimum=1)


@dataclass(frozen=True)
class RecordFilesSource(Source):
    """The records of files of one format; an index is a file. Each format is a subclass.

    Args:
        filenames: A local path or fsspec URL, or several.
        compression_type: None, `""`, `"GZIP"` or `"ZLIB"`.
        buffer_size: Number of bytes to read at once; None uses the default.
        storage_options: Options of the file systems of URLs.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("buffer_size", "storage_options")
    framing: ClassVar[RecordFraming | None] = None

    filenames: tuple[str, ...]
    compression_type: str | None = None
    buffer_size: int | None = None
    storage_options: StorageOptions = field(default=NO_OPTIONS, repr=False, kw_only=True)

    @abstractmethod
    def make_parser(self) -> BlockParser:
        """Return the parser of the format."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "filenames", as_names("filenames", self.filenames))
        object.__setattr__(self, "compression_type", check_compression(self.compression_type))
        check_buffer_size(self.buffer_size)

    @property
    def size(self) -> int:
        return len(self.filenames)

    @property
    def element_spec(self) -> Spec | None:
        return ArraySpec((), np.dtype("S"))

    @property
    def index_kind(self) -> IndexKind:
        return "file"

    @property
    def paths(self) -> tuple[str, ...]:
        return self.filenames

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, self.size)
        return RecordFilesReader(
            self.filenames,
            start,
            stop,
            self.make_parser(),
            self.framing,
            check_compression(self.compression_type),
            check_buffer_size(self.buffer_size),
            position,
            self.storage_options,
        )


class RecordFilesReader:
    """Reads the records of several files, one file after another.

    Args:
        names: Files of the source.
        start: Index of the first file to read.
        stop: Index after the last file.
        parse_block: Parser of the format.
        framing: Framing of records, if the format declares it.
        compression: Compression of the files.
        block_size: Number of bytes to read at once.
        position: Position to start from; None starts at the first record.
        options: Options of the file systems of URLs.
    """

    def __init__(
        self,
        names: Sequence[str],
        start: int,
        stop: int,
        parse_block: BlockParser,
        framing: RecordFraming | None,
        compression: Compression,
        block_size: int,
        position: Position = None,
        options: StorageOptions = NO_OPTIONS,
    ) -> None:
        file, offset, num_returned = _check_position(position, start, stop)
        self._names = names
        self._stop = stop
        self._parse_block = parse_block
        self._framing = framing
        self._compression = compression
        self._block_size = block_size
        self._options = options
        self._file = file
        #: Offset of the current records, and of the data after them.
        self._offset = self._next_offset = self._restored_offset = offset
        #: Number of the current records that were returned. It exceeds their number while a
        #: restored reader still has to skip some.
        self._num_returned = self._restored_count = num_returned
        self._records: list[Any] = []
        self._error: HeadraceError | None = None
        self._can_continue = False
        #: Data that was read but not parsed yet, from `_next_offset` on.
        self._unparsed = b""
        self._parse_before_read = False
        self._at_end = False
        self._next_record_bytes = 0
        self._stream: ByteStream | None = None
        self._is_closed = False

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._is_closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        while True:
            records, num_returned = self._records, self._num_returned
            if num_returned < len(records):
                self._num_returned = stop = min(num_returned + limit, len(records))
                are_all = stop - num_returned == len(records)
                return Chunk.of_rows(records if are_all else records[num_returned:stop])
            if self._error is not None:
                self._raise_error()
            if self._stream is None and not self._open():
                return None
            self._read_more(limit)

    def get_position(self) -> Position:
        if not self._error and self._num_returned == len(self._records):
            return [self._file, self._next_offset, 0]
        return [self._file, self._offset, self._num_returned]

    def close(self) -> None:
        self._is_closed = True
        self._close_stream()
        self._records, self._unparsed, self._num_returned = [], b"", 0
        self._offset = self._next_offset

    def _open(self) -> bool:
        if self._file >= self._stop:
            return False
        name = self._names[self._file]
        try:
            self._stream = open_file(name, self._compression, self._next_offset, self._options)
        except HeadraceError as error:
            self._set_error(error)
        return True

    def _read_more(self, limit: int) -> None:
        """Read and parse the next records."""
        stream = self._stream
        if stream is None:
            return
        # Remote files have their own buffers, and each call of an inflater is expensive.
        framing = (
            self._framing if isinstance(stream, FileIO) and self._has_large_records() else None
        )
        try:
            if self._parse_before_read:
                self._parse_unparsed()
            elif framing and len(self._unparsed) == framing.header_size:
                self._read_framed(stream, framing, limit)
            elif self._read_block(stream, framing.header_size if framing else 0):
                self._parse_unparsed()
        except BaseException:
            # Usually a MemoryError. The stream may be ahead of the recorded position.
            self._rewind()
            raise

    def _rewind(self) -> None:
        """Discard unparsed data; the file will be reopened where it begins."""
        self._close_stream()
        self._unparsed, self._parse_before_read, self._at_end = b"", False, False

    def _has_large_records(self) -> bool:
        """Return whether the current records are large on average."""
        size, count = self._next_offset - self._offset, len(self._records)
        return count > 0 and size * _LARGE_RECORDS_PER_BLOCK >= count * self._block_size

    def _read_block(self, stream: ByteStream, extra_bytes: int) -> bool:
        """Read a block, and `extra_bytes` if a large record is next; return False on errors."""
        unparsed = self._unparsed
        size = min(self._next_record_bytes - len(unparsed), _MAX_READ_BYTES)
        if not self._records:
            # The record is larger than the unparsed data: double it, so that joining stays linear.
            size = max(size, len(unparsed), self._block_size)
        elif size <= 0 or self._next_record_bytes * _LARGE_RECORDS_PER_BLOCK < self._block_size:
            # For a large record read only its missing part, so that the block after it need not
            # be copied to be joined with the unparsed data.
            size = max(size, self._block_size)
        else:
            size += extra_bytes
        try:
            block = stream.read(size)
        except HeadraceError as error:
            self._set_error(error)
            return False
        except OSError as error:
            self._set_error(self._read_error(error, self._next_offset + len(unparsed)))
            return False
        self._at_end = not block
        self._unparsed = unparsed + block if unparsed else block
        return True

    def _read_error(self, error: OSError, offset: int) -> UnavailableError:
        result = UnavailableError(
            f"{self._names[self._file]!r} cannot be read at byte {offset}: {error}"
        )
        result.__cause__ = error
        return result

    def _parse_unparsed(self) -> None:
        """Parse the data that was read."""
        parsed = self._parse_block(
            self._unparsed, self._at_end, self._names[self._file], self._next_offset
        )
        # After a damaged record the rest of the block is parsed before more is read.
        self._accept(parsed, self._unparsed[parsed.consumed_bytes :], parsed.error is not None)
        if self._at_end and parsed.error is None:
            self._finish_file()

    def _read_framed(self, stream: ByteStream, framing: RecordFraming, limit: int) -> None:
        """Read large records one by one after the last header, up to `limit` or about a block."""
        size = self._block_size
        result = read_framed_records(
            stream,
            framing,
            self._unparsed,
            limit,
            size,
            size // _LARGE_RECORDS_PER_BLOCK,
            _MAX_READ_BYTES,
        )
        failure, error = result.failure, None
        if isinstance(failure, OSError):
            error = self._read_error(
                failure, self._next_offset + result.consumed_bytes + result.unconsumed_bytes
            )
        elif failure is not None and not result.records:
            raise failure
        self._accept(
            ParsedBlock(result.records, result.consumed_bytes, error=error),
            result.rest,
            result.needs_parsing,
        )
        if failure is not None and error is None:
            self._rewind()  # out of memory: raised again after the records before it

    def _accept(self, parsed: ParsedBlock, unparsed: bytes, parse_before_read: bool) -> None:
        """Replace the current records by parsed ones, and set the unparsed data."""
        self._num_returned -= len(self._records)
        self._offset = self._next_offset
        self._next_offset += parsed.consumed_bytes
        self._records, self._error = parsed.records, parsed.error
        self._can_continue = parsed.can_continue
        self._next_record_bytes = parsed.next_record_bytes
        self._unparsed = unparsed
        self._parse_before_read = parse_before_read and bool(unparsed)

    def _finish_file(self) -> None:
        """Close a file that is completely parsed; the next position is in the next file."""
        self._close_stream()
        missing = self._num_returned - len(self._records)
        if missing > 0:
            self._error = DataLossError(
                f"{self._names[self._file]!r} has {self._restored_count - missing} records from "
                f"byte {self._restored_offset} on, but at least {self._restored_count} were read "
                "before the state was saved; restore the state with the same data"
            )
        elif self._records:
            # They are still to be returned; positions until then stay in this file.
            self._error = _EndOfFileError()
        else:
            self._next_file()

    def _set_error(self, error: HeadraceError) -> None:
        """Set the error to raise next; there are no current records then."""
        self._num_returned -= len(self._records)
        self._offset = self._next_offset
        self._records, self._error, self._can_continue = [], error, False

    def _raise_error(self) -> None:
        """Raise the pending error, with the position after it."""
        error, self._error = self._error, None
        assert error is not None
        self._num_returned = 0
        self._records = []
        self._offset = self._next_offset
        if not self._can_continue:
            self._close_stream()
            self._next_file()
        if not isinstance(error, _EndOfFileError):
            raise error

    def _next_file(self) -> None:
        self._file += 1
        self._offset = self._next_offset = self._num_returned = self._next_record_bytes = 0
        self._unparsed = b""
        self._records = []
        self._at_end = self._parse_before_read = self._can_continue = False

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _EndOfFileError(HeadraceError):
    """Marks the end of a file after its last records, in place of an error. Never raised."""


def _check_position(position: Position, start: int, stop: int) -> tuple[int, int, int]:
    if position is None:
        return start, 0, 0
    if (
        not isinstance(position, list | tuple)
        or len(position) != 3
        or not all(type(value) is int and value >= 0 for value in position)
        or not start <= position[0] <= stop
    ):
        raise ValueError(
            f"position must be [file, offset, records] with a file from {start} to {stop}, got "
            f"{position!r}"
        )
    file, offset, records = position
    return file, offset, records
