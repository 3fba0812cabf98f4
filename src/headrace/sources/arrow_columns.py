"""NumPy values of Arrow columns, and the schema of the elements that they form.

    numbers, bool       their dtype
    date, timestamp     datetime64 (UTC for a timestamp with a time zone)
    duration, time      timedelta64; a time counts from midnight
    string, binary      str, bytes; of a dictionary, the value itself
    list                an array of one axis, of numbers, str or bytes
    fixed-size list     an array of fixed shape, as for `arrow.fixed_shape_tensor`
    struct              a dict

A null is NaN in a column of floats and NaT in one of dates or times; elsewhere it has no NumPy
value, and `find_null` finds it. Other types (decimal, map, union, list of lists) are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.structure import flatten, unflatten
from headrace.element.transpose import untranspose
from headrace.errors import InvalidArgumentError
from headrace.saved.arrow import Array, pyarrow
from headrace.saved.schema import BYTES_KIND, NUMBERS_KIND, STR_KIND, ColumnSchema, FileSchema

__all__ = ["Null", "find_null", "infer_arrow_schema", "read_columns", "to_chunk"]

_OBJECT = np.dtype(object)


class Null(NamedTuple):
    """A null without NumPy value: its row, and the name of its column."""

    row: int
    column: str


# --- Types ----------------------------------------------------------------------------------------


def infer_arrow_schema(fields: Iterable[Any]) -> FileSchema:
    """Return the schema of elements whose components are Arrow fields, in this order.

    Raises:
        InvalidArgumentError: If a type has no NumPy equivalent; the message names the column.
    """
    columns: list[ColumnSchema] = []
    _, structure = flatten({field.name: _nest(field, field.name, columns) for field in fields})
    return FileSchema(structure, tuple(columns))


def _nest(field: Any, name: str, columns: list[ColumnSchema]) -> Any:
    """Append the columns of a field; return an element with a leaf for each."""
    kind = field.type
    if pyarrow().types.is_struct(kind):
        children = [kind.field(index) for index in range(kind.num_fields)]
        return {child.name: _nest(child, f"{name}.{child.name}", columns) for child in children}
    columns.append(_infer_column(kind, name))
    return len(columns)


def _infer_column(kind: Any, name: str) -> ColumnSchema:
    pa = pyarrow()
    shape: list[int | None] = []
    item, is_bool8 = kind, False
    while True:
        if isinstance(item, pa.FixedShapeTensorType):
            shape += item.shape
            item = item.value_type
        elif isinstance(item, pa.BaseExtensionType):
            is_bool8 = item.extension_name == "arrow.bool8"
            item = item.storage_type
        elif pa.types.is_dictionary(item):
            item = item.value_type
        elif pa.types.is_fixed_size_list(item):
            shape.append(item.list_size)
            item = item.value_type
        elif not shape and (pa.types.is_list(item) or pa.types.is_large_list(item)):
            shape.append(None)
            item = item.value_type
        else:
            break
    if _is_string(item):
        return ColumnSchema(STR_KIND, _OBJECT, tuple(shape))
    if _is_binary(item):
        return ColumnSchema(BYTES_KIND, _OBJECT, tuple(shape))
    dtype = np.dtype(bool) if is_bool8 else _number_dtype(item)
    if dtype is None:
        raise InvalidArgumentError(
            f"column {name!r} has type {kind}, which has no NumPy equivalent; leave the column out "
            "with `columns`, or write it as numbers, strings, or lists of these"
        )
    return ColumnSchema(NUMBERS_KIND, dtype, tuple(shape))


def _number_dtype(kind: Any) -> np.dtype[Any] | None:
    types = pyarrow().types
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    if types.is_date32(kind):
        return np.dtype("M8[D]")
    if types.is_date64(kind):
        return np.dtype("M8[ms]")
    if types.is_timestamp(kind):
        return np.dtype(f"M8[{kind.unit}]")
    if types.is_duration(kind) or types.is_time(kind):
        return np.dtype(f"m8[{kind.unit}]")
    return None


def _is_string(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_binary(kind: Any) -> bool:
    types = pyarrow().types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


# --- Values ---------------------------------------------------------------------------------------


def to_chunk(schema: FileSchema, arrays: Iterable[Array], size: int) -> Chunk:
    """Return the elements whose components are Arrow arrays, with columns if all shapes are fixed.

    The chunk takes ownership: memory that is writable is not copied.

    Args:
        schema: Schema of the elements (`infer_arrow_schema`).
        arrays: One array for each field, without nulls that `find_null` finds.
        size: Number of elements.
    """
    columns = read_columns(schema, arrays)
    if schema.is_fixed and columns:
        return Chunk.of_columns(unflatten(schema.structure, columns), size)
    return Chunk.of_rows(untranspose(schema.structure, columns, size))


def read_columns(schema: FileSchema, arrays: Iterable[Array]) -> list[Any]:
    """Return the values of each component: stacked, or a list of arrays of different lengths."""
    leaves = itertools.chain.from_iterable(map(_leaves, arrays))
    return [_read_column(column, leaf) for column, leaf in zip(schema.columns, leaves, strict=True)]


def _leaves(array: Array) -> Iterable[Array]:
    if not pyarrow().types.is_struct(array.type):
        yield array
        return
    for index in range(array.type.num_fields):
        yield from _leaves(array.field(index))


def _read_column(column: ColumnSchema, array: Array) -> Any:
    """Return the values of one component: stacked, or a list of arrays of different lengths."""
    size, starts = len(array), None
    types = pyarrow().types
    while True:
        array = _storage(array)
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        elif types.is_fixed_size_list(array.type):
            array = array.flatten()
        elif types.is_list(array.type) or types.is_large_list(array.type):
            starts, array = _split_list(array)
        else:
            break
    if column.kind == NUMBERS_KIND:
        flat = _read_numbers(array, column.dtype)
    else:
        flat = array.to_numpy(zero_copy_only=False, writable=True)
    if starts is None:
        return flat.reshape(size, *column.lengths)
    flat = flat.reshape(int(starts[-1]), *column.lengths)
    return [flat[start:stop] for start, stop in itertools.pairwise(starts.tolist())]


def _storage(array: Array) -> Array:
    while isinstance(array.type, pyarrow().BaseExtensionType):
        array = array.storage
    return array


def _split_list(array: Array) -> tuple[NDArray[np.int64], Array]:
    """Return the start of each list, with the end of the last one, and the items of all lists."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    return offsets - first, array.values.slice(first, last - first)


def _read_numbers(array: Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    pa = pyarrow()
    kind = array.type
    if pa.types.is_time(kind):
        whole = array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
        array = whole.view(pa.duration(kind.unit))
    values: NDArray[Any]
    if array.null_count or array.type.bit_width != 8 * dtype.itemsize or not len(array):
        # Nulls become NaN or NaT. Arrow stores a bool in a bit, and a date in 4 bytes.
        values = array.to_numpy(zero_copy_only=False, writable=True)
        return values.astype(dtype, copy=False)
    offset = array.offset * dtype.itemsize
    values = np.ndarray(len(array), dtype, array.buffers()[1], offset)
    return values if values.flags.writeable else values.copy()


# --- Nulls ----------------------------------------------------------------------------------------


def find_null(names: Iterable[str], arrays: Iterable[Array]) -> Null | None:
    """Return the first null that has no NumPy value, by row; None if there is none."""
    return _first(_find_null(array, name) for name, array in zip(names, arrays, strict=True))


def _find_null(array: Array, name: str) -> Null | None:
    types = pyarrow().types
    array = _storage(array)
    kind = array.type
    if types.is_floating(kind) or types.is_temporal(kind):
        return None
    found: list[Null | None] = []
    if array.null_count:
        found.append(Null(_first_null(array), name))
    if types.is_struct(kind):
        names = [f"{name}.{kind.field(index).name}" for index in range(kind.num_fields)]
        found.append(find_null(names, map(array.field, range(kind.num_fields))))
    elif types.is_fixed_size_list(kind):
        length = kind.list_size
        items = array.values.slice(array.offset * length, len(array) * length)
        if item := _find_null(items, name):
            found.append(Null(item.row // length, name))
    elif types.is_list(kind) or types.is_large_list(kind):
        starts, items = _split_list(array)
        if item := _find_null(items, name):
            row = int(np.searchsorted(starts, item.row, side="right")) - 1
            found.append(Null(row, name))
    return _first(found)


def _first(nulls: Iterable[Null | None]) -> Null | None:
    return min((null for null in nulls if null), default=None, key=lambda null: null.row)


def _first_null(array: Array) -> int:
    return int(np.argmin(array.is_valid().to_numpy(zero_copy_only=False)))
