"""Columns in an Arrow IPC file, and back: the one file that imports pyarrow.

    numbers         the Arrow type of this dtype; complex as two floats; what Arrow has no type for
                    (structured dtypes, bfloat16 ...) as binary of one size
    bytes, str      large_binary, large_string
    one shape       a list of one size; with several axes the extension arrow.fixed_shape_tensor
    other shapes    large_list; with several axes the lengths in a column beside it, `<name>.shape`

Other byte orders are turned into Arrow's. The schema's metadata holds the form under `headrace`,
each record batch a CRC-32C of its buffers. There are no nulls: NaT and NaN are what they are.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from headrace.element.stack import join
from headrace.element.structure import Kind, Node, Structure
from headrace.errors import FailedPreconditionError
from headrace.saved.form import NUMBERS, STR_HELD, SURROGATES, Column, Form, Values

__all__ = [
    "CHECK_KEY",
    "FORM_KEY",
    "OFFSET",
    "Array",
    "ArrowWriter",
    "LoneSurrogatesError",
    "arrow_schema",
    "check_sum",
    "own_order",
    "pyarrow",
    "stored_dtype",
]

OFFSET = np.dtype("<i8")
"""What offsets and lengths are."""
FORM_KEY = b"headrace"
"""Where the schema's metadata holds the form."""
CHECK_KEY = b"crc32c"
"""Where a batch's metadata holds its checksum."""

Array: TypeAlias = Any
"""An array of pyarrow."""


def pyarrow() -> Any:
    """Return the package pyarrow.

    Raises:
        FailedPreconditionError: It is not installed here.
    """
    try:
        # Optional, and this file's alone.
        import pyarrow as package  # noqa: PLC0415
        import pyarrow.ipc  # noqa: PLC0415
    except ImportError as error:
        raise FailedPreconditionError(
            "saving and loading datasets needs the package pyarrow, which is not installed here; "
            "pip install 'headrace[arrow]'"
        ) from error
    return package


class LoneSurrogatesError(ValueError):
    """A str is not UTF-8.

    Attributes:
        index: The column that holds it.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"column {index} holds lone surrogates")
        self.index = index


# --- dtypes -----------------------------------------------------------------------------------


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers of `dtype` are stored: little endian, or as they are."""
    return dtype if dtype.kind == "V" else dtype.newbyteorder("<")


def own_order(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a stored array, which may be changed, in the byte order of `dtype`."""
    if array.dtype == dtype:
        return array
    return array.byteswap(inplace=True).view(dtype)


def _value_type(column: Column) -> Any:
    pa = pyarrow()
    if column.held != NUMBERS:
        return pa.large_string() if column.held == STR_HELD else pa.large_binary()
    dtype = column.dtype
    if dtype.kind == "b":
        return pa.bool8()
    if dtype.kind in "iuf" and dtype.itemsize <= 8:
        return pa.from_numpy_dtype(dtype.newbyteorder("="))
    if dtype.kind == "c" and dtype.itemsize <= 16:
        return pa.float32() if dtype.itemsize == 8 else pa.float64()
    if dtype.kind in "mM":
        unit, count = np.datetime_data(dtype)
        if count == 1 and unit in ("s", "ms", "us", "ns"):
            return pa.timestamp(unit) if dtype.kind == "M" else pa.duration(unit)
        return pa.int64()
    return pa.binary(dtype.itemsize)


def _is_pair(column: Column) -> bool:
    return column.held == NUMBERS and column.dtype.kind == "c" and column.dtype.itemsize <= 16


def _types(column: Column) -> list[Any]:
    """Return the Arrow types of the one or two columns that a column takes."""
    pa = pyarrow()
    value = _value_type(column)
    if not column.is_fixed:
        item = pa.list_(value, 2) if _is_pair(column) else value
        shapes = [pa.list_(pa.int64(), len(column.shape))] if len(column.shape) > 1 else []
        return [pa.large_list(item), *shapes]
    shape = (*column.lengths, 2) if _is_pair(column) else column.lengths
    if not shape:
        return [value]
    if len(shape) == 1 or column.held != NUMBERS:
        return [pa.list_(value, math.prod(shape))]
    return [pa.fixed_shape_tensor(value, shape)]


def arrow_schema(form: Form) -> Any:
    """Return the schema of files of this form."""
    pa = pyarrow()
    fields = []
    for name, column in zip(_names(form.structure), form.columns, strict=True):
        types = _types(column)
        fields.append(pa.field(name, types[0], nullable=False))
        if len(types) > 1:
            fields.append(pa.field(f"{name}.shape", types[1], nullable=False))
    if not fields:  # elements without components are counted by it
        fields.append(pa.field("nothing", pa.null()))
    return pa.schema(fields, metadata={FORM_KEY: form.describe().encode()})


def _names(structure: Structure) -> list[str]:
    """Return a name for each component: its keys with dots between, where that tells them apart."""
    names = list(_dotted(structure.root, ""))
    if len({*names, *(f"{name}.shape" for name in names)}) != 2 * len(names):
        names = structure.paths
    return [name.encode("utf-8", "backslashreplace").decode() for name in names]


def _dotted(node: Node, prefix: str) -> Iterator[str]:
    if node.kind == Kind.LEAF:
        yield prefix or "element"
    for index, child in enumerate(node.children):
        key = str(node.keys[index]) if node.keys else str(index)
        yield from _dotted(child, f"{prefix}.{key}" if prefix else key)


# --- writing ----------------------------------------------------------------------------------


class Writable(Protocol):
    """What takes bytes, perhaps fewer than it is given at a time."""

    def write(self, data: Any, /) -> int:
        """Write some of the bytes; return how many."""


class ArrowWriter:
    """Writes batches of elements of one form into a file.

    Args:
        file: Open for writing; whoever opened it closes it.
        form: How the elements are columns.

    Attributes:
        bytes: How many bytes were written.
    """

    def __init__(self, file: Writable, form: Form) -> None:
        self._form = form
        self._schema = arrow_schema(form)
        self._sink = _Sink(file)
        pa = pyarrow()
        options = pa.ipc.IpcWriteOptions(use_threads=False)
        self._writer = pa.ipc.new_file(self._sink, self._schema, options=options)

    @property
    def bytes(self) -> int:
        """How many bytes were written."""
        return self._sink.bytes

    def write(self, values: Sequence[Values], size: int) -> None:
        """Write a batch of `size` elements: the values of each column.

        Raises:
            LoneSurrogatesError: A str is not UTF-8; nothing was written.
        """
        arrays: list[Array] = []
        for index, (column, each) in enumerate(zip(self._form.columns, values, strict=True)):
            try:
                arrays += _encode(column, each, size)
            except UnicodeEncodeError:
                raise LoneSurrogatesError(index) from None
        if not arrays:
            arrays.append(pyarrow().nulls(size))
        batch = pyarrow().RecordBatch.from_arrays(arrays, schema=self._schema)
        check = f"{check_sum(arrays):08x}".encode()
        self._writer.write_batch(batch, custom_metadata={CHECK_KEY: check})

    def close(self) -> None:
        """Write what belongs at the end."""
        self._writer.close()


class _Sink(io.RawIOBase):
    """Counts what goes into a file, which may take less than it is given at a time."""

    def __init__(self, file: Writable) -> None:
        self._file = file
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = left.nbytes
        while left.nbytes:
            left = left[self._file.write(left) :]
        self.bytes += size
        return size


def check_sum(arrays: Sequence[Array]) -> int:
    """Return the CRC-32C of all buffers of some arrays."""
    crc = 0
    for array in arrays:
        for buffer in array.buffers():
            if buffer is not None and buffer.size:
                crc = google_crc32c.extend(crc, buffer)
    return crc


def _encode(column: Column, values: Values, size: int) -> list[Array]:
    types = _types(column)
    if column.is_fixed:
        items = _items(column, values)
        return [_shaped(types[0], items, size)]
    pa = pyarrow()
    arrays: list[NDArray[Any]] = list(values)
    shapes = np.array([array.shape for array in arrays], OFFSET)
    offsets = np.zeros(size + 1, OFFSET)
    np.cumsum(shapes.prod(axis=1), out=offsets[1:])
    flat = join([array.reshape(-1) for array in arrays], arrays[0].dtype)
    items = _items(column, flat)
    if _is_pair(column):
        items = pa.Array.from_buffers(
            types[0].value_type, len(items) // 2, [None], children=[items]
        )
    lists = pa.Array.from_buffers(types[0], size, [None, _buffer(offsets)], children=[items])
    if len(types) == 1:
        return [lists]
    lengths = pa.Array.from_buffers(pa.int64(), shapes.size, [None, _buffer(shapes)])
    return [lists, _shaped(types[1], lengths, size)]


def _shaped(kind: Any, items: Array, size: int) -> Array:
    """Return items as `size` values of a type."""
    pa = pyarrow()
    storage = kind.storage_type if hasattr(kind, "shape") else kind
    if not hasattr(storage, "list_size"):
        return items
    made = pa.Array.from_buffers(storage, size, [None], children=[items])
    return made if storage is kind else pa.ExtensionArray.from_storage(kind, made)


def _items(column: Column, values: Any) -> Array:
    """Return all items of fixed values one after another."""
    pa = pyarrow()
    kind = _value_type(column)
    if column.held != NUMBERS:
        items = values.reshape(-1) if isinstance(values, np.ndarray) else values
        if column.held == SURROGATES:
            items = [item.encode("utf-8", "surrogatepass") for item in items]
        return pa.array(items, type=kind)
    if stored_dtype(column.dtype) != column.dtype:
        values = values.byteswap()
    count = values.size * (2 if _is_pair(column) else 1)
    if column.dtype.kind == "b":
        made = pa.Array.from_buffers(pa.int8(), count, [None, _buffer(values)])
        return pa.ExtensionArray.from_storage(kind, made)
    return pa.Array.from_buffers(kind, count, [None, _buffer(values)])


def _buffer(array: NDArray[Any]) -> Any:
    if not array.nbytes:
        return pyarrow().py_buffer(b"")
    return pyarrow().py_buffer(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
