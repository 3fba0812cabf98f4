"""Encoding of columns in an Arrow IPC file.

    numbers         the Arrow type of the dtype; complex as two floats; dtypes unknown to Arrow
                    (structured, bfloat16 ...) as fixed-size binary
    bytes, str      large_binary, large_string
    one shape       a fixed-size list; with several axes the extension arrow.fixed_shape_tensor
    other shapes    large_list; with several axes the lengths in an extra column, `<name>.shape`

Other byte orders are converted to Arrow's. The schema's metadata has the file schema under
`headrace`, and each record batch a CRC-32C of its buffers. There are no nulls: NaT and NaN are
stored as values.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from headrace.element.stack import join
from headrace.element.structure import NodeKind, Structure, StructureNode
from headrace.errors import MissingDependencyError
from headrace.saved.schema import (
    NUMBERS_KIND,
    STR_KIND,
    SURROGATES_KIND,
    ColumnSchema,
    FileSchema,
    Values,
)

__all__ = [
    "CHECKSUM_KEY",
    "OFFSET",
    "SCHEMA_KEY",
    "Array",
    "ArrowWriter",
    "LoneSurrogatesError",
    "arrow_schema",
    "checksum",
    "pyarrow",
    "pyarrow_module",
    "stored_dtype",
    "to_byte_order",
]

OFFSET = np.dtype("<i8")
"""Dtype of offsets and lengths."""
SCHEMA_KEY = b"headrace"
"""Key of the file schema in the metadata of the Arrow schema."""
CHECKSUM_KEY = b"crc32c"
"""Key of the checksum in the metadata of a batch."""

Array: TypeAlias = Any
"""A pyarrow array."""


def pyarrow(purpose: str = "saving and loading datasets") -> Any:
    """Return the package pyarrow.

    Args:
        purpose: Action that requires it, for the error message.

    Raises:
        MissingDependencyError: If it is not installed.
    """
    try:
        import pyarrow as package  # noqa: PLC0415 - optional dependency
        import pyarrow.ipc  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} requires the package pyarrow, which is not installed; "
            "pip install 'headrace[arrow]'"
        ) from error
    return package


def pyarrow_module(name: str, purpose: str) -> Any:
    """Return a module of pyarrow such as "parquet"; arguments and errors as for `pyarrow`."""
    return importlib.import_module(f"{pyarrow(purpose).__name__}.{name}")


class LoneSurrogatesError(ValueError):
    """A str that cannot be encoded as UTF-8.

    Attributes:
        index: Index of its column.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"column {index} has lone surrogates")
        self.index = index


# --- Types ------------------------------------------------------------------------------------


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers of `dtype` are stored: little-endian, or unchanged."""
    return dtype if dtype.kind == "V" else dtype.newbyteorder("<")


def to_byte_order(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a stored array in the byte order of `dtype`; the array may be modified."""
    if array.dtype == dtype:
        return array
    return array.byteswap(inplace=True).view(dtype)


def _value_type(column: ColumnSchema) -> Any:
    pa = pyarrow()
    if column.kind != NUMBERS_KIND:
        return pa.large_string() if column.kind == STR_KIND else pa.large_binary()
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


def _is_complex_pair(column: ColumnSchema) -> bool:
    return column.kind == NUMBERS_KIND and column.dtype.kind == "c" and column.dtype.itemsize <= 16


def _types(column: ColumnSchema) -> list[Any]:
    """Return the Arrow types of the one or two Arrow columns that store a column."""
    pa = pyarrow()
    value = _value_type(column)
    if not column.is_fixed:
        item = pa.list_(value, 2) if _is_complex_pair(column) else value
        shapes = [pa.list_(pa.int64(), len(column.shape))] if len(column.shape) > 1 else []
        return [pa.large_list(item), *shapes]
    shape = (*column.lengths, 2) if _is_complex_pair(column) else column.lengths
    if not shape:
        return [value]
    if len(shape) == 1 or column.kind != NUMBERS_KIND:
        return [pa.list_(value, math.prod(shape))]
    return [pa.fixed_shape_tensor(value, shape)]


def arrow_schema(schema: FileSchema) -> Any:
    """Return the Arrow schema of files with this file schema."""
    pa = pyarrow()
    fields = []
    for name, column in zip(_column_names(schema.structure), schema.columns, strict=True):
        types = _types(column)
        fields.append(pa.field(name, types[0], nullable=False))
        if len(types) > 1:
            fields.append(pa.field(f"{name}.shape", types[1], nullable=False))
    if not fields:  # this column counts elements without components
        fields.append(pa.field("nothing", pa.null()))
    return pa.schema(fields, metadata={SCHEMA_KEY: schema.describe().encode()})


def _column_names(structure: Structure) -> list[str]:
    """Return a name for each component: its dotted keys, or its path if these are ambiguous."""
    names = list(_dotted_names(structure.root, ""))
    if len({*names, *(f"{name}.shape" for name in names)}) != 2 * len(names):
        names = structure.paths
    return [name.encode("utf-8", "backslashreplace").decode() for name in names]


def _dotted_names(node: StructureNode, prefix: str) -> Iterator[str]:
    if node.kind == NodeKind.LEAF:
        yield prefix or "element"
    for index, child in enumerate(node.children):
        key = str(node.keys[index]) if node.keys else str(index)
        yield from _dotted_names(child, f"{prefix}.{key}" if prefix else key)


# --- Writing ----------------------------------------------------------------------------------


class Writable(Protocol):
    """File that accepts bytes, possibly fewer than given per call."""

    def write(self, data: Any, /) -> int:
        """Write some of the bytes; return their number."""


class ArrowWriter:
    """Writes batches of elements with one schema to a file.

    Args:
        file: File open for writing; the caller closes it.
        schema: Schema of the elements.

    Attributes:
        bytes_written: Number of bytes written.
    """

    def __init__(self, file: Writable, schema: FileSchema) -> None:
        self._file_schema = schema
        self._schema = arrow_schema(schema)
        self._sink = _Sink(file)
        pa = pyarrow()
        options = pa.ipc.IpcWriteOptions(use_threads=False)
        self._writer = pa.ipc.new_file(self._sink, self._schema, options=options)

    @property
    def bytes_written(self) -> int:
        """Number of bytes written."""
        return self._sink.bytes_written

    def write(self, values: Sequence[Values], size: int) -> None:
        """Write a batch of `size` elements, given as the values of each column.

        Raises:
            LoneSurrogatesError: If a str is not valid UTF-8; nothing was written.
        """
        arrays: list[Array] = []
        for index, (column, each) in enumerate(zip(self._file_schema.columns, values, strict=True)):
            try:
                arrays += _encode(column, each, size)
            except UnicodeEncodeError:
                raise LoneSurrogatesError(index) from None
        if not arrays:
            arrays.append(pyarrow().nulls(size))
        batch = pyarrow().RecordBatch.from_arrays(arrays, schema=self._schema)
        check = f"{checksum(arrays):08x}".encode()
        self._writer.write_batch(batch, custom_metadata={CHECKSUM_KEY: check})

    def close(self) -> None:
        """Write the footer of the file."""
        self._writer.close()


class _Sink(io.RawIOBase):
    """Counts the bytes written to a file that may accept fewer than given per call."""

    def __init__(self, file: Writable) -> None:
        self._file = file
        self.bytes_written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = left.nbytes
        while left.nbytes:
            left = left[self._file.write(left) :]
        self.bytes_written += size
        return size


def checksum(arrays: Sequence[Array]) -> int:
    """Return the CRC-32C of all buffers of the arrays."""
    crc = 0
    for array in arrays:
        for buffer in array.buffers():
            if buffer is not None and buffer.size:
                crc = google_crc32c.extend(crc, buffer)
    return crc


def _encode(column: ColumnSchema, values: Values, size: int) -> list[Array]:
    types = _types(column)
    if column.is_fixed:
        items = _items(column, values)
        return [_nest_in_lists(types[0], items, size)]
    pa = pyarrow()
    arrays: list[NDArray[Any]] = list(values)
    shapes = np.array([array.shape for array in arrays], OFFSET)
    offsets = np.zeros(size + 1, OFFSET)
    np.cumsum(shapes.prod(axis=1), out=offsets[1:])
    flat = join([array.reshape(-1) for array in arrays], arrays[0].dtype)
    items = _items(column, flat)
    if _is_complex_pair(column):
        items = pa.Array.from_buffers(
            types[0].value_type, len(items) // 2, [None], children=[items]
        )
    lists = pa.Array.from_buffers(types[0], size, [None, _buffer(offsets)], children=[items])
    if len(types) == 1:
        return [lists]
    lengths = pa.Array.from_buffers(pa.int64(), shapes.size, [None, _buffer(shapes)])
    return [lists, _nest_in_lists(types[1], lengths, size)]


def _nest_in_lists(kind: Any, items: Array, size: int) -> Array:
    """Return items as `size` values of an Arrow type."""
    pa = pyarrow()
    storage = kind.storage_type if hasattr(kind, "shape") else kind
    if not hasattr(storage, "list_size"):
        return items
    made = pa.Array.from_buffers(storage, size, [None], children=[items])
    return made if storage is kind else pa.ExtensionArray.from_storage(kind, made)


def _items(column: ColumnSchema, values: Any) -> Array:
    """Return all items of fixed-shape values as one array."""
    pa = pyarrow()
    kind = _value_type(column)
    if column.kind != NUMBERS_KIND:
        items = values.reshape(-1) if isinstance(values, np.ndarray) else values
        if column.kind == SURROGATES_KIND:
            items = [item.encode("utf-8", "surrogatepass") for item in items]
        return pa.array(items, type=kind)
    if stored_dtype(column.dtype) != column.dtype:
        values = values.byteswap()
    count = values.size * (2 if _is_complex_pair(column) else 1)
    if column.dtype.kind == "b":
        made = pa.Array.from_buffers(pa.int8(), count, [None, _buffer(values)])
        return pa.ExtensionArray.from_storage(kind, made)
    return pa.Array.from_buffers(kind, count, [None, _buffer(values)])


def _buffer(array: NDArray[Any]) -> Any:
    if not array.nbytes:
        return pyarrow().py_buffer(b"")
    return pyarrow().py_buffer(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
