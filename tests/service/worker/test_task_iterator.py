"""What a state says about units that are whole."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.service.worker.task_iterator import count_complete_splits


@pytest.mark.parametrize(
    ("state", "units"),
    [
        ({"assigned": 7}, 7),
        ({"offset": 2, "input": {"assigned": 4}}, 4),
        ([{"assigned": 9}, {"current": 0, "input": {"assigned": 3}}], 3),
        ({"slots": [{"state": {"assigned": 5}}, None], "input": {"assigned": 6}}, 5),
        ({"assigned": 0}, 0),
    ],
)
def test_the_smallest_number_anywhere_in_a_state_counts(state: Any, units: int) -> None:
    assert count_complete_splits(state, before=0) == units


@pytest.mark.parametrize("state", [None, 3, {}, {"input": [1, "assigned"]}])
def test_a_state_without_such_a_number_changes_nothing(state: Any) -> None:
    assert count_complete_splits(state, before=12) == 12


def test_what_is_whole_stays_so_where_a_step_keeps_an_older_state() -> None:
    assert count_complete_splits({"assigned": 3}, before=12) == 12


def test_a_state_may_be_nested_more_deeply_than_calls_may() -> None:
    state: Any = {"assigned": 2}
    for _ in range(10_000):
        state = {"input": state}
    assert count_complete_splits(state, before=0) == 2
