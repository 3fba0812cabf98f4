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

_MAX_IMBALANCE = 1.01
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
    row_costs = np.asarray(costs, dtype=np.float64)
    rows_by_group = _assign_rows(row_costs, groups)
    totals = np.array([row_costs[rows].sum() for rows in rows_by_group])
    limit = _MAX_IMBALANCE * float(totals.mean())
    for _ in range(_SWAPS_PER_GROUP * groups):
        most_expensive = int(totals.argmax())
        if totals[most_expensive] <= limit or not _swap(
            row_costs, rows_by_group, totals, most_expensive
        ):
            break
    return [sorted(rows.tolist()) for rows in rows_by_group]


def _assign_rows(row_costs: NDArray[np.float64], groups: int) -> list[NDArray[np.intp]]:
    rows, extra = divmod(len(row_costs), groups)
    room = [rows + (group < extra) for group in range(groups)]
    rows_by_group: list[list[int]] = [[] for _ in range(groups)]
    cheapest = [(0.0, group) for group in range(groups) if room[group]]
    for row in np.argsort(-row_costs, kind="stable").tolist():
        total, group = heapq.heappop(cheapest)
        rows_by_group[group].append(row)
        if len(rows_by_group[group]) < room[group]:
            heapq.heappush(cheapest, (total + float(row_costs[row]), group))
    return [np.array(each, dtype=np.intp) for each in rows_by_group]


def _swap(
    row_costs: NDArray[np.float64],
    rows_by_group: list[NDArray[np.intp]],
    totals: NDArray[np.float64],
    most_expensive: int,
) -> bool:
    """Swap a row of the most expensive group for a cheaper one; return False if none helps."""
    expensive_rows = rows_by_group[most_expensive]
    for other in np.argsort(totals, kind="stable").tolist():
        gap = float(totals[most_expensive] - totals[other])
        if other == most_expensive or gap <= 0.0 or not len(rows_by_group[other]):
            continue
        savings = row_costs[expensive_rows][:, None] - row_costs[rows_by_group[other]][None, :]
        # One group saves what the other pays, so half of the gap is best.
        savings[(savings <= 0.0) | (savings >= gap)] = np.inf
        distance = np.abs(savings - gap / 2)
        best = int(distance.argmin())
        row, other_row = np.unravel_index(best, distance.shape)
        if not np.isfinite(distance[row, other_row]):
            continue
        expensive_rows[row], rows_by_group[other][other_row] = (
            rows_by_group[other][other_row],
            expensive_rows[row],
        )
        totals[most_expensive] -= savings[row, other_row]
        totals[other] += savings[row, other_row]
        return True
    return False
