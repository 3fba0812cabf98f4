"""Rows of Parquet files.

Rule 1. An index is a row group; with more than 256 files it is a file. A position is `[index,
        row]`: the number of rows of that row group or file before the next element, including rows
        that do not match the filters. It does not depend on the sizes of batches.
Rule 2. A row with a null that has no NumPy value raises in its turn, and the next row follows.
        After damaged data the next index follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from headrace.arguments import check_strings
from headrace.element.chunk import Chunk
from headrace.element.spec import Spec
from headrace.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from headrace.plan.source import (
    IndexKind,
    Position,
    Reader,
    Source,
    check_limit,
    check_part_position,
    check_range,
)
from headrace.saved.schema import FileSchema
from headrace.sources.arrow_columns import find_null, to_chunk
from headrace.sources.parquet_files import Footer, ParquetFile, read_error, read_footer
from headrace.sources.parquet_filters import (
    Filters,
    check_filters,
    filter_columns,
    matching_rows,
)
from headrace.storage.names import FileName, expand_names
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["ParquetReader", "ParquetSource", "Part"]

_MAX_FILES_WITH_PARTS = 256
_MAX_THREADS = 8
_MAX_FOOTERS = 16

Part = tuple[int, int, int]
"""An index: `(file, row group, rows)`, or `(file, -1, -1)` for a whole file."""


@dataclass(frozen=True, eq=False)
class ParquetSource(Source):
    """Rows of Parquet files as dicts; see `ParquetSource.of_files`.

    Args:
        filenames: Local paths or fsspec URLs.
        columns: Columns of the elements, in this order.
        filters: Filters of the rows; None reads all rows.
        parts: The indices.
        schema: Schema of the elements.
        storage_options: Options of the file systems of URLs.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("storage_options",)

    filenames: tuple[str, ...]
    columns: tuple[str, ...]
    filters: Filters | None
    parts: tuple[Part, ...]
    schema: FileSchema
    storage_options: StorageOptions = field(default=NO_OPTIONS, repr=False)
    #: Footers of some files, by number of the file; they only save time.
    _footers: dict[int, Footer] = field(init=False, repr=False, default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.filenames, self.columns, self.filters, self.parts, self.schema
        return type(self), (*fields, self.storage_options)

    @classmethod
    def of_files(
        cls,
        filenames: FileName | Iterable[FileName],
        columns: Sequence[str] | None = None,
        filters: Sequence[Any] | None = None,
        storage_options: StorageOptions = NO_OPTIONS,
    ) -> ParquetSource:
        """Return the source of the rows of files, after reading their footers.

        With more than 256 files only the first footer is read, for the schema.

        Args:
            filenames: A local path, fsspec URL or pattern, or several.
            columns: Columns to read; None reads all.
            filters: Filters in pyarrow's list form; None reads all rows.
            storage_options: Options of the file systems of URLs.

        Raises:
            NotFoundError: If a file does not exist.
            DataLossError: If a file is not a complete Parquet file.
            InvalidArgumentError: If a column is missing, has a type without NumPy equivalent, or
                differs between files.
        """
        names = expand_names("filenames", filenames, storage_options)
        if columns is not None:
            check_strings("columns", columns)
            if not columns or len(set(columns)) != len(columns):
                raise ValueError(f"`columns` must be different names, but got {columns!r}")
        checked = check_filters(filters)
        first = read_footer(names[0], columns, checked, storage_options)
        whole = tuple((file, -1, -1) for file in range(len(names)))
        source = cls(names, first.names, checked, whole, first.schema, storage_options)
        if len(names) > _MAX_FILES_WITH_PARTS:
            return source
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            footers = [first, *pool.map(source._read_footer, names[1:])]
        parts = (
            (file, group, footer.group_rows[group])
            for file, footer in enumerate(footers)
            for group in footer.matching
            if footer.group_rows[group]
        )
        source = replace(source, parts=tuple(parts))
        source._footers.update(enumerate(footers[:_MAX_FOOTERS]))
        return source

    def with_files(self, filenames: Sequence[str]) -> ParquetSource:
        """Return the source of some of its files."""
        if tuple(filenames) == self.filenames:
            return self
        numbers = {self.filenames.index(name): number for number, name in enumerate(filenames)}
        parts = [
            (numbers[file], group, rows) for file, group, rows in self.parts if file in numbers
        ]
        return replace(self, filenames=tuple(filenames), parts=tuple(sorted(parts)))

    def may_have_nulls(self) -> bool:
        """Return whether the statistics of the files do not exclude nulls."""
        numbers = range(len(self.filenames))
        return len(numbers) > _MAX_FOOTERS or any(
            self.footer(number).may_have_nulls() for number in numbers
        )

    def footer(self, file: int) -> Footer:
        """Return the footer of a file, after comparing its columns with those of the source."""
        footer = self._footers.get(file)
        if footer is None:
            footer = self._read_footer(self.filenames[file])
            if len(self._footers) >= _MAX_FOOTERS:
                self._footers.clear()
            self._footers[file] = footer
        return footer

    def _read_footer(self, name: str) -> Footer:
        footer = read_footer(name, self.columns, self.filters, self.storage_options)
        if footer.schema != self.schema:
            raise InvalidArgumentError(
                f"{name!r} and {self.filenames[0]!r} have different columns: "
                f"{footer.schema.spec(None)} and {self.schema.spec(None)}; read them as two "
                "datasets, or choose common columns with `columns`"
            )
        return footer

    @property
    def size(self) -> int:
        return len(self.parts)

    @property
    def element_spec(self) -> Spec | None:
        return self.schema.spec(None)

    @property
    def element_count(self) -> int | None:
        counts = [rows for _, _, rows in self.parts]
        return None if self.filters is not None or -1 in counts else sum(counts)

    @property
    def index_kind(self) -> IndexKind:
        return "file"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.filenames[file] for file, _, _ in self.parts)

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, self.size)
        return ParquetReader(self, start, stop, position)


class ParquetReader:
    """Reads the rows of several indices, one after another.

    Args:
        source: The source.
        start: First index.
        stop: Index after the last.
        position: Position to start from; None starts at the first row.
    """

    def __init__(
        self, source: ParquetSource, start: int, stop: int, position: Position = None
    ) -> None:
        self._source = source
        self._stop = stop
        self._position = check_part_position(position, start, stop, "[index, row]")
        #: Columns to read: those of the elements, and those that only filters use.
        self._columns = tuple(dict.fromkeys([*source.columns, *filter_columns(source.filters)]))
        self._part, self._start_row = self._position
        self._file: ParquetFile | None = None
        self._file_number = -1
        self._batches: Iterator[tuple[Any, Any]] | None = None
        #: The rest of a batch after a row that cannot be read: row numbers and values.
        self._rest: tuple[Any, Any] | None = None
        self._chunk, self._rows = Chunk.of_rows([]), np.arange(0)
        self._num_returned = 0
        self._closed = False

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        while self._num_returned == self._chunk.size:
            if self._part >= self._stop:
                self._position = (self._stop, 0)
                return None
            self._read_chunk()
        first = self._num_returned
        self._num_returned = min(first + limit, self._chunk.size)
        self._set_position(int(self._rows[self._num_returned - 1]) + 1)
        return self._chunk.slice(first, self._num_returned)

    @property
    def available_elements(self) -> int:
        """Number of next elements in memory."""
        return self._chunk.size - self._num_returned

    def get_position(self) -> Position:
        return list(self._position)

    def close(self) -> None:
        self._closed = True
        self._chunk, self._num_returned = Chunk.of_rows([]), 0
        self._rest = self._batches = None
        self._close_file()

    def _read_chunk(self) -> None:
        """Read the next rows, or advance to the next part if there are none."""
        self._chunk, self._num_returned = Chunk.of_rows([]), 0
        try:
            batch = self._rest or self._next_batch()
        except Exception as error:
            self._continue_after(error)
            raise
        except BaseException:
            self._rewind()
            raise
        self._rest = None
        if batch is None:
            self._next_part()
            return
        rows, values = batch
        names = self._source.columns
        arrays = [values.column(values.schema.get_field_index(name)) for name in names]
        null = find_null(names, arrays)
        size = len(rows)
        if null is not None:
            size = null.row
            # Until the rows before it are returned, the row with the null is part of the rest.
            after = size or 1
            self._rest = (rows[after:], values.slice(after)) if after < len(rows) else None
            if not size:
                row = int(rows[0])
                self._set_position(row + 1)
                raise self._null_error(row, null.column)
            arrays = [array.slice(0, size) for array in arrays]
        try:
            self._chunk = to_chunk(self._source.schema, arrays, size)
        except Exception as error:  # usually text that is not valid UTF-8
            place = f"{self._describe_row(int(rows[0]))} or soon after"
            self._continue_after(error)
            raise read_error(error, place) from error
        except BaseException:
            self._rewind()
            raise
        self._rows = rows[:size]

    def _next_batch(self) -> tuple[Any, Any] | None:
        """Return the next matching rows of the part and their numbers; None at its end."""
        if self._batches is None:
            self._batches = self._read_part()
        return next(self._batches, None)

    def _read_part(self) -> Iterator[tuple[Any, Any]]:
        file_number, group, rows = self._source.parts[self._part]
        footer = self._source.footer(file_number)
        file = self._open_file(file_number, footer)
        if group < 0:
            starts = [0, *itertools.accumulate(footer.group_rows)]
            groups = [(group, starts[group]) for group in footer.matching]
            rows = starts[-1]
        elif group >= len(footer.group_rows) or footer.group_rows[group] != rows:
            raise FailedPreconditionError(
                f"row group {group} of {file.name!r} had {rows} rows when the dataset was created, "
                "but the file has changed; create the dataset again"
            )
        else:
            groups = [(group, 0)]
        if self._start_row > rows:
            raise DataLossError(
                f"{file.name!r} has {rows} rows, but {self._start_row} were read before the state "
                "was saved; restore the state with the same data"
            )
        for number, first in groups:
            skipped = max(self._start_row - first, 0)
            if skipped and skipped >= footer.group_rows[number]:
                continue
            for start, batch in file.read_batches(number, skipped):
                numbers = np.arange(first + start, first + start + batch.num_rows)
                if self._source.filters is not None:
                    chosen = matching_rows(batch, self._source.filters)
                    if chosen.size < batch.num_rows:
                        numbers, batch = numbers[chosen], batch.take(chosen)
                if numbers.size:
                    yield numbers, batch

    def _open_file(self, number: int, footer: Footer) -> ParquetFile:
        if self._file is None or self._file_number != number:
            self._close_file()
            name = self._source.filenames[number]
            self._file = ParquetFile(name, self._columns, footer, self._source.storage_options)
            self._file_number = number
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _set_position(self, row: int) -> None:
        """Set the position to a row of the current part."""
        is_end = row == self._source.parts[self._part][2]
        self._position = (self._part + 1, 0) if is_end else (self._part, row)

    def _next_part(self) -> None:
        self._part += 1
        self._start_row, self._batches, self._rest = 0, None, None

    def _continue_after(self, error: Exception) -> None:
        """Continue with the next part after an error, or with the same row if memory is short."""
        if not isinstance(error, MemoryError):
            self._position = (self._part + 1, 0)
        self._rewind()

    def _rewind(self) -> None:
        """Discard what was read after the position."""
        self._part, self._start_row = self._position
        self._rest = self._batches = None
        self._close_file()

    def _null_error(self, row: int, column: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"column {column!r} has a null in {self._describe_row(row)}, and its type has no value "
            "for nulls, as NaN is for floats; write the file without nulls, exclude such rows with "
            "`filters`, or leave the column out with `columns`"
        )

    def _describe_row(self, row: int) -> str:
        file, group, _ = self._source.parts[self._part]
        if group < 0:
            starts = list(itertools.accumulate(self._source.footer(file).group_rows, initial=0))
            group = int(np.searchsorted(starts, row, side="right")) - 1
            row -= starts[group]
        return f"row {row} of row group {group} of {self._source.filenames[file]!r}"
