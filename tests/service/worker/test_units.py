"""What a state says about units."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.service.worker.opening import units_whole
from headrace.service.worker.units import begun_units


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


@pytest.mark.parametrize(
    ("state", "begun"),
    [
        ({"dealt": 7, "at": 12}, 7),
        ({"dealt": 7, "at": 12, "begun": 8}, 8),
        ({"index": {"dealt": 7, "at": 7}, "ordinal": 0}, 7),
        ({"index": {"dealt": 7, "at": 7}, "ordinal": 3, "hint": 512}, 8),
        ({"offset": 0, "input": {"dealt": 7}}, 7),
        ({"offset": 2, "input": {"dealt": 7}}, 8),
        ({"pass": 3, "input": {"current": 1, "input": {"count": 9, "input": {"dealt": 5}}}}, 5),
        ({"offset": 1, "input": {"pass": 0, "input": {"dealt": 5}}}, 6),
    ],
)
def test_a_state_of_steps_that_go_on_in_order_says_how_many_units_are_begun(
    state: Any, begun: int
) -> None:
    assert begun_units(state) == begun


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        [{"dealt": 7}],
        {"done": [], "input": {"dealt": 7}},
        {"input": {"dealt": 7}, "slots": [{"dealt": 5}]},
        {"drawn": 3, "left": 2, "from": 1, "input": {"dealt": 7}},
        {"count": 3, "seed": 1, "failed": 0, "hint": {"dealt": 7}, "ended": False},
    ],
)
def test_a_state_of_a_step_that_holds_elements_does_not(state: Any) -> None:
    assert begun_units(state) is None
