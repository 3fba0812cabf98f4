"""Bags of rows: the rows of ids along the last axis become one, their sum or their mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_combiner", "pooled"]

_COMBINERS = ("sum", "mean", "sqrtn")


def check_combiner(combiner: str, ids: NDArray[np.int64], whose: str, *, is_floating: bool) -> None:
    """Raise ValueError where rows cannot be combined so.

    Args:
        combiner: As users gave it.
        ids: Of the rows.
        whose: For the message.
        is_floating: Whether they are of floating-point numbers.
    """
    if combiner not in _COMBINERS:
        known = ", ".join(map(repr, _COMBINERS))
        raise ValueError(f"`combiner` must be None or one of {known}, but got {combiner!r}")
    if not ids.ndim:
        raise ValueError(f"a bag of {whose} is a row of ids, but got one id and a `combiner`")
    if combiner != "sum" and not is_floating:
        raise ValueError(f"rows of {whose} are of integers, which have no {combiner!r}; use 'sum'")


def pooled(take: Callable[[NDArray[np.int64]], Any], bags: NDArray[np.int64], combiner: str) -> Any:
    """Return one row for each bag: its rows are added in their order, whatever else there is.

    A row for each id is never there: what is added at a time, one for each bag, stays in a cache.

    >>> rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> pooled(lambda ids: rows.take(ids, axis=0), np.array([[0, 1], [1, 1]]), "mean").tolist()
    [[2.0, 3.0], [3.0, 4.0]]

    Args:
        take: Returns the rows of ids, as an array of the caller's own.
        bags: Ids; each bag is along the last axis.
        combiner: "sum", "mean", or "sqrtn": the sum by the square root of how many there are.

    Returns:
        Zeros for bags without ids.
    """
    size = bags.shape[-1]
    if not size:
        none = take(bags)
        return none.sum(bags.ndim - 1, dtype=none.dtype)
    total = take(bags[..., 0])
    for place in range(1, size):
        total += take(bags[..., place])
    if combiner != "sum" and size > 1:
        total /= size if combiner == "mean" else math.sqrt(size)
    return total
