"""Parsing of tf.Example to named arrays, singly or in batches, without protocol buffers."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataLossError, InvalidElementError
from headrace.sources import protobuf
from headrace.sources.features import Feature, FixedLenFeature, VarLenFeature
from headrace.sources.protobuf import BYTES_LIST, FLOAT_LIST, INT64_LIST, FeatureLocations

__all__ = ["parse_example"]

_KIND_NAMES = {0: "nothing", BYTES_LIST: "bytes", FLOAT_LIST: "float", INT64_LIST: "int64"}
_FEATURES = (FixedLenFeature, VarLenFeature)
_FLOAT = np.dtype("<f4")
_FLOAT_STRUCT = struct.Struct("<f")

_FeatureRequests: TypeAlias = dict[bytes, tuple[str, Feature, int]]
"""By stored name: the public name, the feature, and the kind whose single value is read as is."""


def parse_example(
    serialized: bytes | Sequence[bytes] | NDArray[Any], features: Mapping[str, Feature]
) -> dict[str, Any]:
    """Return the features of one example, or of a batch of examples.

    >>> batch = [hr.io.encode_example({"label": n, "ids": [n] * n}) for n in range(3)]
    >>> features = {
    ...     "label": hr.io.FixedLenFeature((), "int64"),
    ...     "ids": hr.io.VarLenFeature("int64"),
    ... }
    >>> found = hr.io.parse_example(batch, features)
    >>> found["label"].tolist(), found["ids"]["values"].tolist(), found["ids"]["lengths"].tolist()
    ([0, 1, 2], [1, 2, 2], [0, 1, 2])

    Args:
        serialized: A serialized tf.Example as bytes, or a sequence or object array of n of them.
        features: Features to read, by name; other features of the examples are skipped.

    Returns:
        A dict in the order of `features`. For one example, a `FixedLenFeature` has a value of its
        shape (a NumPy scalar, bytes or str for `()`), and a `VarLenFeature` an array of shape
        [k]. For a batch, a `FixedLenFeature` has an array of shape [n, *shape], and a
        `VarLenFeature` has `{"values": array of shape [sum of all k], "lengths": int64 array of
        shape [n]}`, with the values of all examples joined. Lists of bytes become object arrays.

    Raises:
        DataLossError: If an example is not a tf.Example.
        InvalidElementError: If a feature is missing, has another kind or length, or does not fit
            its dtype.
        TypeError, ValueError: If an argument is invalid.
    """
    if not (type(features) is dict or isinstance(features, Mapping)) or not features:
        raise ValueError(f"features must be a mapping that names a feature, got {features!r}")
    # Compared by value in each call, because a mapping may have changed.
    items = tuple(features.items())
    try:
        wanted = _check_cached(items)
    except TypeError:  # unhashable, and possibly invalid
        wanted = None
    if wanted is None:
        wanted = _check_features(items)
    if isinstance(serialized, bytes):
        return _read(serialized, wanted)
    rows = _check_rows(serialized)
    columns = _Columns(rows, wanted)
    return {name: columns.read(key, name, feature) for key, (name, feature, _) in wanted.items()}


def _check_features(items: tuple[tuple[str, Feature], ...]) -> _FeatureRequests:
    for name, feature in items:
        if not isinstance(feature, _FEATURES):
            raise TypeError(
                f"features must hold FixedLenFeature or VarLenFeature, got {feature!r} for {name!r}"
            )
    return {
        name.encode(): (
            name,
            feature,
            feature.plain_scalar if type(feature) is FixedLenFeature else -1,
        )
        for name, feature in items
    }


_check_cached = lru_cache(maxsize=16)(_check_features)


def _check_rows(serialized: Any) -> list[bytes]:
    if isinstance(serialized, np.ndarray) and serialized.ndim != 1:
        raise ValueError(
            f"serialized must be bytes or of shape [n], got an array of shape {serialized.shape}"
        )
    rows: list[bytes] | None = None
    if isinstance(serialized, np.ndarray):
        rows = serialized.tolist()
    elif isinstance(serialized, Iterable) and not isinstance(serialized, str | Mapping):
        rows = list(serialized)
    if rows is None or not all(isinstance(row, bytes) for row in rows):
        raise TypeError(
            f"serialized must be bytes or a sequence of bytes, got {type(serialized).__name__}"
            + ("" if rows is None else " of something else")
        )
    return rows


def _locate(
    data: bytes, names: Collection[bytes], index: int | None
) -> dict[bytes, FeatureLocations]:
    try:
        return protobuf.locate_features(data, names)
    except protobuf.WireFormatError as error:
        raise DataLossError(
            f"{_example_prefix(index)} is not a valid tf.Example: {error}"
        ) from error


def _example_prefix(index: int | None) -> str:
    return "the example" if index is None else f"example {index} of the batch"


def _feature_payload(
    data: bytes, located: FeatureLocations | None, name: str, feature: Feature, index: int | None
) -> Any:
    """Return a feature's values: a list of bytes, or packed numbers."""
    if located is None or (located[0] == 0 and not located[1]):
        if isinstance(feature, VarLenFeature):
            return [] if feature.kind == BYTES_LIST else b""
        if feature.default is None:
            raise InvalidElementError(
                f"{_example_prefix(index)} has no feature {name!r}; set default_value if the "
                "feature is optional"
            )
        return feature.default
    kind, spans = located
    if kind != feature.kind:
        raise InvalidElementError(
            f"feature {name!r} of {_example_prefix(index)} is a list of {_KIND_NAMES[kind]}, but "
            f"dtype {feature.dtype} requires {_KIND_NAMES[feature.kind]}"
        )
    if kind == BYTES_LIST:
        return [data[start:stop] for start, stop in spans]
    if len(spans) == 1:
        ((start, stop),) = spans
        return data[start:stop]
    return b"".join([data[start:stop] for start, stop in spans])


def _unpack(payload: Any, name: str, feature: Feature, index: int | None) -> Any:
    """Return values of shape [k] in the requested dtype, writable."""
    try:
        if feature.kind == FLOAT_LIST:
            if len(payload) % 4:
                raise protobuf.WireFormatError(f"{len(payload)} bytes are not a list of floats")
            return np.frombuffer(payload, _FLOAT).astype(feature.dtype)
        if feature.kind == INT64_LIST:
            return _cast_values(protobuf.decode_varints(payload), name, feature)
        column = np.empty(len(payload), object)
        column[:] = [item.decode() for item in payload] if feature.dtype == "U" else payload
        return column
    except (protobuf.WireFormatError, UnicodeDecodeError) as error:
        raise DataLossError(
            f"feature {name!r} of {_example_prefix(index)} is damaged: {error}"
        ) from error


def _cast_values(values: NDArray[np.int64], name: str, feature: Feature) -> NDArray[Any]:
    dtype = feature.dtype
    if dtype == np.int64:
        return values
    result = values.astype(dtype)
    lost = result.astype(np.int64) != values
    if dtype == np.uint64:
        lost = values < 0
    if lost.any():
        wrong = int(values[lost.argmax()])
        raise InvalidElementError(f"feature {name!r} holds {wrong}, which {dtype} cannot hold")
    return result


def _read(data: bytes, wanted: _FeatureRequests) -> dict[str, Any]:
    """Return the features of one example."""
    located = _locate(data, wanted, None)
    result: dict[str, Any] = {}
    for key, (name, feature, plain_scalar) in wanted.items():
        span = located.get(key)
        if span is not None and span[0] == plain_scalar and len(span[1]) == 1:
            # A single value that is stored as requested: skip the array.
            start, stop = span[1][0]
            if plain_scalar == BYTES_LIST:
                result[name] = data[start:stop]
                continue
            if plain_scalar == FLOAT_LIST and stop - start == 4:
                result[name] = np.float32(_FLOAT_STRUCT.unpack_from(data, start)[0])
                continue
            if plain_scalar == INT64_LIST and 0 < stop - start < 10 and data[stop - 1] < 0x80:
                # A negative number would take ten bytes.
                value, end = protobuf.read_varint(data, start, stop)
                if end == stop:
                    result[name] = np.int64(value)
                    continue
        result[name] = _read_one(data, span, name, feature)
    return result


def _read_one(data: bytes, located: FeatureLocations | None, name: str, feature: Feature) -> Any:
    values = _unpack(_feature_payload(data, located, name, feature, None), name, feature, None)
    if isinstance(feature, VarLenFeature):
        return values
    if len(values) != feature.count:
        raise _count_error(len(values), name, feature, None)
    if feature.shape == ():
        return values[0]
    return values.reshape(feature.shape)


def _count_error(
    found: int, name: str, feature: FixedLenFeature, index: int | None
) -> InvalidElementError:
    return InvalidElementError(
        f"feature {name!r} of {_example_prefix(index)} has {found} values, but its shape "
        f"{feature.shape} requires {feature.count}; use VarLenFeature if the number varies"
    )


class _Columns:
    """Reads features of a batch of examples, one feature of all examples at a time.

    Examples with the same layout (typical for fixed shapes) form a matrix of bytes, in which each
    value is at the same columns in every row, so that only the first row is parsed.
    """

    def __init__(self, rows: list[bytes], names: Collection[bytes]) -> None:
        self._rows = rows
        self._matrix: NDArray[np.uint8] | None = None
        self._located: list[dict[bytes, FeatureLocations]] = []
        if not rows:
            return
        first = _locate(rows[0], names, 0)
        if len(rows) > 1 and len(set(map(len, rows))) == 1:
            self._matrix = _as_matrix(rows, first)
        if self._matrix is not None:
            self._located = [first]
        else:
            self._located = [_locate(row, names, index) for index, row in enumerate(rows)]

    def read(self, key: bytes, name: str, feature: Feature) -> Any:
        payloads = self._payloads(key, name, feature)
        if feature.kind == BYTES_LIST:
            counts = np.fromiter(map(len, payloads), np.int64, len(payloads))
            values = _unpack([item for items in payloads for item in items], name, feature, None)
        else:
            sizes = np.fromiter(map(len, payloads), np.int64, len(payloads))
            values, counts = self._unpack_numbers(payloads, sizes, name, feature)
        if isinstance(feature, VarLenFeature):
            return {"values": values, "lengths": counts}
        wrong = counts != feature.count
        if wrong.any():
            index = int(wrong.argmax())
            raise _count_error(int(counts[index]), name, feature, index)
        return values.reshape(len(self._rows), *feature.shape)

    def _payloads(self, key: bytes, name: str, feature: Feature) -> list[Any]:
        if self._matrix is None:
            payloads: list[Any] = []
            as_list = feature.kind == BYTES_LIST
            for index, (row, spans_by_key) in enumerate(
                zip(self._rows, self._located, strict=True)
            ):
                span = spans_by_key.get(key)
                if span is not None and span[0] == feature.kind and len(span[1]) == 1:
                    start, stop = span[1][0]
                    payloads.append([row[start:stop]] if as_list else row[start:stop])
                else:
                    payloads.append(_feature_payload(row, span, name, feature, index))
            return payloads
        located = self._located[0].get(key)
        if located is not None and len(located[1]) == 1 and located[0] == feature.kind:
            ((start, stop),) = located[1]
            if feature.kind == BYTES_LIST:
                return [[row[start:stop]] for row in self._rows]
            return [row[start:stop] for row in self._rows]
        return [
            _feature_payload(row, located, name, feature, index)
            for index, row in enumerate(self._rows)
        ]

    def _unpack_numbers(
        self, payloads: list[bytes], sizes: NDArray[np.int64], name: str, feature: Feature
    ) -> tuple[Any, NDArray[np.int64]]:
        """Return all values, of shape [sum of k], and k for each example."""
        joined = b"".join(payloads)
        if feature.kind == FLOAT_LIST:
            whole, counts = sizes % 4 == 0, sizes // 4
        else:
            # The last byte of a number has its top bit clear.
            ends = np.zeros(len(joined) + 1, np.int64)
            np.cumsum(np.frombuffer(joined, np.uint8) < 0x80, out=ends[1:])
            stops = np.cumsum(sizes)
            counts = ends[stops] - ends[stops - sizes]
            whole = (sizes == 0) | (np.diff(ends, append=0)[stops - 1] == 1)
        if not whole.all():
            index = int((~whole).argmax())
            raise DataLossError(
                f"feature {name!r} of {_example_prefix(index)} is damaged: it ends inside a number"
            )
        return _unpack(joined, name, feature, None), counts


def _as_matrix(rows: list[bytes], first: dict[bytes, FeatureLocations]) -> NDArray[np.uint8] | None:
    """Return examples of one length as bytes of shape [n, length]; None if their layouts differ."""
    matrix = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), len(rows[0]))
    frame = np.ones(len(rows[0]), bool)
    for _, spans in first.values():
        for start, stop in spans:
            frame[start:stop] = False
    columns = np.flatnonzero(frame)
    parts = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    for part in parts:
        if len(part):
            begin, end = int(part[0]), int(part[-1]) + 1
            if (matrix[:, begin:end] != matrix[0, begin:end]).any():
                return None
    return matrix
