"""Columns of MDS samples: the decoders of their encodings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import InvalidArgumentError
from headrace.sources.images import decode_image

__all__ = ["Column"]

_SCALARS = frozenset(
    f"{kind}{bits}"
    for kind, sizes in (
        ("uint", (8, 16, 32, 64)),
        ("int", (8, 16, 32, 64)),
        ("float", (16, 32, 64)),
    )
    for bits in sizes
)
#: Dtypes by the code that arrays without a fixed dtype begin with.
_ARRAY_DTYPES = {
    8: "<u1", 9: "<i1", 16: "<u2", 17: "<i2", 18: "<f2",
    32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8", 66: "<f8",
}  # fmt: skip
_PIL_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


@dataclass(frozen=True)
class Column:
    """A column as the index describes it.

    Args:
        name: Name.
        encoding: Encoding: a name, or a name and arguments as in "ndarray:int32:4,4".
        num_bytes: Size of a value if all have the same size; None otherwise.
    """

    name: str
    encoding: str
    num_bytes: int | None

    def find_decoder(self) -> Callable[[bytes], Any]:
        """Return the function that decodes a value.

        Raises:
            InvalidArgumentError: If the encoding is unknown, or runs code of the file.
        """
        kind, _, arguments = self.encoding.partition(":")
        if kind == "pkl":
            raise InvalidArgumentError(
                f"column {self.name!r} contains pickles, which could run any code when they are "
                "loaded; leave it out with `columns`, or read it as bytes with `encoded` and call "
                "pickle.loads if you trust the files"
            )
        if kind == "ndarray":
            return _array_decoder(arguments)
        if kind in _SCALARS:
            return _Scalar(kind)
        try:
            return _DECODERS[kind]
        except KeyError:
            raise InvalidArgumentError(
                f"column {self.name!r} has the unknown encoding {self.encoding!r}; leave it out "
                "with `columns`, or read it as bytes with `encoded`"
            ) from None


@dataclass(frozen=True)
class _Scalar:
    dtype: str

    def __call__(self, data: bytes) -> Any:
        (value,) = np.frombuffer(data, np.dtype(self.dtype).newbyteorder("<"))
        return value


@dataclass(frozen=True)
class _Array:
    """Decodes an array whose dtype and shape are known, or stored before its values."""

    dtype: str
    shape: tuple[int, ...]

    def __call__(self, data: bytes) -> Any:
        dtype, shape, offset = self.dtype, self.shape, 0
        if not dtype:
            dtype, offset = _ARRAY_DTYPES[data[0]], 1
        if not shape:
            num_axes, length_bytes = data[offset] >> 2, 1 << (data[offset] & 3)
            stop = offset + 1 + num_axes * length_bytes
            lengths = np.frombuffer(data[offset + 1 : stop], f"<u{length_bytes}")
            shape, offset = tuple(lengths.tolist()), stop
        values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=offset)
        return values.reshape(shape).copy()


def _array_decoder(arguments: str) -> _Array:
    dtype, _, shape = arguments.partition(":")
    return _Array(dtype, tuple(map(int, shape.split(","))) if shape else ())


def _decode_pil(data: bytes) -> Any:
    """Decode an uncompressed image."""
    width, height, mode_size = np.frombuffer(data[:12], "<u4").tolist()
    mode = data[12 : 12 + mode_size].decode()
    if mode not in _PIL_CHANNELS:
        raise ValueError(f"images of mode {mode!r} are not supported, only {list(_PIL_CHANNELS)}")
    pixels = np.frombuffer(data, np.uint8, offset=12 + mode_size)
    return pixels.reshape(height, width, _PIL_CHANNELS[mode]).copy()


def _decode_int(data: bytes) -> Any:
    (value,) = np.frombuffer(data, "<i8")
    return value


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": _decode_int,
    "str_int": int,
    "str_float": float,
    "str_decimal": bytes.decode,
    "json": json.loads,
    "jpeg": decode_image,
    "png": decode_image,
    "pil": _decode_pil,
}
