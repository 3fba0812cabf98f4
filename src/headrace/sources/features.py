"""Features of a tf.Example: specifications for parsing, and encoding of values.

A feature is a list of bytes, of float32 or of int64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.sources import protobuf
from headrace.sources.protobuf import BYTES_LIST, FLOAT_LIST, INT64_LIST

__all__ = ["Feature", "FixedLenFeature", "VarLenFeature", "encode_example"]

_FLOAT = np.dtype("<f4")
#: Dtypes in which values are stored.
_STORED_DTYPES = (np.dtype("S"), np.dtype(np.float32), np.dtype(np.int64))


def _check_dtype(dtype: npt.DTypeLike) -> tuple[np.dtype[Any], int]:
    """Return the requested dtype and the kind of list that stores it."""
    try:
        result = np.dtype(dtype)
    except TypeError:
        result = np.dtype(np.void)
    if result.kind in "SU":
        return np.dtype(result.kind), BYTES_LIST
    if result.kind == "f":
        return result, FLOAT_LIST
    if result.kind in "iub":
        return result, INT64_LIST
    message = f"dtype must be bytes, str, or one of floats, integers or bool, got {dtype!r}"
    if "string" in str(dtype):
        message += "; for strings use bytes, or str to decode them"
    raise ValueError(message)


@dataclass(frozen=True, eq=False)
class FixedLenFeature:
    """A feature with a fixed number of values.

    >>> features = {"x": hr.io.FixedLenFeature((2,), "float32", default_value=[0.0, 0.0])}
    >>> hr.io.parse_example(hr.io.encode_example({"x": [1.0, 2.0]}), features)
    {'x': array([1., 2.], dtype=float32)}
    >>> hr.io.parse_example(hr.io.encode_example({}), features)
    {'x': array([0., 0.], dtype=float32)}

    Args:
        shape: Shape of the value; `()` for a scalar.
        dtype: bytes or str (decoded as UTF-8) for a list of bytes, a float dtype for a list of
            floats, an integer dtype or bool for a list of int64.
        default_value: Value for examples without the feature; None makes it required.
    """

    shape: Sequence[int]
    dtype: npt.DTypeLike
    default_value: Any = None
    kind: int = field(init=False, repr=False)
    count: int = field(init=False, repr=False)
    default: Any = field(init=False, repr=False)
    plain_scalar: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        for length in given:
            if not isinstance(length, int | np.integer) or length < 0:
                raise ValueError(f"shape must hold lengths >= 0, got {self.shape!r}")
        dtype, kind = _check_dtype(self.dtype)
        shape = tuple(int(length) for length in given)
        for name, value in (
            ("shape", shape),
            ("dtype", dtype),
            ("kind", kind),
            ("count", math.prod(shape)),
            ("default", None),
            ("plain_scalar", kind if shape == () and dtype in _STORED_DTYPES else -1),
        ):
            object.__setattr__(self, name, value)
        if self.default_value is not None:
            object.__setattr__(self, "default", self._pack_default())

    def _pack_default(self) -> Any:
        """Return the default in the form in which examples store values."""
        kind, values = _as_list("default_value", self.default_value)
        if kind == 0 and self.count == 0:
            return _pack(self.kind, values) if self.kind != BYTES_LIST else []
        if kind == INT64_LIST and self.kind == FLOAT_LIST:
            kind, values = FLOAT_LIST, values.astype(np.float64)
        if len(values) == 1:
            values = values * self.count if kind == BYTES_LIST else np.repeat(values, self.count)
        if kind != self.kind or len(values) != self.count:
            raise ValueError(
                f"default_value must be one or {self.count} of {self.dtype}, got "
                f"{self.default_value!r}"
            )
        return _pack(kind, values)


@dataclass(frozen=True, eq=False)
class VarLenFeature:
    """A feature with any number of values; none if an example lacks it.

    >>> features = {"words": hr.io.VarLenFeature(str)}
    >>> hr.io.parse_example(hr.io.encode_example({"words": ["a", "b"]}), features)
    {'words': array(['a', 'b'], dtype=object)}

    Args:
        dtype: As for `FixedLenFeature`.
    """

    dtype: npt.DTypeLike
    kind: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        dtype, kind = _check_dtype(self.dtype)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "kind", kind)


Feature: TypeAlias = FixedLenFeature | VarLenFeature


def encode_example(features: Mapping[str, Any]) -> bytes:
    """Return features as a serialized tf.Example; equal features have equal encodings.

    >>> example = hr.io.encode_example({"image": b"...", "label": 3, "box": [0.5, 1.0]})
    >>> hr.io.parse_example(example, {"label": hr.io.FixedLenFeature((), "int64")})
    {'label': np.int64(3)}

    Args:
        features: Values by name: bytes, str (stored as UTF-8), an int, a float, or an array or
            list of these. Integers and bool are stored as int64, floats as float32, arrays
            flattened in row-major order. An empty list is stored as a feature without a kind.

    Raises:
        TypeError: If a value has another type; the message names the feature.
        ValueError: If a number does not fit into int64 or float32.
    """
    if not isinstance(features, Mapping):
        raise TypeError(f"features must be a mapping of names to values, got {features!r}")
    make = protobuf.encode_field
    entries = []
    for name in features:
        if not isinstance(name, str):
            raise TypeError(f"features must have names of str, got {name!r}")
    for name in sorted(features, key=str.encode):
        entry = make(1, name.encode()) + make(2, _encode_feature(name, features[name]))
        entries.append(make(1, entry))
    return make(1, b"".join(entries))


def _encode_feature(name: str, value: Any) -> bytes:
    make = protobuf.encode_field
    cls = type(value)
    if cls is bytes:
        return make(BYTES_LIST, make(1, value))
    if cls is int and -(1 << 63) <= value < 1 << 63:
        varint = protobuf.encode_varint(value & (1 << 64) - 1)
        return make(INT64_LIST, make(1, varint))
    if cls is list and value and type(value[0]) is float and set(map(type, value)) == {float}:
        try:
            packed = struct.pack(f"<{len(value)}f", *value)
        except OverflowError:
            raise ValueError(
                f"feature {name!r} holds a number that does not fit into float32"
            ) from None
        return make(FLOAT_LIST, make(1, packed))
    kind, values = _as_list(f"feature {name!r}", value)
    if kind == 0:
        return b""
    if kind == BYTES_LIST:
        return make(kind, b"".join([make(1, item) for item in values]))
    return make(kind, make(1, _pack(kind, values)) if len(values) else b"")


def _pack(kind: int, values: Any) -> Any:
    """Return numbers as packed bytes; lists of bytes are returned unchanged."""
    if kind == FLOAT_LIST:
        packed: bytes = values.astype(_FLOAT).tobytes()
        return packed
    return protobuf.encode_varints(values) if kind == INT64_LIST else values


def _as_list(name: str, value: Any) -> tuple[int, Any]:
    """Return the kind of a value, and its list of bytes or array of numbers."""
    if isinstance(value, bytes | str):
        return BYTES_LIST, [_as_bytes(name, value)]
    if isinstance(value, list | tuple) and value and isinstance(value[0], bytes | str):
        return BYTES_LIST, [_as_bytes(name, item) for item in value]
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name} cannot be converted to an array: {error}") from error
    flat = array.reshape(-1)
    code = array.dtype.kind
    if isinstance(value, list | tuple) and not value:
        return 0, flat[:0]
    if code == "O" and flat.size and all(isinstance(item, int) for item in flat.tolist()):
        wide = max(flat.tolist(), key=abs)
        raise ValueError(f"{name} holds {wide}, which does not fit into int64")
    if code in "SUO":
        return BYTES_LIST, [_as_bytes(name, item) for item in flat.tolist()]
    if code in "iub":
        if code == "u" and flat.size and int(flat.max()) >= 1 << 63:
            raise ValueError(f"{name} holds {int(flat.max())}, which does not fit into int64")
        return INT64_LIST, flat.astype(np.int64)
    if code != "f":
        raise TypeError(
            f"{name} must be bytes, str, int, float, or an array or list of these, got {value!r}"
        )
    if array.dtype == np.float32:
        return FLOAT_LIST, flat
    with np.errstate(over="ignore"):
        narrow = flat.astype(np.float32)
    if np.count_nonzero(np.isinf(narrow)) > np.count_nonzero(np.isinf(flat)):
        raise ValueError(f"{name} holds a number that does not fit into float32")
    return FLOAT_LIST, narrow


def _as_bytes(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"{name} must hold bytes or str, got {value!r}")
