"""The few rules of protocol buffers that tf.Example needs, by hand.

A message is a run of fields. A field is a key (field number times 8, plus a wire type) and a value:
a varint (type 0), 8 bytes (1), a length and as many bytes (2), or 4 bytes (5). A varint holds seven
bits a byte, low bits first; the top bit says that more follow. Negative int64 take ten bytes.

    Example   { features = 1 }
    Features  { entries = 1 }   of { key = 1, value = 2 }
    Feature   { bytes_list = 1 | float_list = 2 | int64_list = 3 }, each a list of values = 1

Lists of numbers are packed (all values in one field of type 2) or not (a field for each value);
both are read, and packed ones written.
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
    "Located",
    "WireFormatError",
    "decode_varints",
    "encode_varint",
    "encode_varints",
    "field",
    "locate",
    "read_varint",
]

BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3

Located: TypeAlias = tuple[int, list[tuple[int, int]]]
"""A feature's kind (0: none is set) and where its values lie: `(start, stop)` in the example.

Bytes: one span a value. Numbers: spans of packed values, which may be joined.
"""

_KEY_OF_LENGTH = 0x0A  # field 1 of wire type 2: all that tf.Example is made of, but two
_KEY_OF_ENTRY_VALUE = 0x12
_KEYS_OF_LISTS = (0x0A, 0x12, 0x1A)
_LOOP_UP_TO = 16


#: Heads of entries of less than 128 bytes that hold one value, or numbers packed at once: all bytes
#: of such an entry before its values, lengths included, to its name and kind.
_short_entries: dict[bytes, tuple[bytes, int]] = {}
_MOST_SHORT_ENTRIES = 1 << 14


class WireFormatError(ValueError):
    """Bytes that are no message; says where."""


def encode_varint(value: int) -> bytes:
    """Return a number from 0 to 2**64 - 1 as a varint."""
    if value < 0x80:
        return value.to_bytes(1, "little")
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def field(number: int, content: bytes) -> bytes:
    """Return a field of wire type 2."""
    return bytes((number << 3 | 2,)) + encode_varint(len(content)) + content


def encode_varints(values: NDArray[np.int64]) -> bytes:
    """Return int64 of shape [n] as varints, one after the other."""
    if len(values) <= _LOOP_UP_TO:
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
    """Return the int64 that varints hold, of shape [n].

    Raises:
        WireFormatError: The bytes end inside a varint, or one is longer than ten bytes.
    """
    size = len(data)
    if size <= _LOOP_UP_TO:
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
    for place in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > place)
        values[longer] |= low[starts[longer] + place].astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)


def locate(data: bytes, wanted: Collection[bytes]) -> dict[bytes, Located]:
    """Find the values of features in a serialized tf.Example.

    Args:
        data: The example.
        wanted: Names of features.

    Returns:
        For each of the features that is there: its kind, and where its values lie.

    Raises:
        WireFormatError: The bytes are no tf.Example.
    """
    found: dict[bytes, Located] = {}
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
                raise _too_long(position, size)
            _locate_features(data, position, stop, wanted, found)
            position = stop
    except IndexError:
        raise WireFormatError(f"it ends inside a field, after {size} bytes") from None
    return found


def _locate_features(
    data: bytes, position: int, end: int, wanted: Collection[bytes], found: dict[bytes, Located]
) -> None:
    while position < end:
        if data[position] != _KEY_OF_LENGTH:
            position = _skip(data, position, end)
            continue
        stop = data[position + 1]
        if 12 <= stop < 0x80 and position + stop + 2 <= end:
            # Entries of a few values begin with bytes that were seen before, mostly.
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
            raise _too_long(position, end)
        name = b""
        value: Located = (0, [])
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
                raise _too_long(position, stop)
            if key == _KEY_OF_LENGTH:
                name = data[position:inner]
                if stop - inner > 1 and data[inner] == _KEY_OF_ENTRY_VALUE:
                    if name not in wanted:
                        # Nobody asked for it.
                        break
                    plain = _locate_plain(data, inner, stop)
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
                _remember(head, name, value, stop)


def _remember(head: bytes, name: bytes, value: Located, stop: int) -> None:
    """Keep the head of an entry if it is of the plainest form, in which its lengths tell all."""
    kind, spans = value
    size = spans[-1][1] - spans[-1][0]
    plain = (
        field(1, name)
        + bytes((_KEY_OF_ENTRY_VALUE, size + 4, kind << 3 | 2, size + 2, _KEY_OF_LENGTH, size))
        if len(spans) == 1 and spans[0][1] == stop and size < 0x7C
        else b""
    )
    if head[2:] == plain and head[1] == len(plain) + size:
        if len(_short_entries) >= _MOST_SHORT_ENTRIES:
            _short_entries.clear()
        _short_entries[head] = name, kind


def _locate_plain(data: bytes, position: int, stop: int) -> Located | None:
    """Return where values lie if one field of one list is all that an entry still holds.

    Nearly all entries are so. What is in any way odd is left to `_locate_values`.
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


def _locate_values(data: bytes, position: int, end: int, before: Located) -> Located:
    """Return where the values of one feature lie, after those of an earlier part of it."""
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
            raise _too_long(position, end)
        if key >> 3 != kind:
            # Of several kinds the last one counts.
            kind, spans = key >> 3, []
        while position < stop:
            inner_key = data[position]
            if inner_key == _KEY_OF_LENGTH:
                length = data[position + 1]
                position += 2
                if length > 0x7F:
                    length, position = read_varint(data, position - 1, stop)
                inner = position + length
            elif inner_key == 0x0D and kind == FLOAT_LIST:
                position += 1
                inner = position + 4
            elif inner_key == 0x08 and kind == INT64_LIST:
                position += 1
                inner = read_varint(data, position, stop)[1]
            else:
                position = _skip(data, position, stop)
                continue
            if inner > stop:
                raise _too_long(position, stop)
            spans.append((position, inner))
            position = inner
    return kind, spans


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it.

    Raises:
        WireFormatError: It does not end before `end`, or is longer than ten bytes.
    """
    if position + 3 <= end:
        # Most are lengths: these are read without a loop.
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
    """Return the position after a field of any kind."""
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
        raise _too_long(start, end)
    return position


def _too_long(position: int, end: int) -> WireFormatError:
    return WireFormatError(
        f"the field at byte {position} is longer than what holds it, which ends at byte {end}"
    )
