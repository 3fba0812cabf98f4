"""Parquet files by path or URL: footers, and record batches of row groups.

Errors of pyarrow become a `DataLossError` if the data is damaged, and an `UnavailableError` if the
file system fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    HeadraceError,
    InvalidArgumentError,
    UnavailableError,
)
from headrace.saved.arrow import pyarrow, pyarrow_module
from headrace.saved.schema import FileSchema
from headrace.sources.arrow_columns import infer_arrow_schema
from headrace.sources.parquet_filters import Filters, filter_columns, matching_groups
from headrace.storage.files import file_error, open_file
from headrace.storage.names import is_local
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["Footer", "ParquetFile", "read_error", "read_footer"]

_PURPOSE = "reading Parquet files"
_MAX_BATCH_ROWS = 1 << 16
_MAX_BATCH_BYTES = 4 << 20
_BUFFER_BYTES = 1 << 18


@dataclass(frozen=True)
class Footer:
    """Footer of a file, as far as it describes the elements.

    Attributes:
        names: Columns of the elements, in the order of the components.
        schema: Schema of the elements.
        group_rows: Number of rows of each row group.
        matching: Numbers of the row groups that the filters do not exclude.
        file_bytes: Size of the file.
        metadata: The footer in pyarrow's form.
    """

    names: tuple[str, ...]
    schema: FileSchema
    group_rows: tuple[int, ...]
    matching: tuple[int, ...]
    file_bytes: int
    metadata: Any

    def may_have_nulls(self) -> bool:
        """Return whether the statistics do not exclude nulls in the file."""
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        statistics = (
            group.column(number).statistics
            for group in groups
            for number in range(group.num_columns)
        )
        return any(found is None or found.null_count != 0 for found in statistics)


def read_footer(
    name: str,
    columns: Sequence[str] | None,
    filters: Filters | None,
    options: StorageOptions = NO_OPTIONS,
) -> Footer:
    """Read the footer of a file.

    Args:
        name: A local path or fsspec URL.
        columns: Columns to read; None reads all.
        filters: Filters of the rows; None reads all.
        options: Options of the file system of a URL.

    Raises:
        NotFoundError: If the file does not exist.
        DataLossError: If it is not a complete Parquet file.
        InvalidArgumentError: If a column is missing, or has a type without NumPy equivalent.
    """
    dataset = pyarrow_module("dataset", _PURPOSE)
    with _open_input(name, options) as source:
        size = source.size()
        if not size:
            raise DataLossError(
                f"{name!r} is empty (0 bytes), but a Parquet file has at least a footer; write it "
                "again"
            )
        try:
            fragment = dataset.ParquetFileFormat().make_fragment(source)
            metadata, schema = fragment.metadata, fragment.physical_schema
        except Exception as error:
            raise read_error(error, f"the footer of {name!r} ({size} bytes)") from error
        names = tuple(schema.names if columns is None else columns)
        for column in (*names, *filter_columns(filters)):
            count = schema.names.count(column)
            if count != 1:
                raise InvalidArgumentError(
                    f"{name!r} has {count or 'no'} column{'s' if count else ''} {column!r}; its "
                    f"columns are {', '.join(map(repr, schema.names))}"
                )
        try:
            found = infer_arrow_schema(schema.field(column) for column in names)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{name!r}: {error}") from error
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        matching = matching_groups(name, fragment, filters)
    return Footer(names, found, tuple(rows), tuple(matching), size, metadata)


class ParquetFile:
    """An open Parquet file.

    Args:
        name: A local path or fsspec URL.
        columns: Names of the columns to read.
        footer: Footer of the file, which may have been read earlier.
        options: Options of the file system of a URL.

    Raises:
        NotFoundError: If the file does not exist.
        DataLossError: If it is not a complete Parquet file.
        FailedPreconditionError: If its size has changed since the footer was read.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        footer: Footer,
        options: StorageOptions = NO_OPTIONS,
    ) -> None:
        self.name = name
        self._columns = list(columns)
        self._top = set(columns)
        self._source = _open_input(name, options)
        try:
            size = self._source.size()
            if size != footer.file_bytes:
                raise FailedPreconditionError(
                    f"{name!r} has {size} bytes, but had {footer.file_bytes} when its footer "
                    "was read; create the dataset again after a file has changed"
                )
            self._file = pyarrow_module("parquet", _PURPOSE).ParquetFile(
                self._source,
                metadata=footer.metadata,
                # Local files: without a buffer, whole columns of a row group would be in memory.
                buffer_size=_BUFFER_BYTES if isinstance(self._source, pyarrow().OSFile) else 0,
                pre_buffer=isinstance(self._source, pyarrow().PythonFile),
                page_checksum_verification=True,
            )
        except HeadraceError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise read_error(error, repr(name)) from error

    def read_batches(self, group: int, start: int) -> Iterator[tuple[int, Any]]:
        """Yield the record batches of a row group, each with the number of its first row.

        Rows before `start` are decoded, but not returned.

        Raises:
            DataLossError: If the data is damaged; the message names the row.
        """
        row = 0
        try:
            for batch in self._file.iter_batches(
                self._batch_rows(group), row_groups=[group], columns=self._columns,
                use_threads=False,
            ):  # fmt: skip
                first, row = row, row + batch.num_rows
                if row > start:
                    skipped = max(start - first, 0)
                    yield first + skipped, batch.slice(skipped)
        except Exception as error:
            place = f"row group {group} of {self.name!r} at row {row} or soon after"
            raise read_error(error, place) from error

    def _batch_rows(self, group: int) -> int:
        """Return a number of rows of a few megabytes."""
        metadata = self._file.metadata.row_group(group)
        size: int = 0
        for index in range(metadata.num_columns):
            column = metadata.column(index)
            path = column.path_in_schema
            if path in self._top or path.partition(".")[0] in self._top:
                size += column.total_uncompressed_size
        rows: int = _MAX_BATCH_BYTES * metadata.num_rows // (size + 1)
        return max(1, min(rows, _MAX_BATCH_ROWS))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._source.close()


def _open_input(name: str, options: StorageOptions) -> Any:
    pa = pyarrow(_PURPOSE)
    path = name.removeprefix("file://")
    if not is_local(path):
        return pa.PythonFile(cast(Any, open_file(name, options=options)), "r")
    try:
        if os.path.isdir(path):  # pyarrow raises a plain OSError
            raise IsADirectoryError(path)
        return pa.OSFile(path)
    except OSError as error:
        raise file_error(name, error) from error


def read_error(error: Exception, place: str) -> Exception:
    """Return the error to raise if reading `place` failed."""
    if isinstance(error, HeadraceError | MemoryError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return UnavailableError(f"cannot read {place}: {error}")
    if isinstance(error, OSError | ValueError | pyarrow().ArrowException):
        return DataLossError(f"cannot read {place}: the data is damaged ({error})")
    return error
