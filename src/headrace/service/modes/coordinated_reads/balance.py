"""Balance: rows are shared among groups so that each has as many, and none is much dearer.

The dearest rows are given out first, each to the cheapest group that has room. Then rows of the
dearest group change places with rows of cheaper ones, while that helps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["balanced"]

_NEAR_ENOUGH = 1.01
"""Times the mean: what the dearest group may cost, beyond which rows change places."""
_SWAPS_PER_GROUP = 16


def balanced(costs: Sequence[float], groups: int) -> list[list[int]]:
    """Return for each group the rows that it gets, by number, in ascending order.

    Numbers of rows differ by one at most. Of two ways that cost the same, the first rows decide, so
    that the same costs always give the same groups.

    Args:
        costs: Of each row.
        groups: How many there are.
    """
    prices = np.asarray(costs, dtype=np.float64)
    members = _dealt(prices, groups)
    totals = np.array([prices[rows].sum() for rows in members])
    limit = _NEAR_ENOUGH * float(totals.mean())
    for _ in range(_SWAPS_PER_GROUP * groups):
        dearest = int(totals.argmax())
        if totals[dearest] <= limit or not _swap(prices, members, totals, dearest):
            break
    return [sorted(rows.tolist()) for rows in members]


def _dealt(prices: NDArray[np.float64], groups: int) -> list[NDArray[np.intp]]:
    rows, extra = divmod(len(prices), groups)
    room = [rows + (group < extra) for group in range(groups)]
    members: list[list[int]] = [[] for _ in range(groups)]
    cheapest = [(0.0, group) for group in range(groups) if room[group]]
    for row in np.argsort(-prices, kind="stable").tolist():
        total, group = heapq.heappop(cheapest)
        members[group].append(row)
        if len(members[group]) < room[group]:
            heapq.heappush(cheapest, (total + float(prices[row]), group))
    return [np.array(each, dtype=np.intp) for each in members]


def _swap(
    prices: NDArray[np.float64],
    members: list[NDArray[np.intp]],
    totals: NDArray[np.float64],
    dearest: int,
) -> bool:
    """Let the dearest group change a row for a cheaper one; False: nothing would help."""
    own = members[dearest]
    for other in np.argsort(totals, kind="stable").tolist():
        gap = float(totals[dearest] - totals[other])
        if other == dearest or gap <= 0.0 or not len(members[other]):
            continue
        saved = prices[own][:, None] - prices[members[other]][None, :]
        # What is saved here is paid there: best is half of the gap.
        saved[(saved <= 0.0) | (saved >= gap)] = np.inf
        away = np.abs(saved - gap / 2)
        best = int(away.argmin())
        here, there = np.unravel_index(best, away.shape)
        if not np.isfinite(away[here, there]):
            continue
        own[here], members[other][there] = members[other][there], own[here]
        totals[dearest] -= saved[here, there]
        totals[other] += saved[here, there]
        return True
    return False
