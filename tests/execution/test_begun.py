"""What a state says about units of which elements were yielded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.execution.build import start
from headrace.execution.dealt import begun_units

Dataset = hr.Dataset

IN_ORDER = {
    "map": lambda units: units.map(lambda n: n),
    "filter": lambda units: units.filter(lambda n: n % 2 == 0),
    "take": lambda units: units.filter(lambda n: n > 1).take(5),
    "unbatch": lambda units: units.map(lambda n: np.repeat(n, 3)).unbatch(),
    "repeat": lambda units: units.filter(lambda n: n >= 0).repeat(2),
    "concatenate": lambda units: units.filter(lambda n: n >= 0).concatenate(
        Dataset.range(100, 107).filter(lambda n: n >= 0)
    ),
}
HOLDING = {
    "shuffle": lambda units: units.filter(lambda n: n >= 0).shuffle(4, seed=1),
    "interleave": lambda units: units.interleave(
        lambda n: Dataset.from_tensors(n).repeat(2), cycle_length=3
    ),
}


def states_of(plan: Any, limit: int) -> list[tuple[list[int], Any]]:
    """Return the values before each place of what one worker reads, and the state there."""
    ranges = iter([(4, 7), (0, 4), (7, 9)])
    iterator = start(plan, seed=7, units=lambda: next(ranges, None))
    seen: list[int] = []
    states = []
    while (chunk := iterator.next_chunk(limit)) is not None:
        for index, row in enumerate(chunk.rows()):
            seen.append(int(row))
            states.append((list(seen), chunk.state_at(index + 1)))
    iterator.close()
    return states


@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize("name", IN_ORDER)
def test_all_that_was_yielded_is_of_units_that_are_begun(name: str, limit: int) -> None:
    order = [*range(4, 7), *range(4), *range(7, 9)]
    states = states_of(IN_ORDER[name](Dataset.range(9)).plan, limit)
    assert states
    for seen, state in states:
        begun = begun_units(state)
        assert begun is not None
        assert begun <= len(order)
        # A pass or a part after the first one was not dealt here.
        assert {value for value in seen if value < 9} <= {*order[:begun]}


@pytest.mark.parametrize("name", HOLDING)
def test_a_plan_with_a_step_that_holds_elements_does_not_say(name: str) -> None:
    states = states_of(HOLDING[name](Dataset.range(9)).plan, 3)
    assert states
    assert {begun_units(state) for _, state in states} == {None}


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
