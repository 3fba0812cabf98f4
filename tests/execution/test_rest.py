"""What is left of a plan after a part of it was delivered elsewhere."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.execution.dealer import UnitPart
from headrace.execution.delivered import Delivered
from headrace.execution.rest import start_rest, units_left
from headrace.plan.source import INFINITE

PLACE = {"frontier": 2, "delivered": [[4, 5]], "parts": [[6, 1, [[0, 2]]]]}


def test_units_of_which_some_came_are_left_first_and_in_part() -> None:
    left = [*units_left(Delivered.from_json(PLACE), 9)]
    assert left == [UnitPart(6, ((2, None),)), (2, 4), (5, 6), (7, 9)]


def test_of_an_endless_plan_there_is_always_more() -> None:
    left = [*islice(units_left(Delivered.from_json(PLACE), INFINITE), 5)]
    assert left[:3] == [UnitPart(6, ((2, None),)), (2, 4), (5, 6)]
    assert left[3] == (7, 7 + (1 << 16))
    assert left[4][0] == left[3][1]  # type: ignore[index]


@pytest.mark.parametrize(
    "state",
    [
        {"frontier": 21},
        {"frontier": 0, "delivered": [[4, 21]]},
        {"frontier": 0, "parts": [[20, 1, [[0, 2]]]]},
    ],
)
def test_a_place_of_more_data_is_refused(state: Any) -> None:
    rest = start_rest(hr.Dataset.range(20).plan, seed=7)
    with pytest.raises(FailedPreconditionError, match=r"units up to 21 .* the dataset has 20"):
        rest.set_state(state)


def test_the_last_unit_may_have_come_in_part() -> None:
    rest = start_rest(hr.Dataset.range(20).plan, seed=7)
    state = {"frontier": 17, "parts": [[19, 1, [[1, None]]]]}
    rest.set_state(state)
    assert rest.get_state() == state
    rows = []
    while (chunk := rest.next_chunk(5)) is not None:
        rows += [int(each) for each in chunk.rows()]
    assert sorted(rows) == [17, 18, 19]
    assert rest.get_state() == {"frontier": 20}
    rest.close()
