"""Files of JSON objects, one on each line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.normalize import normalize
from headrace.errors import DataLossError, HeadraceError, InvalidArgumentError, InvalidElementError
from headrace.sources.byte_ranges import ByteRangeSource, DecodedBlock, RecordFormat

__all__ = ["JsonLinesFormat", "JsonLinesSource"]


@dataclass(frozen=True)
class JsonLinesSource(ByteRangeSource):
    """The JSON objects of files as dicts. Blank lines are skipped.

    Numbers become NumPy scalars, lists become arrays, and null becomes None.

    Args:
        columns: Keys of the elements, in this order; None keeps all keys of each object.
    """

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
        rows: list[Any]
        try:
            rows = list(map(self._loads, lines))
            chunk = self._convert(rows)
        except (ValueError, KeyError, TypeError, RecursionError):
            chunk = None
        if chunk is not None:
            return DecodedBlock(chunk, len(block))
        return self._decode_each(lines, len(block), name, offset)

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
                raise DataLossError(f"{where} is not JSON: {error}") from error
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

    def _convert(self, rows: list[dict[str, Any]]) -> Chunk | None:
        """Return the elements of parsed lines; None if their keys differ.

        Raises:
            ValueError, KeyError, TypeError: If a line is not an object, lacks a key, or has a
                value that cannot be converted.
        """
        if set(map(type, rows)) != {dict}:
            return None
        keys = self._columns
        if keys is None:
            keys = tuple(rows[0])
            if set(map(len, rows)) != {len(keys)}:
                return None
        columns = [_convert_column(list(map(itemgetter(key), rows))) for key in keys]
        if not keys:
            return Chunk.of_rows(rows)
        if all(isinstance(column, np.ndarray) for column in columns):
            return Chunk.of_columns(dict(zip(keys, columns, strict=True)), len(rows))
        return Chunk.of_rows(
            [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]
        )


def _find_parser() -> Callable[[bytes], Any]:
    try:
        import orjson  # noqa: PLC0415 - optional dependency
    except ImportError:
        return json.loads
    parser: Callable[[bytes], Any] = orjson.loads
    return parser


_JSON_NAMES = {list: "array", str: "string", bool: "boolean", type(None): "null"}
_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_, str: object}


def _convert_column(values: list[Any]) -> NDArray[Any] | list[Any]:
    """Return values as an array if their types and shapes are equal, else as a list of leaves.

    Raises:
        ValueError, TypeError: If a value cannot be converted.
    """
    types = set(map(type, values))
    if len(types) == 1:
        (only,) = types
        if only is list:
            array = _stack_lists(values)
            if array is not None:
                return array
        elif only in _DTYPES:
            try:
                return np.array(values, _DTYPES[only])
            except OverflowError:
                pass  # an integer that needs uint64
    return [normalize(value) for value in values]


def _stack_lists(values: list[Any]) -> NDArray[Any] | None:
    """Return lists as one array; None if they differ in shape or type, or are no numbers."""
    try:
        array = np.array(values)
    except ValueError:
        return None
    items = values
    for _ in range(array.ndim - 1):
        items = chain.from_iterable(items)  # type: ignore[assignment]
    # Each list must have the dtype that it would have alone.
    types = set(map(type, items))
    is_uniform = len(types) == 1 and _DTYPES.get(types.pop()) is array.dtype.type
    return array if is_uniform else None
