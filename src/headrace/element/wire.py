"""A chunk on the wire: a header that describes, then raw buffers.

The header is msgpack: format version, number of elements, form, and one *part* for each run of
elements of one structure: [number of elements, structure, one column for each leaf]. A column says
how its values are laid out (FIXED: one shape for all; RAGGED: a buffer of shapes; EACH: one buffer
an element; MIXED: one column an element) and of what dtype they are. Values of a numeric dtype
take one buffer, bytes and str take two: int64 lengths, then everything joined. Numbers that are
not in the header are little endian.

Rule 1. Nothing is pickled or unpickled; dtypes and classes travel as `description` says.
Rule 2. A number from a header is believed only when the buffers have that many bytes: nothing is
        allocated that the peer did not send. Chunks of elements without bytes carry padding.
Rule 3. Whatever is wrong with a frame is a DataLossError.
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
from headrace.element.structure import Element, Structure, component, flatten, unflatten
from headrace.element.transpose import transpose, untranspose
from headrace.errors import DataLossError, InvalidElementError

__all__ = ["OWN_BUFFER_BYTES", "Buffer", "copied", "decode", "encode", "frame_bytes"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_VERSION = 1
_COLUMNS = 0
_ROWS = 1

_FIXED = 0
_RAGGED = 1
_EACH = 2
_MIXED = 3

OWN_BUFFER_BYTES = 32 << 10
"""Arrays of at least so many bytes are sent from where they lie, one buffer each; smaller ones cost
less to copy together than to send apart."""
_LENGTH = np.dtype("<i8")
_STRINGS = {"B": bytes, "T": str}

_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder().decode


def encode(chunk: Chunk) -> list[Buffer]:
    """Return `chunk` as a header and raw buffers.

    Columns are not copied where they are C-contiguous, nor where large rows of them are.

    Raises:
        InvalidElementError: A component holds Python objects other than bytes or str.
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

    Arrays are writable where the buffer is. A chunk that was sent as rows comes back with columns
    at hand when the elements were alike and small; its rows are then views of those.

    Raises:
        DataLossError: The buffers are not a whole frame.
        FailedPreconditionError: A dtype needs a package that is not installed here.
    """
    try:
        return _decode(buffers)
    except DataLossError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, LookupError, MemoryError) as e:
        raise DataLossError(
            f"a frame of {len(buffers)} buffers cannot be read: {e}; it was cut short or changed "
            "on its way, or sent by another version of headrace"
        ) from e


def copied(chunk: Chunk) -> Chunk:
    """Return the same elements in memory of their own."""
    frames = [bytearray(frame) for frame in encode(chunk)]
    return decode(frames).with_places(chunk.places)


def frame_bytes(chunk: Chunk) -> int:
    """Return about how many bytes `chunk` takes; cheap, for decisions about buffering."""
    if chunk.is_columnar:
        return sum([_estimate(leaf) for leaf in flatten(chunk.columns())[0]])
    rows = chunk.rows()
    # A sample will do: elements of one dataset are mostly alike.
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
        held = sum([len(item) for item in sample if isinstance(item, (bytes, str))])
        return leaf.size * 8 + (held * leaf.size // len(sample) if sample else 0)
    if isinstance(leaf, (bytes, str)):
        return len(leaf) + 8
    return leaf.nbytes if isinstance(leaf, np.generic) else 8


# --- encoding --------------------------------------------------------------------------------


def _runs(rows: list[Element]) -> Iterator[tuple[Structure, list[list[Any]], int]]:
    """Cut `rows` into runs of one structure: nearly always a single one."""
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
    """Say whether rows are to be sent from where they lie, as no buffer holds all of a column."""
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
            f"{component(path)} of a batch is {array!r:.80}, which has no leading axis; "
            "give every component the same leading axis"
        )
    return [_FIXED, _encode_values(array, path, buffers), array.shape[1:]]


def _encode_column(values: list[Any], path: str, buffers: list[Buffer]) -> list[Any]:
    """Encode the values of one leaf in many rows."""
    first = values[0]
    cls = type(first)
    if len(set(map(type, values))) != 1:
        return _encode_mixed(values, path, buffers)
    if cls is bytes or cls is str:
        lengths = np.fromiter(map(len, values), _LENGTH, len(values))
        if cls is bytes and int(lengths.sum()) >= OWN_BUFFER_BYTES * len(values):
            buffers.extend(values)
            return [_EACH, "B", []]
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
    if len(values) > 1 and dtype.kind == "O" and len({_held(v, path) for v in values}) != 1:
        return _encode_mixed(values, path, buffers)
    shapes = list(map(attrgetter("shape"), values))
    if sum(map(attrgetter("nbytes"), values)) >= OWN_BUFFER_BYTES * len(values):
        described = [_encode_values(value, path, buffers) for value in values]
        return [_EACH, described[0], shapes]
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
            f"{component(path)} is a {type(values[0]).__name__}, which cannot be sent; "
            "return arrays, numbers, bytes or str from map()"
        )
    return [_MIXED, [_encode_column([value], path, buffers) for value in values]]


def _encode_values(array: NDArray[Any], path: str, buffers: list[Buffer]) -> Any:
    if array.dtype.kind == "O":
        return _encode_strings(array.reshape(-1).tolist(), _held(array, path), buffers)
    described = encode_dtype(array.dtype)
    buffers.append(_raw(array))
    return described


def _held(array: NDArray[Any], path: str) -> type:
    return check_strings(array, path) or bytes


def _encode_strings(values: list[Any], cls: type, buffers: list[Buffer]) -> str:
    if cls is str:
        # Lone surrogates are legal in a str; they travel too.
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


# --- decoding --------------------------------------------------------------------------------


class _Buffers:
    """Hands out the buffers of a frame in order."""

    __slots__ = ("_buffers", "_next")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._next = 1

    def take(self) -> Buffer:
        if self._next >= len(self._buffers):
            raise DataLossError(
                f"a frame has {len(self._buffers)} buffers, but its header speaks of more; "
                "it was cut short on its way"
            )
        buffer = self._buffers[self._next]
        self._next += 1
        return buffer

    def take_bytes(self, expected: int) -> Buffer:
        buffer = self.take()
        found = _nbytes(buffer)
        if found != expected:
            raise DataLossError(
                f"buffer {self._next - 1} of a frame has {found} bytes where its header says "
                f"{expected}; it was cut short on its way"
            )
        return buffer


def _decode(buffers: Sequence[Buffer]) -> Chunk:
    if not len(buffers):
        raise DataLossError("a frame has no header; it was cut short on its way")
    header = bytes(buffers[0])
    parse = _parse_known if len(header) <= _SHORT_HEADER else _parse
    size, form, parts = parse(header)
    if size != 0:
        # Every element is backed by at least one byte, be it padding.
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
        raise ValueError(f"{size - left} of {size} elements are there")
    return Chunk.of_rows(rows)


def _parse(header: bytes) -> tuple[Any, Any, list[tuple[Any, Structure, Any]]]:
    """Return what a header says: the number of elements, their form, and of which parts."""
    version, size, form, described = _decode_header(header)
    if version != _VERSION:
        raise DataLossError(
            f"a frame has format version {version!r}, and this version of headrace reads "
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


#: Frames of one stream often begin alike. Nobody changes what is returned.
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
    if layout == _EACH and dtype == "B" and not shape:
        return [bytes(source.take()) for _ in range(size)]
    if layout == _EACH:
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
    made, start = [], 0
    for each, length in zip(shapes, sizes, strict=True):
        made.append(joined[start : start + length].reshape(each))
        start += length
    return made


def _decode_values(dtype: Any, shape: tuple[int, ...], source: _Buffers) -> NDArray[Any]:
    size = _shape_size(shape)
    if isinstance(dtype, str) and dtype in _STRINGS:
        return _decode_strings(_STRINGS[dtype], size, source).reshape(shape)
    made = decode_dtype(dtype)
    return np.ndarray(shape, made, source.take_bytes(size * made.itemsize))


def _decode_strings(cls: type, size: int, source: _Buffers) -> NDArray[Any]:
    lengths = np.frombuffer(source.take_bytes(size * 8), _LENGTH).tolist()
    joined = bytes(source.take())
    if (lengths and min(lengths) < 0) or sum(lengths) != len(joined):
        raise ValueError(f"lengths of strings do not add up to {len(joined)} bytes")
    made = np.empty(size, object)
    items: list[Any] = []
    start = 0
    for length in lengths:
        items.append(joined[start : start + length])
        start += length
    made[:] = items if cls is bytes else [i.decode("utf-8", "surrogatepass") for i in items]
    return made


def _shape_size(shape: Sequence[Any]) -> int:
    for length in shape:
        if type(length) is not int or length < 0:
            raise ValueError(f"{shape!r} is not a shape")
    return math.prod(shape)


def _check_length(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} elements, where there can be 0 to {limit}")
    return value
