"""Rows are balanced: each consumer gets equally many rows at similar total costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.service.modes.coordinated_reads.balance import balance_rows


@pytest.mark.parametrize("seed", range(100))
def test_lognormal_costs_of_32_rows_and_more_are_balanced(seed: int) -> None:
    chance = np.random.default_rng(seed)
    groups, rows = int(chance.integers(2, 17)), int(chance.integers(32, 65))
    costs = chance.lognormal(0.0, 1.0, groups * rows)
    shares = balance_rows(costs, groups)
    assert {len(group) for group in shares} == {rows}
    totals = [costs[group].sum() for group in shares]
    assert max(totals) <= max(1.05 * np.mean(totals), costs.max()), f"seed {seed}"


@given(
    costs=st.lists(st.floats(0.0, 1e6), max_size=60),
    groups=st.integers(1, 8),
)
def test_each_row_goes_to_one_group_and_groups_differ_by_one_row_at_most(
    costs: list[float], groups: int
) -> None:
    shares = balance_rows(costs, groups)
    assert len(shares) == groups
    assert sorted(row for group in shares for row in group) == list(range(len(costs)))
    sizes = [len(group) for group in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(group == sorted(group) for group in shares)


def test_the_same_costs_always_give_the_same_groups() -> None:
    costs = [3.0, 1.0, 1.0, 3.0, 2.0, 2.0]
    assert balance_rows(costs, 2) == balance_rows(list(costs), 2) == [[0, 1, 4], [2, 3, 5]]
