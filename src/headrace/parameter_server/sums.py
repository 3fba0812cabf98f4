"""Ids of a batch, for the servers: each once, to the shard that has it, and back in order.

    distinct, inverse = distinct_ids(ids)              what to ask for
    distinct, sums = sum_rows(ids, gradients)          what to push
    split_by_rows(distinct, ranges)                    shards of a variable: slices
    split_by_hash(distinct, shards)                    shards of a table: positions

Rows of a variable are dealt in order, so answers of its shards, one after another, are in the order
of `distinct`; `take(inverse)` makes them those of `ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.parameter_server.dtypes import is_floating, working_dtype

__all__ = [
    "are_large_integers",
    "check_ids",
    "check_rows",
    "distinct_ids",
    "shard_of_ids",
    "split_by_hash",
    "split_by_rows",
    "sum_rows",
]

Ids = NDArray[np.int64]


def distinct_ids(ids: Ids) -> tuple[Ids, Ids]:
    """Return the ids, rising and each once, and where each of `ids` is among them.

    Args:
        ids: Of any shape; the second answer has it too.
    """
    flat = ids.reshape(-1)
    ordered, order = _sorted(flat)
    first = _starts(ordered)
    inverse = np.empty(len(flat), np.int64)
    inverse[order] = np.cumsum(first) - 1
    return ordered[first], inverse.reshape(ids.shape)


def sum_rows(ids: Ids, values: NDArray[Any]) -> tuple[Ids, NDArray[Any]]:
    """Return the ids, rising and each once, and the sum of the rows of each.

    Args:
        ids: 1-D.
        values: A row for each. Numbers of less than 32 bits are summed, and returned, in float32.
    """
    if is_floating(values.dtype):
        values = values.astype(working_dtype(values.dtype), copy=False)
    ordered, order = _sorted(ids)
    first = np.flatnonzero(_starts(ordered))
    if len(first) == len(ids):
        return ordered, values.take(order, axis=0)
    counts = np.diff(first, append=len(ids))
    sums = values.take(order[first], axis=0)
    # Most ids stand there once: only the others are summed.
    doubled = np.flatnonzero(counts > 1)
    here = order[np.repeat(counts > 1, counts)]
    sums[doubled] = _sum_runs(values, here, counts[doubled])
    return ordered[first], sums


def _sum_runs(values: NDArray[Any], order: Ids, counts: Ids) -> NDArray[Any]:
    """Return the sum of each run of rows: of those that `order` names, so many for each sum."""
    starts = np.cumsum(counts) - counts
    product = _sparse_product() if values.dtype.kind == "f" else None
    if product is None:
        return np.add.reduceat(values.take(order, axis=0), starts, axis=0)
    flat = values.reshape(len(values), -1)
    sums = product(flat, order, np.append(starts, len(order)))
    return sums.reshape(len(counts), *values.shape[1:])


@cache
def _sparse_product() -> Callable[[NDArray[Any], Ids, Ids], NDArray[Any]] | None:
    """Return what sums rows by a sparse matrix of ones, in a third of the time; None: no SciPy."""
    try:
        import scipy.sparse  # noqa: PLC0415 - optional dependency
    except ImportError:
        return None

    def product(values: NDArray[Any], columns: Ids, starts: Ids) -> NDArray[Any]:
        ones = np.ones(len(columns), values.dtype)
        shape = (len(starts) - 1, len(values))
        return np.asarray(scipy.sparse.csr_array((ones, columns, starts), shape=shape) @ values)

    return product


def _sorted(ids: Ids) -> tuple[Ids, Ids]:
    """Return the ids in order, and where each stood; of equal ones the first comes first."""
    if len(ids) == 0:
        return ids.astype(np.int64), np.zeros(0, np.int64)
    lowest, highest = int(ids.min()), int(ids.max())
    bits = max(1, (len(ids) - 1).bit_length())
    if (highest - lowest).bit_length() + bits > 63:
        order = np.argsort(ids, kind="stable")
        return ids[order], order
    # Id and place in one number: NumPy sorts plain numbers several times as fast as it finds their
    # order.
    packed = ((ids - lowest) << bits) | np.arange(len(ids))
    packed.sort()
    return (packed >> bits) + lowest, packed & ((1 << bits) - 1)


def _starts(ordered: Ids) -> NDArray[np.bool_]:
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return first


def check_rows(rows: Any, count: int, whose: str) -> Ids:
    """Return row numbers as int64, of any shape.

    Args:
        rows: Integers.
        count: There are so many rows.
        whose: For the message.

    Raises:
        TypeError: They are no integers.
        InvalidArgumentError: One is not in [0, count); it is named, and where it stands.
    """
    found = np.asarray(rows)
    if found.size == 0 and not isinstance(rows, np.ndarray):
        found = found.astype(np.int64)
    if found.dtype.kind not in "iu" and not are_large_integers(found):
        raise TypeError(f"ids of {whose} must be integers, but got dtype {found.dtype}")
    if found.size and (found.min() < 0 or found.max() >= count):
        flat = found.reshape(-1)
        first = int(np.flatnonzero((flat < 0) | (flat >= count))[0])
        place = ", ".join(map(str, np.unravel_index(first, found.shape)))
        raise InvalidArgumentError(
            f"ids[{place}] = {flat[first]} is not in [0, {count}) of {whose}"
        )
    return found.astype(np.int64, copy=False)


def check_ids(ids: NDArray[Any], whose: str) -> Ids:
    """Return ids of a table as int64, of any shape.

    Raises:
        TypeError: They are no integers.
        InvalidArgumentError: One is too large.
    """
    if not ids.size:
        return ids.astype(np.int64)
    if are_large_integers(ids):
        raise InvalidArgumentError(
            f"ids of {whose} must fit in 64 bits, but one is {max(ids.flat, key=abs)}; hash them "
            "to int64 first"
        )
    if ids.dtype.kind not in "iu":
        raise TypeError(
            f"ids of {whose} must be integers, but have dtype {ids.dtype}; hash strings to int64 "
            "first"
        )
    if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
        return ids.view(np.int64)  # a hash: its bits are the id
    return ids.astype(np.int64, copy=False)


def are_large_integers(values: NDArray[Any]) -> bool:
    """Whether they are integers of Python of which one is beyond 64 bits: no array has them."""
    return bool(values.dtype == object and all(type(each) is int for each in values.flat))


def split_by_rows(rows: Ids, ranges: Sequence[range]) -> list[slice]:
    """Return which of `rows`, rising, fall to each range of rows, as slices."""
    edges = np.searchsorted(rows, [part.stop for part in ranges]).tolist()
    return [slice(first, last) for first, last in zip([0, *edges], edges, strict=False)]


def shard_of_ids(ids: Ids, shards: int) -> NDArray[np.int64]:
    """Return the shard of a table that each id falls to: by a hash, so that strides do no harm."""
    high = (ids.view(np.uint64) * _ODD) >> np.uint64(32)
    return ((high * np.uint64(shards)) >> np.uint64(32)).astype(np.int64)


_ODD = np.uint64(0xD6E8FEB86659FD93)


def split_by_hash(ids: Ids, shards: int) -> list[Ids]:
    """Return the positions of the ids that fall to each shard, in order."""
    if shards == 1:
        return [np.arange(len(ids))]
    owner = shard_of_ids(ids, shards)
    return [np.flatnonzero(owner == shard) for shard in range(shards)]
