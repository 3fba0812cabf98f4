"""Rows by their numbers: numbers as users give them, and bags of rows that become one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.frameworks.framework import Framework

__all__ = [
    "COMBINERS",
    "are_large_integers",
    "as_ids",
    "check_combiner",
    "check_rows",
    "pool_rows",
    "pooled",
    "rows_of",
]

# --- Bags of rows: those of ids along the last axis become one, their sum or mean -----------------

COMBINERS = ("sum", "mean", "sqrtn")
"""How the rows of a bag become one: their sum, that by their number, or by its square root."""

_BLOCK_ELEMENTS = 32_768
"""Numbers that are added at a time: 128 KiB of float32, which stay in a cache."""


def check_combiner(combiner: Any, ids: NDArray[np.int64], whose: str, *, kind: str) -> None:
    """Raise ValueError where rows cannot be combined so.

    Args:
        combiner: As users gave it.
        ids: Of the rows.
        whose: For the message.
        kind: Of the rows' numbers, as NumPy says it: b, i, u, f or c.
    """
    if not isinstance(combiner, str) or combiner not in COMBINERS:
        known = ", ".join(map(repr, COMBINERS))
        raise ValueError(f"`combiner` must be None or one of {known}, but got {combiner!r}")
    if not ids.ndim:
        raise ValueError(f"a bag of {whose} is a row of ids, but got one id and a `combiner`")
    if kind == "b":
        raise ValueError(f"rows of {whose} are of bools, which are not added; use no `combiner`")
    if combiner != "sum" and kind in "iu":
        raise ValueError(f"rows of {whose} are of integers, which have no {combiner!r}; use 'sum'")


def pool_rows(
    rows: NDArray[Any], bags: NDArray[np.int64], combiner: str, working: np.dtype[Any]
) -> NDArray[Any]:
    """Return one row for each bag: its rows are added in their order, whatever else there is.

    A row for each id is never there: what is added at a time stays in a cache.

    >>> rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> pool_rows(rows, np.array([[0, 1], [1, 1]]), "mean", rows.dtype).tolist()
    [[2.0, 3.0], [3.0, 4.0]]

    Args:
        rows: Of one dimension or more.
        bags: Which rows; each bag is along the last axis.
        combiner: "sum", "mean", or "sqrtn": the sum by the square root of how many there are.
        working: The dtype to add in.

    Returns:
        An array of the dtype of `rows`; zeros for bags without ids.
    """
    size = bags.shape[-1]
    found = np.zeros((*bags.shape[:-1], *rows.shape[1:]), rows.dtype)
    width = math.prod(rows.shape[1:])
    if not found.size or not size:
        return found
    flat, made = bags.reshape(-1, size), found.reshape(-1, width)
    table = rows.reshape(len(rows), width)
    together = max(1, _BLOCK_ELEMENTS // width)
    for start in range(0, len(flat), together):
        block = flat[start : start + together]
        total = _added(table, block, working)
        if combiner != "sum" and size > 1:
            total /= _divisor(combiner, size)
        made[start : start + together] = total
    return found


def _added(rows: NDArray[Any], bags: NDArray[np.int64], working: np.dtype[Any]) -> NDArray[Any]:
    """Return the sums of a few bags, each added in order."""
    bag_count, size = bags.shape
    total = _taken(rows, bags[:, 0], working)
    places = _BLOCK_ELEMENTS // (bag_count * rows.shape[1])
    if places < 2:
        for place in range(1, size):
            total += _taken(rows, bags[:, place], working)
        return total
    for start in range(1, size, places):
        more = _taken(rows, bags[:, start : start + places].T, working)
        given = np.concatenate([total[np.newaxis], more])
        if total.size == 1:
            # NumPy adds up what lies in a row by halves, which rounds otherwise.
            total = np.add.accumulate(given, axis=0, dtype=working)[-1]
        else:
            total = np.add.reduce(given, axis=0, dtype=working)
    return total


def _taken(rows: NDArray[Any], which: NDArray[np.int64], working: np.dtype[Any]) -> NDArray[Any]:
    return rows.take(which, axis=0).astype(working, copy=False)


def _divisor(combiner: str, size: int) -> float:
    return size if combiner == "mean" else math.sqrt(size)


def pooled(array: Any, bags: NDArray[np.int64], combiner: str, framework: Framework) -> Any:
    """Return one row for each bag of rows of an array of any framework.

    JAX and PyTorch add in an order of their own, so the last bits may differ.

    Args:
        array: Of rows.
        bags: Which of them; each bag is along the last axis.
        combiner: As for `pool_rows`.
        framework: Whose array it is.
    """
    is_narrow = framework.kind(array.dtype) == "f" and array.dtype.itemsize < 4
    if isinstance(array, np.ndarray):
        return pool_rows(array, bags, combiner, np.dtype(np.float32) if is_narrow else array.dtype)
    working = framework.dtype(np.float32) if is_narrow else array.dtype
    rows = array[np.ascontiguousarray(bags)]
    total = rows.sum(bags.ndim - 1, dtype=working)
    size = bags.shape[-1]
    if combiner != "sum" and size > 1:
        total = total / _divisor(combiner, size)
    return framework.array(total, array.dtype) if is_narrow else total


# --- Numbers of rows, as users give them ----------------------------------------------------------


def rows_of(variable: Any, ids: Any) -> NDArray[np.int64]:
    """Return numbers of rows of a variable, of any shape.

    Args:
        variable: Has a `name` and a `shape`.
        ids: Integers.

    Raises:
        ValueError: The variable is one number.
        TypeError: They are no integers.
        InvalidArgumentError: There is no such row; it is named, and where it stands.
    """
    whose = f"Variable {variable.name!r}"
    if not variable.shape:
        raise ValueError(f"{whose} has no rows: it is one number")
    return check_rows(ids, variable.shape[0], whose)


def check_rows(rows: Any, count: int, whose: str) -> NDArray[np.int64]:
    """Return row numbers as int64, of any shape.

    Args:
        rows: Integers.
        count: There are so many rows.
        whose: For the message.

    Raises:
        TypeError: They are no integers.
        InvalidArgumentError: One is not in [0, count); it is named, and where it stands.
    """
    found = as_ids(rows, whose)
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


def as_ids(ids: Any, whose: str) -> NDArray[Any]:
    """Return ids as an array.

    Raises:
        ValueError: They are lists of unlike lengths.
    """
    try:
        return np.asarray(ids)
    except ValueError:
        raise ValueError(
            f"ids of {whose} must be an array, but here lists of ids have unlike lengths; look up "
            "each list by itself, or see hr.torch.EmbeddingBag"
        ) from None


def are_large_integers(values: NDArray[Any]) -> bool:
    """Whether they are integers of Python of which one is beyond 64 bits: no array has them."""
    return bool(values.dtype == object and all(type(each) is int for each in values.flat))
