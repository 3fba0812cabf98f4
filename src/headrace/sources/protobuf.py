"""The part of the protocol buffer encoding that tf.Example needs.

A message is a sequence of fields. A field is a key (field number times 8, plus a wire type) and a
value: a varint (type 0), 8 bytes (1), a length and that many bytes (2), or 4 bytes (5). A varint
has seven bits per byte, low bits first; the top bit is set in all bytes but the last. A negative
int64 takes ten bytes.

    Example   { features = 1 }
    Features  { entries = 1 }   of { key = 1, value = 2 }
    Feature   { bytes_list = 1 | float_list = 2 | int64_list = 3 }, each a list of values = 1

Lists of numbers are packed (all values in one field of type 2) or unpacked (a field per value).
Both forms are read; the packed form is written.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BYTES_LIST",
    "FLOAT_LIST",
    "INT64_LIST",
    "FeatureLocations",
    "WireFormatError",
    "decode_varints",
    "encode_field",
    "encode_varint",
    "encode_varints",
    "locate_features",
    "read_varint",
]

BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3

FeatureLocations: TypeAlias = tuple[int, list[tuple[int, int]]]
"""Kind of a feature (0 if unset) and the locations `(start, stop)` of its values in the example.

Bytes have one span per value; numbers have spans of packed values, which may be joined.
"""

_KEY_OF_LENGTH = 0x0A  # field 1 of wire type 2: nearly all fields of a tf.Example
_KEY_OF_ENTRY_VALUE = 0x12
_KEYS_OF_LISTS = (0x0A, 0x12, 0x1A)
_MAX_LOOP_VALUES = 16


#: Cache of the headers of entries shorter than 128 bytes with one value or one run of packed
#: numbers: all bytes of the entry before its values, including lengths, mapped to name and kind.
_short_entries: dict[bytes, tuple[bytes, int]] = {}
_MAX_SHORT_ENTRIES = 1 << 14


class WireFormatError(ValueError):
    """Bytes that are not a valid message; the error names the byte."""


def encode_varint(value: int) -> bytes:
    """Return a number from 0 to 2**64 - 1 as a varint."""
    if value < 0x80:
        return value.to_bytes(1, "little")
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def encode_field(number: int, content: bytes) -> bytes:
    """Return a field of wire type 2."""
    return bytes((number << 3 | 2,)) + encode_varint(len(content)) + content


def encode_varints(values: NDArray[np.int64]) -> bytes:
    """Return int64 values of shape [n] as joined varints."""
    if len(values) <= _MAX_LOOP_VALUES:
        return b"".join([encode_varint(value & (1 << 64) - 1) for value in values.tolist()])
    rest = values.astype(np.uint64)
    bits = max(int(rest.max()).bit_length(), 1)
    shifts = np.arange(0, bits, 7, dtype=np.uint64)
    groups = rest[:, None] >> shifts
    used = groups != 0
    used[:, 0] = True
    more = np.zeros_like(used)
    more[:, :-1] = used[:, 1:]
    low = (groups & np.uint64(0x7F)).astype(np.uint8) | more.astype(np.uint8) << np.uint8(7)
    return bytes(low[used].data)


def decode_varints(data: bytes) -> NDArray[np.int64]:
    """Return the int64 values of joined varints, of shape [n].

    Raises:
        WireFormatError: If the bytes end inside a varint, or one is longer than ten bytes.
    """
    size = len(data)
    if size <= _MAX_LOOP_VALUES:
        few = []
        position = 0
        while position < size:
            value, position = read_varint(data, position, size)
            few.append(value)
        return np.array(few, np.uint64).view(np.int64)
    octets = np.frombuffer(data, np.uint8)
    last = octets < 0x80
    if not last[-1]:
        raise WireFormatError("a list of integers ends inside a number")
    if last.all():
        return octets.astype(np.int64)
    stops = np.flatnonzero(last) + 1
    starts = np.empty_like(stops)
    starts[0] = 0
    starts[1:] = stops[:-1]
    lengths = stops - starts
    if lengths.max() > 10:
        raise WireFormatError("a list of integers holds a number of more than ten bytes")
    low = octets & np.uint8(0x7F)
    values = low[starts].astype(np.uint64)
    for index in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > index)
        values[longer] |= low[starts[longer] + index].astype(np.uint64) << np.uint64(7 * index)
    return values.view(np.int64)


def locate_features(data: bytes, wanted: Collection[bytes]) -> dict[bytes, FeatureLocations]:
    """Locate the values of features in a serialized tf.Example.

    Args:
        data: The example.
        wanted: Names of the features.

    Returns:
        The kind and the value locations of each feature that the example has.

    Raises:
        WireFormatError: If the bytes are not a tf.Example.
    """
    found: dict[bytes, FeatureLocations] = {}
    size = len(data)
    position = 0
    try:
        while position < size:
            if data[position] != _KEY_OF_LENGTH:
                position = _skip(data, position, size)
                continue
            stop = data[position + 1]
            position += 2
            if stop > 0x7F:
                stop, position = read_varint(data, position - 1, size)
            stop += position
            if stop > size:
                raise _length_error(position, size)
            _locate_in_message(data, position, stop, wanted, found)
            position = stop
    except IndexError:
        raise WireFormatError(f"it ends inside a field, after {size} bytes") from None
    return found


def _locate_in_message(
    data: bytes,
    position: int,
    end: int,
    wanted: Collection[bytes],
    found: dict[bytes, FeatureLocations],
) -> None:
    while position < end:
        if data[position] != _KEY_OF_LENGTH:
            position = _skip(data, position, end)
            continue
        stop = data[position + 1]
        if 12 <= stop < 0x80 and position + stop + 2 <= end:
            # Entries with few values usually begin with a header that is in the cache.
            head = data[position : position + 10 + data[position + 3]]
            seen = _short_entries.get(head)
            if seen is not None:
                name, kind = seen
                start, position = position + len(head), position + stop + 2
                if name in wanted:
                    found[name] = kind, [(start, position)]
                continue
        else:
            head = b""
        position += 2
        if stop > 0x7F:
            stop, position = read_varint(data, position - 1, end)
        stop += position
        if stop > end:
            raise _length_error(position, end)
        name = b""
        value: FeatureLocations = (0, [])
        while position < stop:
            key = data[position]
            if key != _KEY_OF_LENGTH and key != _KEY_OF_ENTRY_VALUE:
                position = _skip(data, position, stop)
                continue
            length = data[position + 1]
            position += 2
            if length > 0x7F:
                length, position = read_varint(data, position - 1, stop)
            inner = position + length
            if inner > stop:
                raise _length_error(position, stop)
            if key == _KEY_OF_LENGTH:
                name = data[position:inner]
                if stop - inner > 1 and data[inner] == _KEY_OF_ENTRY_VALUE:
                    if name not in wanted:
                        # The feature was not requested.
                        break
                    plain = _locate_single_list(data, inner, stop)
                    if plain is not None and not value[0]:
                        value = plain
                        break
            else:
                value = _locate_values(data, position, inner, value)
            position = inner
        position = stop
        if name in wanted:
            found[name] = value
            if head and value[1]:
                _cache_entry_head(head, name, value, stop)


def _cache_entry_head(head: bytes, name: bytes, value: FeatureLocations, stop: int) -> None:
    """Cache the header of an entry if it has the simplest form, determined by its lengths."""
    kind, spans = value
    size = spans[-1][1] - spans[-1][0]
    plain = (
        encode_field(1, name)
        + bytes((_KEY_OF_ENTRY_VALUE, size + 4, kind << 3 | 2, size + 2, _KEY_OF_LENGTH, size))
        if len(spans) == 1 and spans[0][1] == stop and size < 0x7C
        else b""
    )
    if head[2:] == plain and head[1] == len(plain) + size:
        if len(_short_entries) >= _MAX_SHORT_ENTRIES:
            _short_entries.clear()
        _short_entries[head] = name, kind


def _locate_single_list(data: bytes, position: int, stop: int) -> FeatureLocations | None:
    """Return the values' location if the rest of an entry is one field of one list, else None.

    Nearly all entries have this form; `_locate_values` handles the others.
    """
    length, position = read_varint(data, position + 1, stop)
    if position + length != stop or length < 2:
        return None
    key = data[position]
    if key not in _KEYS_OF_LISTS:
        return None
    length, position = read_varint(data, position + 1, stop)
    if position + length != stop or length < 2 or data[position] != _KEY_OF_LENGTH:
        return None
    length, position = read_varint(data, position + 1, stop)
    return (key >> 3, [(position, stop)]) if position + length == stop else None


def _locate_values(
    data: bytes, position: int, end: int, before: FeatureLocations
) -> FeatureLocations:
    """Return the locations of a feature's values, appended to those of an earlier part of it."""
    kind, spans = before
    while position < end:
        key = data[position]
        if key not in _KEYS_OF_LISTS:
            position = _skip(data, position, end)
            continue
        length = data[position + 1]
        position += 2
        if length > 0x7F:
            length, position = read_varint(data, position - 1, end)
        stop = position + length
        if stop > end:
            raise _length_error(position, end)
        if key >> 3 != kind:
            # If there are several kinds, the last one counts.
            kind, spans = key >> 3, []
        while position < stop:
            inner_key = data[position]
            if inner_key == _KEY_OF_LENGTH:
                length = data[position + 1]
                position += 2
                if length > 0x7F:
                    length, position = read_varint(data, position - 1, stop)
                start = position + length
            elif inner_key == 0x0D and kind == FLOAT_LIST:
                position += 1
                start = position + 4
            elif inner_key == 0x08 and kind == INT64_LIST:
                position += 1
                start = read_varint(data, position, stop)[1]
            else:
                position = _skip(data, position, stop)
                continue
            if start > stop:
                raise _length_error(position, stop)
            spans.append((position, start))
            position = start
    return kind, spans


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it.

    Raises:
        WireFormatError: If it does not end before `end`, or is longer than ten bytes.
    """
    if position + 3 <= end:
        # Most varints are short lengths, which are read without a loop.
        first = data[position]
        if first < 0x80:
            return first, position + 1
        second = data[position + 1]
        if second < 0x80:
            return first & 0x7F | second << 7, position + 2
        third = data[position + 2]
        if third < 0x80:
            return first & 0x7F | (second & 0x7F) << 7 | third << 14, position + 3
    value = shift = 0
    start = position
    while True:
        if position >= end:
            raise WireFormatError(f"it ends inside the number that begins at byte {start}")
        octet = data[position]
        position += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
        if shift > 63:
            raise WireFormatError(f"the number at byte {start} has more than ten bytes")


def _skip(data: bytes, position: int, end: int) -> int:
    """Return the position after a field of any type."""
    start = position
    key, position = read_varint(data, position, end)
    wire_type = key & 7
    if wire_type == 0:
        position = read_varint(data, position, end)[1]
    elif wire_type == 1:
        position += 8
    elif wire_type == 2:
        length, position = read_varint(data, position, end)
        position += length
    elif wire_type == 5:
        position += 4
    else:
        raise WireFormatError(f"byte {start} begins a field of the unknown wire type {wire_type}")
    if key >> 3 == 0:
        raise WireFormatError(f"byte {start} begins a field with the number 0")
    if position > end:
        raise _length_error(start, end)
    return position


def _length_error(position: int, end: int) -> WireFormatError:
    return WireFormatError(
        f"the field at byte {position} exceeds its message, which ends at byte {end}"
    )
