"""What a state says about units that are whole."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.service.worker.opening import units_whole


@pytest.mark.parametrize(
    ("state", "units"),
    [
        ({"dealt": 7}, 7),
        ({"offset": 2, "input": {"dealt": 4}}, 4),
        ([{"dealt": 9}, {"current": 0, "input": {"dealt": 3}}], 3),
        ({"slots": [{"state": {"dealt": 5}}, None], "input": {"dealt": 6}}, 5),
        ({"dealt": 0}, 0),
    ],
)
def test_the_smallest_number_anywhere_in_a_state_counts(state: Any, units: int) -> None:
    assert units_whole(state, before=0) == units


@pytest.mark.parametrize("state", [None, 3, {}, {"input": [1, "dealt"]}])
def test_a_state_without_such_a_number_changes_nothing(state: Any) -> None:
    assert units_whole(state, before=12) == 12


def test_what_is_whole_stays_so_where_a_step_keeps_an_older_state() -> None:
    assert units_whole({"dealt": 3}, before=12) == 12


def test_a_state_may_be_nested_more_deeply_than_calls_may() -> None:
    state: Any = {"dealt": 2}
    for _ in range(10_000):
        state = {"input": state}
    assert units_whole(state, before=0) == 2
