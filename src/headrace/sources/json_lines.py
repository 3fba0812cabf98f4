"""Files of JSON objects, one on each line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.normalize import normalize
from headrace.errors import DataLossError, HeadraceError, InvalidArgumentError, InvalidElementError
from headrace.sources.byte_range_reader import DecodedBlock, RecordFormat
from headrace.sources.byte_ranges import ByteRangeSource

__all__ = ["JsonLinesFormat", "JsonLinesSource"]


@dataclass(frozen=True)
class JsonLinesSource(ByteRangeSource):
    """The JSON objects of files as dicts. Blank lines are skipped.

    Numbers become NumPy scalars, lists become arrays, and null becomes None.

    Args:
        columns: Keys of the elements, in this order; None keeps all keys of each object.
    """

    block_bytes: int = 256 << 10  # the objects of a block fit into the processor's cache
    columns: tuple[str, ...] | None = None

    def make_format(self) -> RecordFormat:
        return JsonLinesFormat(self.columns)


class JsonLinesFormat(RecordFormat):
    """Decoder of lines of JSON.

    Args:
        columns: As for `JsonLinesSource`.
    """

    def __init__(self, columns: tuple[str, ...] | None) -> None:
        self._columns = columns
        self._loads = _find_parser()

    def decode(self, block: bytes, name: str, offset: int) -> DecodedBlock:
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        try:
            chunk = self._decode_uniform(lines)
        except (ValueError, KeyError, TypeError, RecursionError):
            chunk = None
        if chunk is not None:
            return DecodedBlock(chunk, len(block))
        return self._decode_each(lines, len(block), name, offset)

    def _decode_uniform(self, lines: list[bytes]) -> Chunk | None:
        """Return the elements of lines; None if their keys differ, or they have none.

        Raises:
            ValueError, KeyError, TypeError, RecursionError: If a line is not an object, lacks a
                key, or has a value that cannot be converted.
        """
        keys, all_keys = self._columns, self._columns is None
        if keys is None:
            keys = tuple(self._loads(lines[0]))
        values: list[list[Any]] = [[] for _ in keys]
        pairs = [(column, itemgetter(key)) for column, key in zip(values, keys, strict=True)]
        for start in range(0, len(lines), _LINES_AT_ONCE):
            rows = list(map(self._loads, lines[start : start + _LINES_AT_ONCE]))
            if set(map(type, rows)) != {dict}:
                return None
            if all_keys and set(map(len, rows)) != {len(keys)}:
                return None
            for column, get in pairs:
                column += map(get, rows)
        columns = list(map(_convert_column, values))
        if not keys:
            return None
        if all(isinstance(column, np.ndarray) for column in columns):
            return Chunk.of_columns(dict(zip(keys, columns, strict=True)), len(lines))
        return Chunk.of_rows(
            [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
        )

    def _decode_each(
        self, lines: list[bytes], num_bytes: int, name: str, offset: int
    ) -> DecodedBlock:
        """Decode lines one by one, up to the first damaged one."""
        rows: list[dict[str, Any]] = []
        position = 0
        error: HeadraceError | None = None
        for line in lines:
            if line and not line.isspace():
                try:
                    rows.append(self._decode_line(line, name, offset + position))
                except HeadraceError as found:
                    error = found
            position += len(line) + 1
            if error is not None:
                break
        chunk = Chunk.of_rows(rows) if rows else None
        return DecodedBlock(chunk, min(position, num_bytes), error)

    def _decode_line(self, line: bytes, name: str, offset: int) -> dict[str, Any]:
        where = f"the line at byte {offset} of {name!r}"
        try:
            row = self._loads(line)
        except ValueError:
            try:
                # It also accepts NaN, Infinity and large integers.
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                advice = (
                    '; it is a GZIP file: pass compression_type="GZIP"'
                    if not offset and line.startswith(b"\x1f\x8b")
                    else ""
                )
                raise DataLossError(f"{where} is not JSON: {error}{advice}") from error
        if type(row) is not dict:
            raise InvalidArgumentError(
                f"{where} is a JSON {_JSON_NAMES.get(type(row), 'number')}, but must be an object"
            )
        columns = self._columns
        if columns is not None:
            missing = [key for key in columns if key not in row]
            if missing:
                raise InvalidArgumentError(
                    f"{where} has no key {missing[0]!r}; its keys are {sorted(row)}"
                )
            row = {key: row[key] for key in columns}
        try:
            result: dict[str, Any] = normalize(row)
        except InvalidElementError as error:
            raise InvalidArgumentError(f"{where} cannot be an element: {error}") from error
        return result


def _find_parser() -> Callable[[bytes], Any]:
    try:
        import orjson  # noqa: PLC0415 - optional dependency
    except ImportError:
        return json.loads
    parser: Callable[[bytes], Any] = orjson.loads
    return parser


_JSON_NAMES = {list: "array", str: "string", bool: "boolean", type(None): "null"}
_LINES_AT_ONCE = 128
"""Number of lines to hold as dicts: so few that they cause no garbage collection."""
_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_, str: object}
_TYPE_CODES = {int: "q", float: "d"}


def _convert_column(values: list[Any]) -> NDArray[Any] | list[Any]:
    """Return values as an array if their types and shapes are equal, else as a list of leaves.

    Raises:
        ValueError, InvalidElementError: If a value cannot be converted.
    """
    types = set(map(type, values))
    if len(types) == 1:
        (only,) = types
        try:
            if only is list:
                return _convert_lists(values)
            if only in _DTYPES:
                return np.array(values, _DTYPES[only])
        except (LookupError, ValueError, OverflowError, struct.error):
            pass  # values that `normalize` accepts, such as large integers, or an error from it
    return [normalize(value) for value in values]


def _convert_lists(values: list[list[Any]]) -> NDArray[Any] | list[NDArray[Any]]:
    """Return lists of numbers as one array, or as several if their lengths differ.

    Raises:
        LookupError, ValueError, struct.error: If lists are empty, or not of int64 or float64 alone.
    """
    # A list that begins with a float is one of float64, as if it were converted alone.
    (first_type,) = set(map(type, map(itemgetter(0), values)))
    items = list(chain.from_iterable(values))
    data = np.empty(len(items), _DTYPES[first_type])
    # Unlike NumPy, `struct` accepts numbers only.
    struct.pack_into(f"{len(items)}{_TYPE_CODES[first_type]}", data.data, 0, *items)
    lengths = list(map(len, values))
    if len(set(lengths)) == 1:
        return data.reshape(len(values), lengths[0])
    ends = accumulate(lengths)
    return [data[end - length : end] for length, end in zip(lengths, ends, strict=True)]
