"""Memory allocation for batches, aligned so that frameworks need not copy them.

JAX uses a NumPy array's memory on the CPU if it is aligned to 64 bytes, and copies it otherwise;
NumPy aligns to 16 bytes. Small arrays are not worth the effort.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["allocate_array", "copy_array", "copy_rows"]

_ALIGNMENT = 64
_LARGE_BYTES = 1 << 20


def allocate_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialized array in new memory.

    Records are zeroed: nothing writes the padding between fields, and it might be sent to a peer.

    >>> allocate_array((1 << 18,), np.dtype(np.float32)).ctypes.data % 64
    0
    """
    make = np.zeros if issubclass(dtype.type, np.void) else np.empty
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE_BYTES or dtype.hasobject:
        return make(shape, dtype)
    memory = make(size + _ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % _ALIGNMENT)


def copy_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of an array in new C-contiguous memory."""
    if array.nbytes < _LARGE_BYTES and not issubclass(array.dtype.type, np.void):
        return array.copy()
    result = allocate_array(array.shape, array.dtype)
    result[...] = array
    return result


def copy_rows(array: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return a copy of the rows at `indices`, whose axes replace the first axis.

    Raises:
        IndexError: If an index is out of range.
    """
    if not array.flags.c_contiguous:
        # `take` would first copy the whole array; a sliding-window view is far larger than its
        # data.
        rows = array[indices]
        return copy_array(rows) if rows.nbytes >= _LARGE_BYTES else np.ascontiguousarray(rows)
    # `take` is 1.3 times as fast as indexing for image rows, and 4 times for scalars.
    shape = (*indices.shape, *array.shape[1:])
    size = math.prod(shape) * array.itemsize
    # With `out`, `take` is fast only in a mode without bounds checks. A separate check pays off if
    # rows are longer than indices.
    if size < max(_LARGE_BYTES, _ALIGNMENT * indices.size) or _has_out_of_range(
        indices, len(array)
    ):
        return array.take(indices, axis=0)
    return array.take(indices, axis=0, out=allocate_array(shape, array.dtype), mode="clip")


def _has_out_of_range(indices: NDArray[np.int64], rows: int) -> bool:
    """Return whether an index is negative or has no row."""
    return bool(indices.size) and not (indices.min() >= 0 and indices.max() < rows)
