"""Number of complete splits in a state."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.service.worker.task_iterator import count_complete_splits


@pytest.mark.parametrize(
    ("state", "splits"),
    [
        ({"assigned": 7}, 7),
        ({"offset": 2, "input": {"assigned": 4}}, 4),
        ([{"assigned": 9}, {"current": 0, "input": {"assigned": 3}}], 3),
        ({"slots": [{"state": {"assigned": 5}}, None], "input": {"assigned": 6}}, 5),
        ({"assigned": 0}, 0),
    ],
)
def test_the_smallest_number_in_a_nested_state_counts(state: Any, splits: int) -> None:
    assert count_complete_splits(state, before=0) == splits


@pytest.mark.parametrize("state", [None, 3, {}, {"input": [1, "assigned"]}])
def test_a_state_without_a_split_number_changes_nothing(state: Any) -> None:
    assert count_complete_splits(state, before=12) == 12


def test_the_count_does_not_decrease_with_an_older_state() -> None:
    assert count_complete_splits({"assigned": 3}, before=12) == 12


def test_a_state_may_be_nested_deeper_than_the_recursion_limit() -> None:
    state: Any = {"assigned": 2}
    for _ in range(10_000):
        state = {"input": state}
    assert count_complete_splits(state, before=0) == 2
