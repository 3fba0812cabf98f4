"""Walk through files of records, whatever their format.

A format is a function that cuts a block of bytes into records (`Cutter`). Everything else is here
and the same for all formats: files in turn, compressed or not, blocks, positions, errors. Where the
format says how a record is framed, large ones of local files are read one by one (`framed`).

Rule 1. A position is `[file, offset, records]`: so many records after a byte offset at which a
        record begins. Offsets count inflated bytes.
Rule 2. Records before a damaged place are given out before the error. Reading goes on at the next
        record where the format still knows its place, else at the next file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any, ClassVar, TypeAlias

import numpy as np

from headrace.arguments import check_int
from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec, Spec
from headrace.errors import DataLossError, FailedPreconditionError, HeadraceError, UnavailableError
from headrace.plan.source import (
    IndexHolds,
    Position,
    Reader,
    Source,
    check_limit,
    check_range,
)
from headrace.sources.framed import Frame, read_framed
from headrace.storage.compression import ByteStream, Compression, check_compression
from headrace.storage.files import open_file
from headrace.storage.names import as_names

__all__ = [
    "BLOCK_SIZE",
    "Cut",
    "Cutter",
    "RecordFilesReader",
    "RecordFilesSource",
    "check_buffer_size",
]

BLOCK_SIZE = 1 << 20
"""Bytes that are read and cut at once."""

_LARGEST_READ = 64 << 20
_LARGE_RECORDS = 64
"""Of which so many make a block, or fewer."""


@dataclass(slots=True)
class Cut:
    """The records at the front of a block.

    Attributes:
        records: Whole records, in order.
        used: Number of bytes that they, and the damaged record after them if there is one, take.
        needs: Number of bytes from `used` on that the next record takes; 0 if that is not known.
        error: What is wrong with the record after them, if something is.
        resumes: With an error: whether a record begins at `used`.
    """

    records: list[Any]
    used: int
    needs: int = 0
    error: HeadraceError | None = None
    resumes: bool = False


Cutter: TypeAlias = Callable[[bytes, bool, str, int], Cut]
"""Cuts `(block, whether the file ends with it, the file's name, the block's offset in it)`."""


def check_buffer_size(buffer_size: int | None) -> int:
    """Return the number of bytes to read at once.

    Raises:
        ValueError, TypeError: It is not a positive int or None.
    """
    if buffer_size is None:
        return BLOCK_SIZE
    return check_int("buffer_size", buffer_size, minimum=1)


@dataclass(frozen=True)
class RecordFilesSource(Source):
    """The records of files of one format; an index is a file. A subclass is a format.

    Args:
        filenames: A local path or fsspec URL, or several.
        compression_type: None, `""`, `"GZIP"` or `"ZLIB"`.
        buffer_size: Bytes to read at once; None for a good size.
    """

    speed_only: ClassVar[tuple[str, ...]] = ("buffer_size",)
    frame: ClassVar[Frame | None] = None

    filenames: tuple[str, ...]
    compression_type: str | None = None
    buffer_size: int | None = None

    @staticmethod
    @abstractmethod
    def cut(block: bytes, at_end: bool, name: str, offset: int) -> Cut:
        """Cut a block into records: see `Cutter`."""

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
    def index_holds(self) -> IndexHolds:
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
            self.cut,
            self.frame,
            check_compression(self.compression_type),
            check_buffer_size(self.buffer_size),
            position,
        )


class RecordFilesReader:
    """Reads the records of several files, one file after another.

    Args:
        names: The files of the source.
        start: Index of the first file to read.
        stop: Index after the last.
        cut: The format.
        frame: How a record is framed, if the format can tell.
        compression: How the files are compressed.
        block_size: Bytes to read at once.
        position: Where to begin, if not at the beginning.
    """

    def __init__(
        self,
        names: Sequence[str],
        start: int,
        stop: int,
        cut: Cutter,
        frame: Frame | None,
        compression: Compression,
        block_size: int,
        position: Position = None,
    ) -> None:
        file, offset, taken = _check_position(position, start, stop)
        self._names = names
        self._stop = stop
        self._cut = cut
        self._frame = frame
        self._compression = compression
        self._block_size = block_size
        self._file = file
        #: Where the records at hand begin, and where those after them do.
        self._offset = self._next_offset = self._restored_at = offset
        #: Of the records at hand, how many were given out. More than there are while a restored
        #: reader still has to pass over some.
        self._taken = self._restored = taken
        self._records: list[Any] = []
        self._error: HeadraceError | None = None
        self._resumes = False
        #: What was read and not cut yet, from `_next_offset` on.
        self._rest = b""
        self._rest_is_new = False
        self._at_end = False
        self._needs = 0
        self._stream: ByteStream | None = None
        self._closed = False

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        while True:
            records, taken = self._records, self._taken
            if taken < len(records):
                self._taken = stop = min(taken + limit, len(records))
                whole = stop - taken == len(records)
                return Chunk.of_rows(records if whole else records[taken:stop])
            if self._error is not None:
                self._raise_error()
            if self._stream is None and not self._open():
                return None
            self._advance(limit)

    def get_position(self) -> Position:
        if not self._error and self._taken == len(self._records):
            return [self._file, self._next_offset, 0]
        return [self._file, self._offset, self._taken]

    def close(self) -> None:
        self._closed = True
        self._close_stream()
        self._records, self._rest, self._taken = [], b"", 0
        self._offset = self._next_offset

    def _open(self) -> bool:
        if self._file >= self._stop:
            return False
        name = self._names[self._file]
        try:
            self._stream = open_file(name, self._compression, self._next_offset)
        except HeadraceError as error:
            self._fail(error)
        return True

    def _advance(self, limit: int) -> None:
        """Have the next records at hand."""
        stream = self._stream
        if stream is None:
            return
        # Remote files have buffers of their own, and an inflater takes its time for each call.
        frame = self._frame if isinstance(stream, FileIO) and self._are_large() else None
        try:
            if self._rest_is_new:
                self._cut_rest()
            elif frame and len(self._rest) == frame.header_size:
                self._read_framed(stream, frame, limit)
            elif self._read_block(stream, frame.header_size if frame else 0):
                self._cut_rest()
        except BaseException:
            # Too little memory, mostly. The stream may be ahead of what was noted.
            self._go_back()
            raise

    def _go_back(self) -> None:
        """Forget what was read and not cut: the file is opened again where that begins."""
        self._close_stream()
        self._rest, self._rest_is_new, self._at_end = b"", False, False

    def _are_large(self) -> bool:
        """Say whether the records at hand are large, on average."""
        size, count = self._next_offset - self._offset, len(self._records)
        return count > 0 and size * _LARGE_RECORDS >= count * self._block_size

    def _read_block(self, stream: ByteStream, after: int) -> bool:
        """Read the next block, with `after` bytes after a large record; return whether it could."""
        rest = self._rest
        size = min(self._needs - len(rest), _LARGEST_READ)
        if not self._records:
            # A record larger than what is at hand: ask for ever more, or joining gets slow.
            size = max(size, len(rest), self._block_size)
        elif size <= 0 or self._needs * _LARGE_RECORDS < self._block_size:
            # What a large record lacks comes alone, and so the block after it is not copied to
            # be joined with what is at hand.
            size = max(size, self._block_size)
        else:
            size += after
        try:
            block = stream.read(size)
        except HeadraceError as error:
            self._fail(error)
            return False
        except OSError as error:
            self._fail(self._unavailable(error, self._next_offset + len(rest)))
            return False
        self._at_end = not block
        self._rest = rest + block if rest else block
        return True

    def _unavailable(self, error: OSError, at: int) -> UnavailableError:
        made = UnavailableError(f"{self._names[self._file]!r} cannot be read at byte {at}: {error}")
        made.__cause__ = error
        return made

    def _cut_rest(self) -> None:
        """Cut what was read into records."""
        cut = self._cut(self._rest, self._at_end, self._names[self._file], self._next_offset)
        # After a damaged record the block is cut further before more is read.
        self._take_over(cut, self._rest[cut.used :], cut.error is not None)
        if self._at_end and cut.error is None:
            self._finish_file()

    def _read_framed(self, stream: ByteStream, frame: Frame, limit: int) -> None:
        """Read large records, up to `limit` or about a block, from the header at hand on."""
        size = self._block_size
        found = read_framed(
            stream, frame, self._rest, limit, size, size // _LARGE_RECORDS, _LARGEST_READ
        )
        failure, error = found.failure, None
        if isinstance(failure, OSError):
            error = self._unavailable(failure, self._next_offset + found.used + found.read)
        elif failure is not None and not found.records:
            raise failure
        self._take_over(Cut(found.records, found.used, error=error), found.rest, found.is_odd)
        if failure is not None and error is None:
            self._go_back()  # too little memory: met again when those before it were given

    def _take_over(self, cut: Cut, rest: bytes, is_new: bool) -> None:
        """Have the records of a cut at hand, and a rest: if new, it is cut before more is read."""
        self._taken -= len(self._records)
        self._offset = self._next_offset
        self._next_offset += cut.used
        self._records, self._error, self._resumes = cut.records, cut.error, cut.resumes
        self._needs = cut.needs
        self._rest = rest
        self._rest_is_new = is_new and bool(rest)

    def _finish_file(self) -> None:
        """Leave a file whose records are all at hand: the next position is in the next file."""
        self._close_stream()
        missing = self._taken - len(self._records)
        if missing > 0:
            self._error = DataLossError(
                f"{self._names[self._file]!r} has {self._restored - missing} records from byte "
                f"{self._restored_at} on, but at least {self._restored} were read before the "
                "state was saved; restore it with the same data"
            )
        elif self._records:
            # They are still to be given out; positions in between stay in this file.
            self._error = _EndOfFileError()
        else:
            self._next_file()

    def _fail(self, error: HeadraceError) -> None:
        """Have `error` raised next; no record is at hand then."""
        self._taken -= len(self._records)
        self._offset = self._next_offset
        self._records, self._error, self._resumes = [], error, False

    def _raise_error(self) -> None:
        """Raise the pending error, the position after it."""
        error, self._error = self._error, None
        assert error is not None
        self._taken = 0
        self._records = []
        self._offset = self._next_offset
        if not self._resumes:
            self._close_stream()
            self._next_file()
        if not isinstance(error, _EndOfFileError):
            raise error

    def _next_file(self) -> None:
        self._file += 1
        self._offset = self._next_offset = self._taken = self._needs = 0
        self._rest = b""
        self._records = []
        self._at_end = self._rest_is_new = self._resumes = False

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _EndOfFileError(HeadraceError):
    """Stands where an error would: after the last records of a file. Never raised."""


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
