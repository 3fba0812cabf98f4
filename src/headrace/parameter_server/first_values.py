"""First values of rows: each element by a seed, its row or id, and its column, and nothing else.

So a row begins with the same values whatever came before it, whoever asks for it, and however many
shards there are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.casting import is_floating
from headrace.parameter_server.dtypes import working_dtype
from headrace.parameter_server.specs import Constant, Initializer, Normal, Uniform, Zeros

__all__ = ["fill", "first_rows"]


def first_rows(
    initializer: Initializer, rows: NDArray[np.int64], columns: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return the first values of rows.

    Args:
        initializer: What they are to be.
        rows: Their numbers, or ids: 1-D.
        columns: Elements in a row.
        dtype: Of the values; those of less than 32 bits are rounded from float32.

    Returns:
        An array of `len(rows)` by `columns`.
    """
    values = np.empty((len(rows), columns), dtype)
    match initializer:
        case Zeros():
            values[...] = 0
        case Constant(value):
            values[...] = value
        case _:
            block = max(1, _BLOCK // max(1, columns))
            for start in range(0, len(rows), block):
                here = slice(start, start + block)
                values[here] = _spread(initializer, rows[here], columns, dtype)
    return values


def _spread(
    initializer: Uniform | Normal, rows: NDArray[np.int64], columns: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    if isinstance(initializer, Uniform):
        return _uniform(initializer, rows, columns, dtype)
    return _normal(initializer, rows, columns)


def _uniform(
    initializer: Uniform, rows: NDArray[np.int64], columns: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    span = initializer.high - initializer.low
    if is_floating(dtype) and working_dtype(dtype).itemsize == 4:
        # Two numbers from each 64 bits: 24 of 32 are all that float32 can hold.
        halves = _bits(initializer.seed, rows, (columns + 1) // 2).view(np.uint32)[:, :columns]
        even = (halves >> np.uint32(8)).view(np.int32).astype(np.float32)
        even *= np.float32(span * 2.0**-24)
    else:
        even = (_bits(initializer.seed, rows, columns) >> np.uint64(11)).astype(np.float64)
        even *= span * 2.0**-53
    even += initializer.low
    return even


def _normal(initializer: Normal, rows: NDArray[np.int64], columns: int) -> NDArray[Any]:
    bits = _bits(initializer.seed, rows, columns)
    # Box-Muller: the high half of the bits is the distance, the low half the angle.
    distance = ((bits >> _HALF).astype(np.float64) + 1) * 2.0**-32
    angle = (bits & _LOW).astype(np.float64) * (2 * math.pi * 2.0**-32)
    spread: NDArray[Any] = np.sqrt(-2 * np.log(distance)) * np.cos(angle)
    spread *= initializer.stddev
    spread += initializer.mean
    return spread


def fill(values: NDArray[Any], initializer: Initializer, first_row: int) -> None:
    """Write first values into a shard whose first row has this number in the variable."""
    if not values.size:
        return
    flat = values.reshape(len(values) if values.ndim else 1, -1)
    block = max(1, _BLOCK // flat.shape[1])
    for start in range(0, len(flat), block):
        part = flat[start : start + block]
        rows = np.arange(first_row + start, first_row + start + len(part))
        part[...] = first_rows(initializer, rows, flat.shape[1], values.dtype)


def _bits(seed: int, rows: NDArray[np.int64], columns: int) -> NDArray[np.uint64]:
    """Return 64 bits for each element: its row and its column, mixed."""
    begin = _mix(np.uint64(seed & _ALL) + _ODD * np.arange(1, columns + 1, dtype=np.uint64))
    return _mix(_mix(rows.view(np.uint64) + _ODD)[:, None] ^ begin)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread each number's bits over all 64, in place (the finalizer of MurmurHash3)."""
    shifted = bits >> _SHIFT
    bits ^= shifted
    bits *= np.uint64(0xFF51AFD7ED558CCD)
    np.right_shift(bits, _SHIFT, out=shifted)
    bits ^= shifted
    bits *= np.uint64(0xC4CEB9FE1A85EC53)
    np.right_shift(bits, _SHIFT, out=shifted)
    bits ^= shifted
    return bits


_ALL = 2**64 - 1
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(33)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_BLOCK = 16_384
