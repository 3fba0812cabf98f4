"""Balancing of rows: groups receive equally many rows at similar total costs.

The most expensive rows are assigned first, each to the cheapest group that has room. Then rows of
the most expensive group are swapped with rows of cheaper groups, while that helps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["balance_rows"]

_NEAR_ENOUGH = 1.01
"""Cost of the most expensive group, as a multiple of the mean, above which rows are swapped."""
_SWAPS_PER_GROUP = 16


def balance_rows(costs: Sequence[float], groups: int) -> list[list[int]]:
    """Return the row numbers of each group, in ascending order.

    Group sizes differ by at most one. Ties are resolved by the order of rows, so that equal costs
    always result in equal groups.

    Args:
        costs: Cost of each row.
        groups: Number of groups.
    """
    prices = np.asarray(costs, dtype=np.float64)
    members = _assign_rows(prices, groups)
    totals = np.array([prices[rows].sum() for rows in members])
    limit = _NEAR_ENOUGH * float(totals.mean())
    for _ in range(_SWAPS_PER_GROUP * groups):
        dearest = int(totals.argmax())
        if totals[dearest] <= limit or not _swap(prices, members, totals, dearest):
            break
    return [sorted(rows.tolist()) for rows in members]


def _assign_rows(prices: NDArray[np.float64], groups: int) -> list[NDArray[np.intp]]:
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
    """Swap a row of the most expensive group for a cheaper one; return False if none helps."""
    own = members[dearest]
    for other in np.argsort(totals, kind="stable").tolist():
        gap = float(totals[dearest] - totals[other])
        if other == dearest or gap <= 0.0 or not len(members[other]):
            continue
        saved = prices[own][:, None] - prices[members[other]][None, :]
        # One group saves what the other pays, so half of the gap is best.
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
