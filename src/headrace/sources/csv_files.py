"""CSV files, parsed by pyarrow."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec, Spec
from headrace.errors import (
    DataLossError,
    HeadraceError,
    InvalidArgumentError,
)
from headrace.saved.arrow import pyarrow
from headrace.sources.byte_range_reader import DecodedBlock, RecordFormat
from headrace.sources.byte_ranges import BLOCK_SIZE, ByteRangeSource
from headrace.sources.csv_syntax import (
    CsvSyntax,
    find_last_record_end,
    find_record_ends,
    read_header,
    read_start,
)
from headrace.storage.compression import Compression
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["CsvFormat", "CsvSource", "find_columns", "find_dtype"]


@dataclass(frozen=True)
class CsvSource(ByteRangeSource):
    """The rows of CSV files as dicts by column name. Empty lines are skipped.

    Args:
        columns: Names of the columns of the elements, in this order. Without headers, names of all
            columns of the files.
        dtypes: Dtype of each of them; `np.dtype("U")` for str and `np.dtype("S")` for bytes.
        syntax: Syntax of the files.
    """

    columns: tuple[str, ...] = ()
    dtypes: tuple[np.dtype[Any], ...] = ()
    syntax: CsvSyntax = field(default_factory=CsvSyntax)

    @property
    def element_spec(self) -> Spec | None:
        pairs = zip(self.columns, self.dtypes, strict=True)
        return {name: ArraySpec((), dtype) for name, dtype in pairs}

    def make_format(self) -> RecordFormat:
        return CsvFormat(self.columns, self.dtypes, self.syntax, self.storage_options)


class CsvFormat(RecordFormat):
    """Decoder of rows of CSV.

    Args:
        columns: As for `CsvSource`.
        dtypes: As for `CsvSource`.
        syntax: As for `CsvSource`.
        options: Options of the file systems of URLs.
    """

    def __init__(
        self,
        columns: tuple[str, ...],
        dtypes: tuple[np.dtype[Any], ...],
        syntax: CsvSyntax,
        options: StorageOptions = NO_OPTIONS,
    ) -> None:
        self._columns = columns
        self._dtypes = dtypes
        self._syntax = syntax
        self._options = options
        types = map(_find_arrow_type, dtypes)
        self._convert_options = _pyarrow_csv().ConvertOptions(
            column_types=dict(zip(columns, types, strict=True)), include_columns=list(columns)
        )
        self._file = ""
        self._file_columns = columns
        self._first_record = 0

    def find_first_record(self, name: str, compression: Compression) -> int:
        if name != self._file:
            first, self._first_record = read_header(name, compression, self._syntax, self._options)
            if first and self._syntax.header:
                _check_columns(name, first, self._columns)
                self._file_columns = first
            self._file = name
        return self._first_record

    def count_complete_bytes(self, data: bytes, name: str, offset: int) -> int:
        return find_last_record_end(data, self._syntax, name, offset)

    def decode(self, block: bytes, name: str, offset: int) -> DecodedBlock:
        try:
            return DecodedBlock(self._parse(block), len(block))
        except _InvalidRowError as found:
            error = found
        ends = find_record_ends(block, self._syntax, name, offset).tolist()
        if not ends or ends[-1] < len(block):
            ends.append(len(block))
        ends.insert(0, 0)
        # The first `valid` records can be parsed, and the first `invalid` ones cannot.
        valid, invalid = 0, len(ends) - 1
        chunk = None
        while invalid - valid > 1:
            middle = (valid + invalid) // 2
            try:
                chunk = self._parse(block[: ends[middle]])
                valid = middle
            except _InvalidRowError as found:
                invalid, error = middle, found
        return DecodedBlock(
            chunk, ends[invalid], self._describe_error(error, name, offset + ends[valid])
        )

    def _describe_error(self, error: _InvalidRowError, name: str, offset: int) -> HeadraceError:
        where = f"the row at byte {offset} of {name!r}"
        found = re.search(r"column #(\d+): (.*)", str(error), re.DOTALL)
        column = error.column or (self._file_columns[int(found.group(1))] if found else "")
        if column not in self._columns:
            return DataLossError(f"{where} is invalid: {error}")
        dtype = self._dtypes[self._columns.index(column)]
        return InvalidArgumentError(
            f"{where} has a value in column {column!r} that does not fit its dtype {dtype}: "
            f"{found.group(2) if found else error}; choose another one with `dtypes`"
        )

    def _parse(self, block: bytes) -> Chunk | None:
        """Parse complete records.

        Raises:
            _InvalidRowError: If a row cannot be parsed.
        """
        if self._syntax.ends_inside_quotes(block):
            raise _InvalidRowError(_OPEN_QUOTE)
        try:
            table = _read_table(block, self._file_columns, self._syntax, self._convert_options)
        except _pyarrow().ArrowInvalid as error:
            raise _InvalidRowError(str(error)) from error
        size = table.num_rows
        if not self._syntax.newlines_in_values:
            _check_lines(block, size)
        if not size:
            return None
        columns = {}
        for name, dtype in zip(self._columns, self._dtypes, strict=True):
            column = table.column(name)
            if column.null_count and dtype.kind != "f":
                raise _InvalidRowError("the value is empty or null", name)
            array = column.to_numpy()
            if array.dtype.kind == "O":
                columns[name] = array
            else:
                # Arrow's memory is read-only.
                columns[name] = array.astype(dtype, copy=not array.flags.writeable)
        return Chunk.of_columns(columns, size)


_OPEN_QUOTE = (
    "a quoted value has no end on its line; pass newlines_in_values=True if values contain line "
    "breaks"
)


class _InvalidRowError(Exception):
    """A row that cannot be parsed.

    Args:
        message: Defect of the row.
        column: Name of the column of the invalid value, if known.
    """

    def __init__(self, message: str, column: str = "") -> None:
        super().__init__(message)
        self.column = column


def find_columns(
    names: Sequence[str],
    columns: tuple[str, ...] | None,
    dtypes: Mapping[str, np.dtype[Any]],
    syntax: CsvSyntax,
    options: StorageOptions = NO_OPTIONS,
    compression: Compression = "",
) -> tuple[tuple[str, ...], tuple[np.dtype[Any], ...]]:
    """Return the names and dtypes of columns, from the first block of the first file with rows.

    No file is opened if the arguments determine both.

    Args:
        names: Names of the files.
        columns: Names of the columns; None for all, in the order of the first file.
        dtypes: Known dtypes of columns; the others are inferred.
        syntax: Syntax of the files.
        options: Options of the file systems of URLs.
        compression: Compression of the files.

    Raises:
        NotFoundError: If the file does not exist.
        InvalidArgumentError: If the file has no such column, or `dtypes` names no column.
    """
    known: dict[str, np.dtype[Any]] = {}
    if columns is None or not set(columns) <= set(dtypes):
        for name in names:
            found, has_rows = _infer_dtypes(name, columns, syntax, options, compression)
            known = found or known
            if has_rows:
                break
        if columns is None and not known:
            raise InvalidArgumentError(
                f"all files are empty, such as {names[0]!r}; pass `columns` and `dtypes`"
            )
    chosen = tuple(known) if columns is None else columns
    unknown = sorted(set(dtypes) - set(chosen))
    if unknown:
        raise InvalidArgumentError(f"`dtypes` names {unknown[0]!r}, but the columns are {chosen}")
    return chosen, tuple(dtypes.get(key) or known.get(key) or np.dtype("U") for key in chosen)


def find_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """Return the dtype of a column as given by a user.

    Raises:
        TypeError: If it is not a dtype that can be parsed.
    """
    try:
        result = np.dtype(dtype)
        if result.kind in "SU":
            result = np.dtype(np.bytes_ if result.kind == "S" else np.str_)
            return result
        if result.kind in "biufM" and result != np.float16:
            _find_arrow_type(result)
            native: np.dtype[Any] = result.newbyteorder("=")
            return native
    except (TypeError, ValueError, NotImplementedError):
        pass
    raise TypeError(
        f"`dtypes` of column {name!r} must be a dtype of bool, int, float, datetime64 with a unit, "
        f"str or bytes, got {dtype!r}"
    )


def _infer_dtypes(
    name: str,
    columns: tuple[str, ...] | None,
    syntax: CsvSyntax,
    options: StorageOptions,
    compression: Compression,
) -> tuple[dict[str, np.dtype[Any]], bool]:
    """Return dtypes inferred from the first block of a file, and whether it has rows."""
    first, start = read_header(name, compression, syntax, options)
    if not first:
        return {}, False
    if syntax.header:
        _check_columns(name, first, columns or ())
        file_columns: Sequence[str] = first
    else:
        file_columns = columns or [f"f{index}" for index in range(len(first))]
    block = read_start(name, compression, start + BLOCK_SIZE, options)[start:]
    block = block[: find_last_record_end(block, syntax, name, start)] or block
    if not block.strip():
        return {key: np.dtype("U") for key in columns or file_columns}, False
    # pyarrow prints a traceback for each row that it skips and cannot decode.
    block = block.decode(errors="replace").encode()
    try:
        table = _read_table(block, file_columns, syntax, None, lambda row: "skip")
    except _pyarrow().ArrowInvalid as error:
        raise DataLossError(f"the first block of {name!r} is invalid: {error}") from error
    return {key: _find_numpy_dtype(table.column(key)) for key in columns or file_columns}, True


def _check_columns(name: str, found: tuple[str, ...], wanted: Sequence[str]) -> None:
    if len(set(found)) < len(found):
        raise InvalidArgumentError(f"the header of {name!r} has a name twice: {found}")
    for column in wanted:
        if column not in found:
            raise InvalidArgumentError(f"{name!r} has no column {column!r}; its header is {found}")


def _check_lines(block: bytes, num_rows: int) -> None:
    """Check that each line is a row, as no line was joined with the next one by quotes."""
    num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
    if num_rows < num_lines:
        num_lines = sum(1 for line in block.split(b"\n") if line not in (b"", b"\r"))
    if num_rows < num_lines:
        raise _InvalidRowError(_OPEN_QUOTE)


def _pyarrow() -> Any:
    """Return the package pyarrow.

    Raises:
        FailedPreconditionError: If it is not installed.
    """
    return pyarrow("reading CSV files")


def _pyarrow_csv() -> Any:
    _pyarrow()
    return importlib.import_module("pyarrow.csv")


def _find_arrow_type(dtype: np.dtype[Any]) -> Any:
    package = _pyarrow()
    if dtype.kind == "U":
        return package.string()
    return package.binary() if dtype.kind == "S" else package.from_numpy_dtype(dtype)


def _find_numpy_dtype(column: Any) -> np.dtype[Any]:
    """Return the dtype of an Arrow column of inferred type; str if it is not a number or bool."""
    has_nulls, types = column.null_count > 0, _pyarrow().types
    if types.is_floating(column.type) or (types.is_integer(column.type) and has_nulls):
        return np.dtype(np.float64)
    if types.is_integer(column.type):
        return np.dtype(np.int64)
    return np.dtype(np.bool_ if types.is_boolean(column.type) and not has_nulls else "U")


def _read_table(
    block: bytes,
    columns: Sequence[str],
    syntax: CsvSyntax,
    convert_options: Any,
    invalid_row_handler: Any = None,
) -> Any:
    """Return complete records as an Arrow table of one chunk."""
    package = _pyarrow_csv()
    return package.read_csv(
        _pyarrow().BufferReader(block),
        package.ReadOptions(
            use_threads=False, block_size=len(block) + 1, column_names=list(columns)
        ),
        package.ParseOptions(
            delimiter=syntax.delimiter,
            quote_char=syntax.quote or False,
            newlines_in_values=syntax.newlines_in_values,
            invalid_row_handler=invalid_row_handler,
        ),
        convert_options,
    )
