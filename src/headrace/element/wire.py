"""Serialization of chunks: a header that describes the data, followed by raw buffers.

The header is msgpack: format version, number of elements, form, and one *part* for each run of
elements with the same structure: [number of elements, structure, one column for each leaf]. A
column has a dtype and a layout (FIXED: one shape for all; RAGGED: a buffer of shapes; SEPARATE: one
buffer per element; MIXED: one column per element). Values of a numeric dtype take one buffer, bytes
and str take two: int64 lengths, then the joined data. Integers outside the header are
little-endian.

Rule 1. Nothing is pickled or unpickled; dtypes and classes are sent as `description` defines.
Rule 2. A length from a header is checked against the sizes of the buffers, so that no memory is
        allocated for data that the peer did not send. Elements without bytes are padded.
Rule 3. Any defect of a frame raises a DataLossError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.element import stack as stacking
from headrace.element.chunk import Chunk
from headrace.element.description import (
    decode_dtype,
    decode_structure,
    encode_dtype,
    encode_structure,
)
from headrace.element.normalize import check_strings
from headrace.element.structure import Element, Structure, describe_component, flatten, unflatten
from headrace.element.transpose import transpose, untranspose
from headrace.errors import DataLossError, InvalidElementError

__all__ = ["OWN_BUFFER_BYTES", "Buffer", "copy_chunk", "decode", "encode", "frame_bytes"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_VERSION = 1
_COLUMNS = 0
_ROWS = 1

_FIXED = 0
_RAGGED = 1
_SEPARATE = 2
_MIXED = 3

OWN_BUFFER_BYTES = 32 << 10
"""Minimum average size in bytes of arrays that are sent from their own memory, one buffer each;
smaller arrays are cheaper to copy into one buffer."""
_LENGTH = np.dtype("<i8")
_STRINGS = {"B": bytes, "T": str}

_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder().decode


def encode(chunk: Chunk) -> list[Buffer]:
    """Return `chunk` as a header and raw buffers.

    C-contiguous columns are not copied, nor are columns with large contiguous rows.

    Raises:
        InvalidElementError: If a component contains Python objects other than bytes or str.
    """
    buffers: list[Buffer] = [b""]
    if chunk.is_columnar and not _has_scattered_rows(chunk):
        leaves, structure = flatten(chunk.columns())
        columns = [
            _encode_array(leaf, path, buffers)
            for leaf, path in zip(leaves, structure.paths, strict=True)
        ]
        form, parts = _COLUMNS, [[chunk.size, encode_structure(structure), columns]]
    else:
        form, parts = _ROWS, []
        for structure, lists, size in _runs(chunk.rows()):
            columns = [
                _encode_column(values, path, buffers)
                for values, path in zip(lists, structure.paths, strict=True)
            ]
            parts.append([size, encode_structure(structure), columns])
    if sum([_nbytes(buffer) for buffer in buffers]) < chunk.size:
        buffers.append(bytes(chunk.size))
    buffers[0] = _encode_header([_VERSION, chunk.size, form, parts])
    return buffers


def decode(buffers: Sequence[Buffer]) -> Chunk:
    """Return the chunk that `encode` wrote; its arrays are views of `buffers`.

    Arrays are writable if their buffer is. A chunk sent as rows is returned with columns if its
    elements had equal shapes and were small; its rows are then views of the columns.

    Raises:
        DataLossError: If the buffers are not a complete frame.
        FailedPreconditionError: If a dtype needs a package that is not installed.
    """
    try:
        return _decode(buffers)
    except DataLossError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, LookupError, MemoryError) as e:
        raise DataLossError(
            f"a frame of {len(buffers)} buffers cannot be read: {e}; it was truncated or "
            "modified in transit, or sent by another version of Headrace"
        ) from e


def copy_chunk(chunk: Chunk) -> Chunk:
    """Return the same elements in newly allocated memory."""
    frames = [bytearray(frame) for frame in encode(chunk)]
    return decode(frames).with_metadata(chunk.metadata)


def frame_bytes(chunk: Chunk) -> int:
    """Return the approximate size of `chunk` in bytes; cheap, for buffering decisions."""
    if chunk.is_columnar:
        return sum([_estimate(leaf) for leaf in flatten(chunk.columns())[0]])
    rows = chunk.rows()
    # Use a sample, since the elements of a dataset usually have similar sizes.
    sample = rows[:: max(1, len(rows) // 8)]
    if not sample:
        return 0
    total = sum([_estimate(leaf) for row in sample for leaf in flatten(row)[0]])
    return total * len(rows) // len(sample)


def _estimate(leaf: Any) -> int:
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind != "O":
            return leaf.nbytes
        sample = leaf.reshape(-1)[:: max(1, leaf.size // 8)].tolist()
        num_bytes = sum([len(item) for item in sample if isinstance(item, (bytes, str))])
        return leaf.size * 8 + (num_bytes * leaf.size // len(sample) if sample else 0)
    if isinstance(leaf, (bytes, str)):
        return len(leaf) + 8
    return leaf.nbytes if isinstance(leaf, np.generic) else 8


# --- Encoding --------------------------------------------------------------------------------


def _runs(rows: list[Element]) -> Iterator[tuple[Structure, list[list[Any]], int]]:
    """Divide `rows` into runs with the same structure: nearly always a single run."""
    if not rows:
        return
    try:
        yield (*transpose(rows), len(rows))
        return
    except InvalidElementError:
        pass
    start, current = 0, flatten(rows[0])[1]
    for stop in range(1, len(rows) + 1):
        following = flatten(rows[stop])[1] if stop < len(rows) else None
        if following != current:
            yield (*transpose(rows[start:stop]), stop - start)
            if following is not None:
                start, current = stop, following


def _has_scattered_rows(chunk: Chunk) -> bool:
    """Return whether to send each row from its own memory, because a column is not contiguous."""
    for leaf in flatten(chunk.columns())[0]:
        if (
            isinstance(leaf, np.ndarray)
            and leaf.nbytes >= OWN_BUFFER_BYTES * chunk.size
            and len(leaf) == chunk.size
            and leaf.dtype.kind != "O"
            and not leaf.flags.c_contiguous
            and leaf[0].flags.c_contiguous
        ):
            return True
    return False


def _encode_array(array: Any, path: str, buffers: list[Buffer]) -> list[Any]:
    """Encode one stacked leaf."""
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise InvalidElementError(
            f"{describe_component(path)} of a batch is {array!r:.80}, which has no leading axis; "
            "all components must have the same leading axis"
        )
    return [_FIXED, _encode_values(array, path, buffers), array.shape[1:]]


def _encode_column(values: list[Any], path: str, buffers: list[Buffer]) -> list[Any]:
    """Encode the values of one leaf of many rows."""
    first = values[0]
    cls = type(first)
    if len(set(map(type, values))) != 1:
        return _encode_mixed(values, path, buffers)
    if cls is bytes or cls is str:
        lengths = np.fromiter(map(len, values), _LENGTH, len(values))
        if cls is bytes and int(lengths.sum()) >= OWN_BUFFER_BYTES * len(values):
            buffers.extend(values)
            return [_SEPARATE, "B", []]
        return [_FIXED, _encode_strings(values, cls, buffers), ()]
    if cls is np.ndarray:
        return _encode_arrays(values, path, buffers)
    try:
        stacked = stacking.stack_column(values, path)
    except InvalidElementError:
        return _encode_mixed(values, path, buffers)
    return [_FIXED, _encode_values(stacked, path, buffers), ()]


def _encode_arrays(values: list[NDArray[Any]], path: str, buffers: list[Buffer]) -> list[Any]:
    first = values[0]
    dtype, ndim = first.dtype, first.ndim
    if list(map(attrgetter("dtype"), values)).count(dtype) != len(values):
        return _encode_mixed(values, path, buffers)
    if ndim == 0:
        return _encode_column([value[()] for value in values], path, buffers)
    if len(values) > 1 and dtype.kind == "O" and len({_string_type(v, path) for v in values}) != 1:
        return _encode_mixed(values, path, buffers)
    shapes = list(map(attrgetter("shape"), values))
    if sum(map(attrgetter("nbytes"), values)) >= OWN_BUFFER_BYTES * len(values):
        described = [_encode_values(value, path, buffers) for value in values]
        return [_SEPARATE, described[0], shapes]
    if shapes.count(shapes[0]) == len(values):
        stacked = stacking.join(values, dtype).reshape(len(values), *shapes[0])
        return [_FIXED, _encode_values(stacked, path, buffers), shapes[0]]
    if len(set(map(len, shapes))) != 1:
        return _encode_mixed(values, path, buffers)
    buffers.append(_raw(np.array(shapes, _LENGTH)))
    joined = stacking.join([value.reshape(-1) for value in values], dtype)
    return [_RAGGED, _encode_values(joined, path, buffers), ndim]


def _encode_mixed(values: list[Any], path: str, buffers: list[Buffer]) -> list[Any]:
    if len(values) == 1:
        raise InvalidElementError(
            f"{describe_component(path)} is a {type(values[0]).__name__}, which cannot be sent; "
            "return arrays, numbers, bytes or str from map()"
        )
    return [_MIXED, [_encode_column([value], path, buffers) for value in values]]


def _encode_values(array: NDArray[Any], path: str, buffers: list[Buffer]) -> Any:
    if array.dtype.kind == "O":
        return _encode_strings(array.reshape(-1).tolist(), _string_type(array, path), buffers)
    described = encode_dtype(array.dtype)
    buffers.append(_raw(array))
    return described


def _string_type(array: NDArray[Any], path: str) -> type:
    return check_strings(array, path) or bytes


def _encode_strings(values: list[Any], cls: type, buffers: list[Buffer]) -> str:
    if cls is str:
        # A str may contain lone surrogates; send them, too.
        values = [value.encode("utf-8", "surrogatepass") for value in values]
    buffers.append(_raw(np.fromiter(map(len, values), _LENGTH, len(values))))
    buffers.append(b"".join(values))
    return "B" if cls is bytes else "T"


def _raw(array: NDArray[Any]) -> Buffer:
    if not array.nbytes:
        return b""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _nbytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


# --- Decoding --------------------------------------------------------------------------------


class _Buffers:
    """The buffers of a frame, taken in order."""

    __slots__ = ("_buffers", "_next")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._next = 1

    def take(self) -> Buffer:
        if self._next >= len(self._buffers):
            raise DataLossError(
                f"a frame has {len(self._buffers)} buffers, but its header lists more; it was "
                "truncated in transit"
            )
        buffer = self._buffers[self._next]
        self._next += 1
        return buffer

    def take_bytes(self, expected: int) -> Buffer:
        buffer = self.take()
        found = _nbytes(buffer)
        if found != expected:
            raise DataLossError(
                f"buffer {self._next - 1} of a frame has {found} bytes but its header lists "
                f"{expected}; it was truncated in transit"
            )
        return buffer


def _decode(buffers: Sequence[Buffer]) -> Chunk:
    if not len(buffers):
        raise DataLossError("a frame has no header; it was truncated in transit")
    header = bytes(buffers[0])
    parse = _parse_known if len(header) <= _SHORT_HEADER else _parse
    size, form, parts = parse(header)
    if size != 0:
        # Every element is backed by at least one byte, which may be padding.
        _check_length(size, sum([_nbytes(buffer) for buffer in buffers[1:]]))
    source = _Buffers(buffers)
    rows: list[Element] = []
    left = size
    for part_size, structure, columns in parts:
        left -= _check_length(part_size, left)
        values = [_decode_column(column, part_size, source) for column in columns]
        if len(parts) == 1 and left == 0 and all(type(v) is np.ndarray for v in values):
            return Chunk.of_columns(unflatten(structure, values), size)
        lists = [v if isinstance(v, list) else stacking.unstack(v, part_size) for v in values]
        rows.extend(untranspose(structure, lists, part_size))
    if left or form == _COLUMNS:
        raise ValueError(f"{size - left} of {size} elements are present")
    return Chunk.of_rows(rows)


def _parse(header: bytes) -> tuple[Any, Any, list[tuple[Any, Structure, Any]]]:
    """Return the contents of a header: the number of elements, their form, and the parts."""
    version, size, form, described = _decode_header(header)
    if version != _VERSION:
        raise DataLossError(
            f"a frame has format version {version!r}, but this version of Headrace reads "
            f"{_VERSION}; run the same version on both sides"
        )
    if form not in (_COLUMNS, _ROWS) or (form == _COLUMNS and len(described) != 1):
        raise ValueError(f"{form!r} is not a form")
    parts = []
    for part_size, description, columns in described:
        structure = decode_structure(description)
        if len(columns) != structure.size:
            raise ValueError(f"{len(columns)} columns for {structure.size} leaves")
        parts.append((part_size, structure, columns))
    return size, form, parts


#: Cached, because frames of one stream often have equal headers. Callers must not modify results.
_parse_known = lru_cache(maxsize=64)(_parse)
_SHORT_HEADER = 512


def _decode_column(column: Any, size: int, source: _Buffers) -> NDArray[Any] | list[Any]:
    layout = column[0]
    if layout == _MIXED:
        _, columns = column
        if len(columns) != size:
            raise ValueError(f"{len(columns)} columns for {size} elements")
        return [_decode_column(single, 1, source)[0] for single in columns]
    layout, dtype, shape = column
    if layout == _FIXED:
        return _decode_values(dtype, (size, *shape), source)
    if layout == _SEPARATE and dtype == "B" and not shape:
        return [bytes(source.take()) for _ in range(size)]
    if layout == _SEPARATE:
        if len(shape) != size:
            raise ValueError(f"{len(shape)} shapes for {size} elements")
        return [_decode_values(dtype, tuple(each), source) for each in shape]
    if layout != _RAGGED:
        raise ValueError(f"{layout!r} is not a layout")
    if type(shape) is not int or not 0 < shape <= 64:
        raise ValueError(f"{shape!r} is not a number of axes")
    raw = source.take_bytes(size * shape * 8)
    shapes = np.frombuffer(raw, _LENGTH).reshape(size, shape).tolist()
    sizes = [_shape_size(each) for each in shapes]
    joined = _decode_values(dtype, (sum(sizes),), source)
    result, start = [], 0
    for each, length in zip(shapes, sizes, strict=True):
        result.append(joined[start : start + length].reshape(each))
        start += length
    return result


def _decode_values(dtype: Any, shape: tuple[int, ...], source: _Buffers) -> NDArray[Any]:
    size = _shape_size(shape)
    if isinstance(dtype, str) and dtype in _STRINGS:
        return _decode_strings(_STRINGS[dtype], size, source).reshape(shape)
    result = decode_dtype(dtype)
    return np.ndarray(shape, result, source.take_bytes(size * result.itemsize))


def _decode_strings(cls: type, size: int, source: _Buffers) -> NDArray[Any]:
    lengths = np.frombuffer(source.take_bytes(size * 8), _LENGTH).tolist()
    joined = bytes(source.take())
    if (lengths and min(lengths) < 0) or sum(lengths) != len(joined):
        raise ValueError(f"lengths of strings do not add up to {len(joined)} bytes")
    result = np.empty(size, object)
    items: list[Any] = []
    start = 0
    for length in lengths:
        items.append(joined[start : start + length])
        start += length
    result[:] = items if cls is bytes else [i.decode("utf-8", "surrogatepass") for i in items]
    return result


def _shape_size(shape: Sequence[Any]) -> int:
    for length in shape:
        if type(length) is not int or length < 0:
            raise ValueError(f"{shape!r} is not a shape")
    return math.prod(shape)


def _check_length(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} elements, but the limit is {limit}")
    return value
