"""The batches of an Arrow file, as views of its memory.

Rule 1. What a file says is believed only where its buffers have that many bytes: whatever else is
        found raises `ValueError`, which callers turn into a DataLossError with the file's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.saved.arrow import (
    CHECK_KEY,
    FORM_KEY,
    OFFSET,
    Array,
    arrow_schema,
    pyarrow,
    stored_dtype,
)
from headrace.saved.form import NUMBERS, SURROGATES, Column, Form

__all__ = [
    "ALIGNMENT",
    "Batch",
    "Stored",
    "decoded_strings",
    "form_text",
    "map_file",
    "read_batches",
    "taken_strings",
    "whole_buffer",
]

ALIGNMENT = 8
"""Buffers begin at multiples of so many bytes, as Arrow asks for."""


class Stored(NamedTuple):
    """A column in a batch, as views of the file.

    Attributes:
        values: Numbers of a fixed column, stacked; all numbers of another, one after another; an
            Arrow array of all bytes or str.
        offset: Where the numbers begin in the file.
        starts: Of a column that is not fixed, where each value begins in `values`, and the end.
        shapes: Of one with several axes, the shape of each value.
    """

    values: Any
    offset: int
    starts: NDArray[np.int64] | None = None
    shapes: NDArray[np.int64] | None = None


class Batch(NamedTuple):
    """A batch of elements, as views of the file."""

    size: int
    columns: list[Stored]
    arrays: list[Array]
    check: int


def map_file(path: str) -> Any:
    """Return a file that is mapped into memory, as a buffer of pyarrow."""
    # The mapping lives as long as what refers to it; the descriptor is closed here.
    with pyarrow().memory_map(path) as file:
        return file.read_buffer()


def whole_buffer(data: bytes) -> Any:
    """Return bytes as a buffer of pyarrow."""
    return pyarrow().py_buffer(data)


def form_text(source: Any) -> str:
    """Return the form that a file says it has.

    Raises:
        ValueError: It is no file of ours.
    """
    metadata = _opened(source).schema.metadata or {}
    if FORM_KEY not in metadata:
        raise ValueError("it was not written by headrace")
    return str(metadata[FORM_KEY].decode())


def read_batches(source: Any, form: Form) -> list[Batch]:
    """Return the batches of a file, given as a buffer, whose elements have this form.

    Raises:
        ValueError: It does not hold what the form says.
    """
    reader = _opened(source)
    if not reader.schema.equals(arrow_schema(form)):
        raise ValueError(f"its columns are not those of its form: {reader.schema.names}")
    batches = []
    for number in range(reader.num_record_batches):
        batch, metadata = reader.get_batch_with_custom_metadata(number)
        check = int((metadata or {}).get(CHECK_KEY, b""), 16)
        size = batch.num_rows
        arrays = list(batch.columns)
        if any(array.null_count for array in arrays if array.type != pyarrow().null()):
            raise ValueError("a value is null")
        rest = iter(arrays)
        columns = [_stored(column, rest, size, source) for column in form.columns]
        batches.append(Batch(size, columns, arrays, check))
    return batches


def _opened(source: Any) -> Any:
    pa = pyarrow()
    return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False))


def _stored(column: Column, arrays: Iterator[Array], size: int, source: Any) -> Stored:
    array = next(arrays)
    if column.is_fixed:
        shape = (size, *column.lengths)
        if column.held == NUMBERS:
            return _numbers(column, array, shape, source)
        count = math.prod(shape)
        return Stored(_strings(array.values if column.lengths else array, count), 0)
    starts = _view(array.buffers()[1], (size + 1,), OFFSET)
    count = int(starts[-1])
    if starts[0] != 0 or (np.diff(starts) < 0).any():
        raise ValueError("the offsets of its lists do not go up")
    sizes = np.diff(starts)
    shapes = None
    if len(column.shape) > 1:
        shapes = _view(next(arrays).buffers()[-1], (size, len(column.shape)), OFFSET)
        if (shapes < 0).any() or (shapes.prod(axis=1) != sizes).any():
            raise ValueError("the shapes of its values are not those of its lists")
    if column.held == NUMBERS:
        stored = _numbers(column, array, (count,), source)
        return Stored(stored.values, stored.offset, starts, shapes)
    return Stored(_strings(array.values, count), 0, starts, shapes)


def _numbers(column: Column, array: Array, shape: tuple[int, ...], source: Any) -> Stored:
    buffer = array.buffers()[-1]
    values = _view(buffer, shape, stored_dtype(column.dtype))
    offset = buffer.address - source.address if buffer else 0
    if offset % ALIGNMENT:
        raise ValueError(f"a column begins at byte {offset}, which is no multiple of {ALIGNMENT}")
    return Stored(values, offset)


def _strings(items: Array, count: int) -> Array:
    """Return an array of `count` bytes or str, once it is known to stay within its buffers."""
    if len(items) != count:
        raise ValueError(f"a column has {len(items)} items where there are {count}")
    if count:
        _, starts, data = items.buffers()
        found = _view(starts, (count + 1,), OFFSET)
        if found[0] < 0 or found[-1] > (data.size if data else 0) or (np.diff(found) < 0).any():
            raise ValueError("the offsets of its strings do not stay within them")
    return items


def _view(buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    needed = math.prod(shape) * dtype.itemsize
    found = buffer.size if buffer else 0
    if found < needed:
        raise ValueError(f"a column has {found} bytes where its values take {needed}")
    return np.ndarray(shape, dtype, buffer if needed else b"")


def decoded_strings(column: Column, items: Array, start: int, stop: int) -> list[Any]:
    """Return some items of a column, one after another, as bytes or str.

    Raises:
        ValueError: They are not UTF-8.
    """
    return _decoded(column, items.slice(start, stop - start).to_pylist())


def taken_strings(column: Column, items: Array, indices: NDArray[np.int64]) -> list[Any]:
    """Return the items of a column at these indices as bytes or str.

    Raises:
        ValueError: They are not UTF-8.
    """
    return _decoded(column, items.take(pyarrow().array(indices)).to_pylist())


def _decoded(column: Column, found: list[Any]) -> list[Any]:
    if column.held == SURROGATES:
        return [item.decode("utf-8", "surrogatepass") for item in found]
    return found
