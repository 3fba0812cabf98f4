"""Reader of a chunk file, sequential or by rows. Results are always in new memory.

Rule 1. The checksum of a batch is verified once, when reading reaches the start of the batch.
Random
        rows of numbers are not verified, because that would read the whole file for a few rows;
        batches with bytes or str are.
Rule 2. Any defect of a file raises a DataLossError that names it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.memory import allocate_array
from headrace.element.structure import unflatten
from headrace.element.transpose import untranspose
from headrace.errors import DataLossError, FailedPreconditionError, NotFoundError
from headrace.saved.arrow import checksum, stored_dtype, to_byte_order
from headrace.saved.format import ChunkRecord
from headrace.saved.record_batches import (
    ALIGNMENT,
    ColumnView,
    RecordBatchView,
    decode_strings,
    map_file,
    read_batches,
    read_schema_text,
    take_strings,
    wrap_bytes,
)
from headrace.saved.schema import NUMBERS_KIND, ColumnSchema, FileSchema, decode_schema
from headrace.storage.files import Folder

__all__ = ["ChunkFile", "allocate_columns", "finish_columns"]

#: Smallest size in bytes of rows that are copied one by one; smaller rows are gathered together.
_LARGE_ROW = 4096


class ChunkFile:
    """An open chunk file: memory-mapped on a local disk, else read as a whole.

    It needs no closing: its memory is released with it. It is thread-safe.

    Args:
        folder: Folder of the file.
        chunk: Record of the file, with its order.
        save_id: ID of its save.

    Attributes:
        path: Path or URL of the file.
        schema: Schema of its elements.
        size: Number of elements.

    Raises:
        DataLossError: If the file is missing or damaged.
    """

    def __init__(self, folder: Folder, chunk: ChunkRecord, save_id: str) -> None:
        name = folder.find_name(chunk.name(save_id), chunk.public_name(save_id))
        self.path: str = folder.path(name)
        self._source = self._open_source(folder, name)
        if chunk.bytes not in (0, self._source.size):
            raise DataLossError(
                f"{self.path!r} must have {chunk.bytes} bytes, but has {self._source.size}; "
                "it was truncated or changed: restore it, or save the dataset again"
            )
        try:
            self.schema: FileSchema = decode_schema(
                chunk.schema or read_schema_text(self._source), self.path
            )
            self._batches: list[RecordBatchView] = read_batches(self._source, self.schema)
        except (DataLossError, FailedPreconditionError):
            raise
        except Exception as error:
            raise self._corrupt_error(error) from error
        #: Number of each batch's first element, and the number of all elements.
        self._starts = list(itertools.accumulate([b.size for b in self._batches], initial=0))
        self.size: int = self._starts[-1]
        if chunk.elements not in (0, self.size):
            raise self._corrupt_error(
                ValueError(f"it has {self.size} elements, not {chunk.elements}")
            )
        self._verified = [False] * len(self._batches)
        # For random access: first element of each batch, and offsets of its columns in the file.
        self._starts_array = np.array(self._starts)
        self._offsets = [
            np.array([batch.columns[index].offset for batch in self._batches])
            for index in range(len(self.schema.columns))
        ]

    def _open_source(self, folder: Folder, name: str) -> Any:
        try:
            return map_file(self.path) if folder.is_local else wrap_bytes(folder.read(name))
        except (FileNotFoundError, NotFoundError) as error:
            raise DataLossError(
                f"{self.path!r} is missing; restore it, or save the dataset again"
            ) from error
        except (OSError, ValueError) as error:
            raise self._corrupt_error(error) from error

    def _corrupt_error(self, error: Exception) -> DataLossError:
        return DataLossError(
            f"{self.path!r} is damaged: {error}; restore it, or save the dataset again"
        )

    # --- Sequential reading -----------------------------------------------------------------------

    def read(self, start: int, limit: int) -> Chunk:
        """Return 1 to `limit` elements of one batch, from number `start` on."""
        number = bisect.bisect_right(self._starts, start) - 1
        batch = self._batches[number]
        self._verify(number)
        begin = start - self._starts[number]
        end = min(begin + limit, batch.size)
        form = self.schema
        if form.is_fixed and form.columns:
            made = allocate_columns(form, end - begin)
            self._copy(batch, begin, end, made, 0)
            return Chunk.of_columns(
                unflatten(form.structure, finish_columns(form, made)), end - begin
            )
        columns = [
            self._read_values(column, stored, begin, end)
            for column, stored in zip(form.columns, batch.columns, strict=True)
        ]
        return Chunk.of_rows(untranspose(form.structure, columns, end - begin))

    def copy(self, start: int, stop: int, columns: list[NDArray[Any]], offset: int) -> None:
        """Copy elements `start` to `stop` - 1 to rows of `allocate_columns` from `offset` on."""
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            begin = start - self._starts[number]
            if not begin:
                self._verify(number)
            end = min(stop - self._starts[number], self._batches[number].size)
            self._copy(self._batches[number], begin, end, columns, offset)
            start, offset, number = start + end - begin, offset + end - begin, number + 1

    def _copy(
        self, batch: RecordBatchView, begin: int, end: int, columns: list[NDArray[Any]], offset: int
    ) -> None:
        for column, stored, target in zip(self.schema.columns, batch.columns, columns, strict=True):
            part = target[offset : offset + end - begin]
            if column.kind == NUMBERS_KIND:
                part[...] = stored.values[begin:end]
            else:
                part.reshape(-1)[:] = self._decode_strings(column, stored, begin, end)

    def _decode_strings(
        self, column: ColumnSchema, stored: ColumnView, begin: int, end: int
    ) -> list[Any]:
        each = math.prod(column.lengths)
        try:
            return decode_strings(column, stored.values, begin * each, end * each)
        except ValueError as error:
            raise self._corrupt_error(error) from error

    def _read_values(
        self, column: ColumnSchema, stored: ColumnView, begin: int, end: int
    ) -> list[Any]:
        """Return the values of one component, one per element."""
        if column.is_fixed:
            if column.kind != NUMBERS_KIND and not column.shape:
                return self._decode_strings(column, stored, begin, end)
            made = _allocate_column(column, end - begin)
            if column.kind == NUMBERS_KIND:
                made[...] = stored.values[begin:end]
                made = to_byte_order(made, column.dtype)
            else:
                made.reshape(-1)[:] = self._decode_strings(column, stored, begin, end)
            return list(made)
        assert stored.starts is not None
        starts = stored.starts[begin : end + 1].tolist()
        first, last = starts[0], starts[-1]
        flat: NDArray[Any]
        if column.kind == NUMBERS_KIND:
            flat = to_byte_order(np.array(stored.values[first:last]), column.dtype)
        else:
            flat = np.empty(last - first, object)
            try:
                flat[:] = decode_strings(column, stored.values, first, last)
            except ValueError as error:
                raise self._corrupt_error(error) from error
        cuts = itertools.pairwise(starts)
        if stored.shapes is None:
            return [flat[a - first : b - first] for a, b in cuts]
        shapes = stored.shapes[begin:end].tolist()
        return [
            flat[a - first : b - first].reshape(shape)
            for (a, b), shape in zip(cuts, shapes, strict=True)
        ]

    def _verify(self, number: int) -> None:
        if not self._verified[number]:
            batch = self._batches[number]
            found = checksum(batch.arrays)
            if found != batch.checksum:
                raise self._corrupt_error(
                    ValueError(
                        f"elements {self._starts[number]} to {self._starts[number + 1] - 1} do not "
                        "match their checksum"
                    )
                )
            self._verified[number] = True

    # --- Random access ----------------------------------------------------------------------------

    def gather(
        self, rows: NDArray[np.int64], made: list[NDArray[Any]], targets: NDArray[np.int64]
    ) -> None:
        """Copy the elements with these numbers to rows `targets` of `made` (`allocate_columns`)."""
        numbers = np.searchsorted(self._starts_array, rows, side="right") - 1
        row_in_batch = rows - self._starts_array[numbers]
        for index, (column, target) in enumerate(zip(self.schema.columns, made, strict=True)):
            if column.kind != NUMBERS_KIND:
                self._gather_strings(index, column, numbers, row_in_batch, target, targets)
                continue
            row_bytes = math.prod(column.lengths) * column.dtype.itemsize
            if not row_bytes:
                continue
            if row_bytes >= _LARGE_ROW:
                columns = [batch.columns[index].values for batch in self._batches]
                for number, row, place in zip(
                    numbers.tolist(), row_in_batch.tolist(), targets.tolist(), strict=True
                ):
                    target[place] = columns[number][row]
                continue
            # Rows begin at multiples of `step`: view the file as overlapping rows, and index them.
            step = math.gcd(row_bytes, ALIGNMENT)
            count = (self._source.size - row_bytes) // step + 1
            windows = np.ndarray((count,), f"V{row_bytes}", self._source, strides=(step,))
            found = windows[(self._offsets[index][numbers] + row_in_batch * row_bytes) // step]
            target[targets] = found.view(target.dtype).reshape(-1, *column.lengths)

    def _gather_strings(
        self,
        index: int,
        column: ColumnSchema,
        numbers: NDArray[np.int64],
        row_in_batch: NDArray[np.int64],
        target: NDArray[Any],
        targets: NDArray[np.int64],
    ) -> None:
        each = np.arange(math.prod(column.lengths))
        for number in np.unique(numbers).tolist():
            self._verify(number)
            chosen = numbers == number
            items = row_in_batch[chosen][:, np.newaxis] * each.size + each
            stored = self._batches[number].columns[index].values
            try:
                found = take_strings(column, stored, items.reshape(-1))
            except ValueError as error:
                raise self._corrupt_error(error) from error
            made = np.empty(items.size, object)
            made[:] = found
            target[targets[chosen]] = made.reshape(-1, *column.lengths)


def allocate_columns(schema: FileSchema, size: int) -> list[NDArray[Any]]:
    """Return arrays for `size` elements of a fixed schema, in stored byte order."""
    return [_allocate_column(column, size) for column in schema.columns]


def _allocate_column(column: ColumnSchema, size: int) -> NDArray[Any]:
    dtype = stored_dtype(column.dtype) if column.kind == NUMBERS_KIND else column.dtype
    return allocate_array((size, *column.lengths), dtype)


def finish_columns(schema: FileSchema, columns: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return filled arrays of `allocate_columns` as the columns of elements."""
    return [
        to_byte_order(array, column.dtype) if column.kind == NUMBERS_KIND else array
        for array, column in zip(columns, schema.columns, strict=True)
    ]
