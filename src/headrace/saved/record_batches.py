"""Record batches of an Arrow file, as views of its memory.

Rule 1. Sizes in a file are checked against the sizes of its buffers. Any mismatch raises
        `ValueError`, which callers convert to a DataLossError that names the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.saved.arrow import (
    CHECKSUM_KEY,
    OFFSET,
    SCHEMA_KEY,
    Array,
    arrow_schema,
    pyarrow,
    stored_dtype,
)
from headrace.saved.schema import NUMBERS_KIND, SURROGATES_KIND, ColumnSchema, FileSchema

__all__ = [
    "ALIGNMENT",
    "ColumnView",
    "RecordBatchView",
    "decode_strings",
    "map_file",
    "read_batches",
    "read_schema_text",
    "take_strings",
    "wrap_bytes",
]

ALIGNMENT = 8
"""Alignment of buffers in bytes, as Arrow requires."""


class ColumnView(NamedTuple):
    """A column in a batch, as views of the file.

    Attributes:
        values: Stacked numbers of a fixed column; all numbers of another column, joined; or an
            Arrow array of all bytes or str.
        offset: Offset of the numbers in the file.
        starts: Start of each value in `values`, and the end, for a column that is not fixed.
        shapes: Shape of each value, for such a column with several axes.
    """

    values: Any
    offset: int
    starts: NDArray[np.int64] | None = None
    shapes: NDArray[np.int64] | None = None


class RecordBatchView(NamedTuple):
    """A batch of elements, as views of the file."""

    size: int
    columns: list[ColumnView]
    arrays: list[Array]
    checksum: int


def map_file(path: str) -> Any:
    """Return a memory-mapped file as a pyarrow buffer."""
    # The mapping lives as long as references to it; the descriptor is closed here.
    with pyarrow().memory_map(path) as file:
        return file.read_buffer()


def wrap_bytes(data: bytes) -> Any:
    """Return bytes as a pyarrow buffer."""
    return pyarrow().py_buffer(data)


def read_schema_text(source: Any) -> str:
    """Return the JSON of a file's schema.

    Raises:
        ValueError: If the file was not written by Headrace.
    """
    metadata = _open_arrow(source).schema.metadata or {}
    if SCHEMA_KEY not in metadata:
        raise ValueError("it was not written by headrace")
    return str(metadata[SCHEMA_KEY].decode())


def read_batches(source: Any, schema: FileSchema) -> list[RecordBatchView]:
    """Return the batches of a file, given as a buffer, whose elements have this schema.

    Raises:
        ValueError: If its contents do not match the schema.
    """
    reader = _open_arrow(source)
    if not reader.schema.equals(arrow_schema(schema)):
        raise ValueError(f"its columns do not match its schema: {reader.schema.names}")
    batches = []
    for number in range(reader.num_record_batches):
        batch, metadata = reader.get_batch_with_custom_metadata(number)
        check = int((metadata or {}).get(CHECKSUM_KEY, b""), 16)
        size = batch.num_rows
        arrays = list(batch.columns)
        if any(array.null_count for array in arrays if array.type != pyarrow().null()):
            raise ValueError("a value is null")
        rest = iter(arrays)
        columns = [_view_column(column, rest, size, source) for column in schema.columns]
        batches.append(RecordBatchView(size, columns, arrays, check))
    return batches


def _open_arrow(source: Any) -> Any:
    pa = pyarrow()
    return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False))


def _view_column(
    column: ColumnSchema, arrays: Iterator[Array], size: int, source: Any
) -> ColumnView:
    array = next(arrays)
    if column.is_fixed:
        shape = (size, *column.lengths)
        if column.kind == NUMBERS_KIND:
            return _view_numbers(column, array, shape, source)
        count = math.prod(shape)
        return ColumnView(_view_strings(array.values if column.lengths else array, count), 0)
    starts = _view_buffer(array.buffers()[1], (size + 1,), OFFSET)
    count = int(starts[-1])
    if starts[0] != 0 or (np.diff(starts) < 0).any():
        raise ValueError("the list offsets are not ascending")
    sizes = np.diff(starts)
    shapes = None
    if len(column.shape) > 1:
        shapes = _view_buffer(next(arrays).buffers()[-1], (size, len(column.shape)), OFFSET)
        if (shapes < 0).any() or (shapes.prod(axis=1) != sizes).any():
            raise ValueError("the shapes of its values do not match its lists")
    if column.kind == NUMBERS_KIND:
        stored = _view_numbers(column, array, (count,), source)
        return ColumnView(stored.values, stored.offset, starts, shapes)
    return ColumnView(_view_strings(array.values, count), 0, starts, shapes)


def _view_numbers(
    column: ColumnSchema, array: Array, shape: tuple[int, ...], source: Any
) -> ColumnView:
    buffer = array.buffers()[-1]
    values = _view_buffer(buffer, shape, stored_dtype(column.dtype))
    offset = buffer.address - source.address if buffer else 0
    if offset % ALIGNMENT:
        raise ValueError(
            f"a column starts at byte {offset}, which is not a multiple of {ALIGNMENT}"
        )
    return ColumnView(values, offset)


def _view_strings(items: Array, count: int) -> Array:
    """Return an array of `count` bytes or str after checking that it stays within its buffers."""
    if len(items) != count:
        raise ValueError(f"a column has {len(items)} items, but expected {count}")
    if count:
        _, starts, data = items.buffers()
        found = _view_buffer(starts, (count + 1,), OFFSET)
        if found[0] < 0 or found[-1] > (data.size if data else 0) or (np.diff(found) < 0).any():
            raise ValueError("the string offsets exceed the data")
    return items


def _view_buffer(buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    needed = math.prod(shape) * dtype.itemsize
    found = buffer.size if buffer else 0
    if found < needed:
        raise ValueError(f"a column has {found} bytes, but its values need {needed}")
    return np.ndarray(shape, dtype, buffer if needed else b"")


def decode_strings(column: ColumnSchema, items: Array, start: int, stop: int) -> list[Any]:
    """Return consecutive items of a column as bytes or str.

    Raises:
        ValueError: If they are not valid UTF-8.
    """
    return _decode_items(column, items.slice(start, stop - start).to_pylist())


def take_strings(column: ColumnSchema, items: Array, indices: NDArray[np.int64]) -> list[Any]:
    """Return the items of a column at these indices as bytes or str.

    Raises:
        ValueError: If they are not valid UTF-8.
    """
    return _decode_items(column, items.take(pyarrow().array(indices)).to_pylist())


def _decode_items(column: ColumnSchema, found: list[Any]) -> list[Any]:
    if column.kind == SURROGATES_KIND:
        return [item.decode("utf-8", "surrogatepass") for item in found]
    return found
