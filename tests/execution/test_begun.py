"""What a state says of units that were begun, delivered or failed, and what is left of them."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.execution.build import start
from headrace.execution.dealer import UnitPart
from headrace.execution.dealt import begun_units
from headrace.execution.delivered import END, Delivered, DeliveryLog, missing_in, with_ends
from headrace.execution.origins import ErrorOrigin, blame_element, give_origin, origin_of_error
from headrace.execution.rest import start_rest, units_left
from headrace.plan.source import INFINITE

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


# --- which elements were delivered: the form in which states say it, for ever ---------------------


def test_a_place_is_written_in_this_form() -> None:
    delivered = Delivered()
    delivered.add([(0, 2, 0, END), (4, 1, 0, END), (6, 2, 0, 2), (6, 2, 4, END - 4), (9, 1, 1, 1)])
    place = {
        "frontier": 2,
        "delivered": [[4, 5]],
        "parts": [[6, 2, [[0, 2], [4, None]]], [9, 1, [[1, 2]]]],
    }
    assert delivered.to_json() == place
    assert Delivered.from_json(place).to_json() == place


def test_what_is_not_there_is_not_said() -> None:
    assert Delivered().to_json() == {"frontier": 0}
    assert not Delivered.from_json({"frontier": 0})


@pytest.mark.parametrize("place", [None, {}, {"frontier": "x"}, {"frontier": 0, "parts": [[1]]}])
def test_what_says_nothing_of_the_kind_is_refused(place: Any) -> None:
    with pytest.raises(FailedPreconditionError, match="which elements were delivered"):
        Delivered.from_json(place)


def test_a_unit_of_which_all_came_in_parts_is_whole() -> None:
    delivered = Delivered()
    delivered.add([(3, 1, 0, 2), (3, 1, 2, END - 2), (0, 3, 0, END)])
    assert (delivered.whole, delivered.parts, delivered.frontier) == (((0, 4),), (), 4)


def test_with_the_last_element_of_a_unit_comes_its_end() -> None:
    ends = [(5, 2, 3, END - 3)]
    assert with_ends([(5, 1, 0, 3), (6, 1, 0, 2)], ends) == [
        (5, 1, 0, 3),
        (6, 1, 0, 2),
        (5, 1, 3, END - 3),
    ]


def test_what_is_missing_in_a_unit_is_the_rest_of_it() -> None:
    assert missing_in(((1, 2), (4, END))) == ((0, 1), (2, 4))
    assert missing_in(((0, 2),)) == ((2, END),)


def test_a_place_in_the_middle_of_a_delivery_has_its_first_elements() -> None:
    log = DeliveryLog()
    log.add(0, 3, lambda count: [(0, 1, 0, count)])
    log.add(3, 2, lambda count: [(1, 1, 0, count)])
    assert log.until(2).parts == ((0, ((0, 2),)),)
    assert log.until(4).parts == ((0, ((0, 3),)), (1, ((0, 1),)))
    log.forget(3)
    assert log.until(3).parts == ((0, ((0, 3),)),)
    with pytest.raises(FailedPreconditionError, match="the reading went on to element 3"):
        log.until(2)


# --- where errors stand among the elements of their units -----------------------------------------


PLACES = np.array([(5, 0), (5, 3), (8, 1)], dtype=[("unit", "<i8"), ("ordinal", "<i8")])


def test_an_element_that_fails_above_the_root_is_counted_there() -> None:
    # Whoever goes on after the error has element 3 of unit 5 done, and begins with 4.
    error = ValueError()
    blame_element(error, PLACES, 1)
    origin = origin_of_error(error)
    assert origin == ErrorOrigin(unit=5, ordinal=4, number=0)
    assert origin.element == 3


def test_an_error_at_the_root_stands_before_an_element() -> None:
    error = ValueError()
    give_origin(error, ErrorOrigin(5, 4, 1))
    origin = origin_of_error(error)
    assert origin is not None
    assert origin.element == 4


def test_an_element_without_an_origin_is_not_blamed() -> None:
    error = ValueError()
    blame_element(error, None, 0)
    blame_element(error, np.array([(5,)], dtype=[("unit", "<i8")]), 0)
    assert origin_of_error(error) is None


@pytest.mark.parametrize(
    ("origin", "stands_for_all"),
    [
        (ErrorOrigin(5, 0, 1, is_last=True), True),
        (ErrorOrigin(5, 0, 1), False),
        (ErrorOrigin(5, 2, 1, is_last=True), False),
    ],
)
def test_an_error_stands_for_a_unit_that_has_nothing_else(
    origin: ErrorOrigin, stands_for_all: bool
) -> None:
    assert origin.stands_for_all is stands_for_all


def test_sorted_origins_are_in_the_order_in_which_the_errors_stand() -> None:
    # Element 0 of the unit failed; then two errors stand before element 1.
    failed, first, second = ErrorOrigin(5, 1, 0), ErrorOrigin(5, 1, 1), ErrorOrigin(5, 1, 2)
    assert sorted([second, ErrorOrigin(6, 0, 1), failed, first])[:3] == [failed, first, second]


# --- what is left of a plan after a part of it was delivered elsewhere ----------------------------


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
