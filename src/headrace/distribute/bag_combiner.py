"""Row indices from users, and combination of bags of rows."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.frameworks.framework import Framework

__all__ = [
    "COMBINERS",
    "are_large_integers",
    "as_ids",
    "check_combiner",
    "check_row_indices",
    "combine_array_bags",
    "combine_bags",
    "row_indices",
]

# --- Bags of rows: the rows of ids along the last axis are combined by sum or mean ----------------

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]
COMBINERS: tuple[str, ...] = get_args(Combiner)
"""Combination of a bag: the sum, the sum by the size, or the sum by the square root of the size."""

_BLOCK_ELEMENTS = 32_768
"""Numbers summed at a time: 128 KiB of float32, which fit into a cache."""


def check_combiner(combiner: Any, ids: NDArray[np.int64], owner: str, *, owner_kind: str) -> None:
    """Raise ValueError if rows cannot be combined this way.

    Args:
        combiner: Value that the user passed.
        ids: Ids of the rows.
        owner: Name of the variable or table, for the message.
        owner_kind: NumPy kind of the rows' dtype: b, i, u, f or c.
    """
    if not isinstance(combiner, str) or combiner not in COMBINERS:
        known = ", ".join(map(repr, COMBINERS))
        raise ValueError(f"`combiner` must be None or one of {known}, but got {combiner!r}")
    if not ids.ndim:
        raise ValueError(
            f"`combiner` of {owner} needs bags of ids along the last axis, but got a single id"
        )
    if owner_kind == "b":
        raise ValueError(
            f"`combiner` is not supported for {owner}, whose rows are bools; use combiner=None"
        )
    if combiner != "sum" and owner_kind in "iu":
        raise ValueError(
            f"`combiner` {combiner!r} is not supported for {owner}, whose rows are integers; "
            "use 'sum'"
        )


def combine_bags(
    rows: NDArray[Any], bags: NDArray[np.int64], combiner: str, working_dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return one row per bag: the sum of its rows in their order, independent of other bags.

    The rows of all ids never exist at once: the sum works on parts that fit into a cache.

    >>> rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> combine_bags(rows, np.array([[0, 1], [1, 1]]), "mean", rows.dtype).tolist()
    [[2.0, 3.0], [3.0, 4.0]]

    Args:
        rows: Array of one dimension or more.
        bags: Indices of rows; each bag is along the last axis.
        combiner: "sum", "mean", or "sqrtn": the sum divided by the square root of the bag size.
        working_dtype: Dtype of the summation.

    Returns:
        An array of the dtype of `rows`; zeros for bags without ids.
    """
    size = bags.shape[-1]
    combined = np.zeros((*bags.shape[:-1], *rows.shape[1:]), rows.dtype)
    width = math.prod(rows.shape[1:])
    if not combined.size or not size:
        return combined
    flat_bags, flat_combined = bags.reshape(-1, size), combined.reshape(-1, width)
    table = rows.reshape(len(rows), width)
    bags_per_block = max(1, _BLOCK_ELEMENTS // width)
    for start in range(0, len(flat_bags), bags_per_block):
        block = flat_bags[start : start + bags_per_block]
        total = _sum_bags(table, block, working_dtype)
        if combiner != "sum" and size > 1:
            total /= _divisor(combiner, size)
        flat_combined[start : start + bags_per_block] = total
    return combined


def _sum_bags(
    rows: NDArray[Any], bags: NDArray[np.int64], working_dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return the sums of a few bags, each added in order."""
    bag_count, size = bags.shape
    total = _take_rows(rows, bags[:, 0], working_dtype)
    ids_per_block = _BLOCK_ELEMENTS // (bag_count * rows.shape[1])
    if ids_per_block < 2:
        for position in range(1, size):
            total += _take_rows(rows, bags[:, position], working_dtype)
        return total
    for start in range(1, size, ids_per_block):
        rows_block = _take_rows(rows, bags[:, start : start + ids_per_block].T, working_dtype)
        terms = np.concatenate([total[np.newaxis], rows_block])
        if total.size == 1:
            # NumPy sums contiguous numbers pairwise, which rounds differently.
            total = np.add.accumulate(terms, axis=0, dtype=working_dtype)[-1]
        else:
            total = np.add.reduce(terms, axis=0, dtype=working_dtype)
    return total


def _take_rows(
    rows: NDArray[Any], indices: NDArray[np.int64], working_dtype: np.dtype[Any]
) -> NDArray[Any]:
    return rows.take(indices, axis=0).astype(working_dtype, copy=False)


def _divisor(combiner: str, size: int) -> float:
    return size if combiner == "mean" else math.sqrt(size)


def combine_array_bags(
    array: Any, bags: NDArray[np.int64], combiner: str, framework: Framework
) -> Any:
    """Return one row per bag of rows of an array of any framework.

    JAX and PyTorch choose the order of additions, so the last bits may differ.

    Args:
        array: Array of rows.
        bags: Indices of rows; each bag is along the last axis.
        combiner: As in `combine_bags`.
        framework: Framework of the array.
    """
    is_narrow = framework.dtype_kind(array.dtype) == "f" and array.dtype.itemsize < 4
    if isinstance(array, np.ndarray):
        return combine_bags(
            array, bags, combiner, np.dtype(np.float32) if is_narrow else array.dtype
        )
    working = framework.as_dtype(np.float32) if is_narrow else array.dtype
    rows = array[np.ascontiguousarray(bags)]
    total = rows.sum(bags.ndim - 1, dtype=working)
    size = bags.shape[-1]
    if combiner != "sum" and size > 1:
        total = total / _divisor(combiner, size)
    return framework.as_array(total, array.dtype) if is_narrow else total


# --- Row indices from users -----------------------------------------------------------------------


def row_indices(variable: Any, ids: Any) -> NDArray[np.int64]:
    """Return row indices of a variable, of any shape.

    Args:
        variable: Object with a `name` and a `shape`.
        ids: Integers.

    Raises:
        ValueError: If the variable is a scalar.
        TypeError: If the ids are not integers.
        InvalidArgumentError: If there is no such row; names it and its position.
    """
    owner = f"Variable {variable.name!r}"
    if not variable.shape:
        raise ValueError(f"{owner} is a scalar and has no rows")
    return check_row_indices(ids, variable.shape[0], owner)


def check_row_indices(rows: Any, count: int, owner: str) -> NDArray[np.int64]:
    """Return row indices as int64, of any shape.

    Args:
        rows: Integers.
        count: Number of rows.
        owner: Name of the variable, for the message.

    Raises:
        TypeError: If they are not integers.
        InvalidArgumentError: If one is not in [0, count); names it and its position.
    """
    ids = as_ids(rows, owner)
    if ids.size == 0 and not isinstance(rows, np.ndarray):
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu" and not are_large_integers(ids):
        raise TypeError(f"ids of {owner} must be integers, but got dtype {ids.dtype}")
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        flat = ids.reshape(-1)
        first = int(np.flatnonzero((flat < 0) | (flat >= count))[0])
        position = ", ".join(map(str, np.unravel_index(first, ids.shape)))
        raise InvalidArgumentError(
            f"ids[{position}] = {flat[first]} is not in [0, {count}) of {owner}"
        )
    return ids.astype(np.int64, copy=False)


def as_ids(ids: Any, owner: str) -> NDArray[Any]:
    """Return ids as an array.

    Raises:
        ValueError: If they are lists of different lengths.
    """
    try:
        return np.asarray(ids)
    except ValueError:
        raise ValueError(
            f"ids of {owner} must form an array, but got lists of different lengths; look up "
            "each list separately, or use hr.torch.EmbeddingBag"
        ) from None


def are_large_integers(values: NDArray[Any]) -> bool:
    """Return whether values are Python integers, one of them beyond the 64 bits of arrays."""
    return bool(values.dtype == object and all(type(each) is int for each in values.flat))
