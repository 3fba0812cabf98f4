"""Started, delivered and failed splits in states, and the remaining elements."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.execution.assigned_iterators import count_started_splits
from headrace.execution.build import build_iterator
from headrace.execution.delivered_elements import (
    END_ORDINAL,
    DeliveredElements,
    DeliveryLog,
    find_missing_ordinals,
    with_split_ends,
)
from headrace.execution.element_ids import (
    ErrorPosition,
    attach_element_position,
    get_error_position,
    set_error_position,
)
from headrace.execution.remaining_elements import build_remaining, remaining_splits
from headrace.execution.split_provider import PartialSplit
from headrace.plan.source import INFINITE

Dataset = hr.Dataset

IN_ORDER = {
    "map": lambda splits: splits.map(lambda n: n),
    "filter": lambda splits: splits.filter(lambda n: n % 2 == 0),
    "take": lambda splits: splits.filter(lambda n: n > 1).take(5),
    "unbatch": lambda splits: splits.map(lambda n: np.repeat(n, 3)).unbatch(),
    "repeat": lambda splits: splits.filter(lambda n: n >= 0).repeat(2),
    "concatenate": lambda splits: splits.filter(lambda n: n >= 0).concatenate(
        Dataset.range(100, 107).filter(lambda n: n >= 0)
    ),
}
HOLDING = {
    "shuffle": lambda splits: splits.filter(lambda n: n >= 0).shuffle(4, seed=1),
    "interleave": lambda splits: splits.interleave(
        lambda n: Dataset.from_tensors(n).repeat(2), cycle_length=3
    ),
}


def states_of(plan: Any, limit: int) -> list[tuple[list[int], Any]]:
    """Return the values that one worker read before each state, and the state."""
    ranges = iter([(4, 7), (0, 4), (7, 9)])
    iterator = build_iterator(plan, seed=7, next_splits=lambda: next(ranges, None))
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
def test_yielded_elements_belong_to_started_splits(name: str, limit: int) -> None:
    order = [*range(4, 7), *range(4), *range(7, 9)]
    states = states_of(IN_ORDER[name](Dataset.range(9)).plan, limit)
    assert states
    for seen, state in states:
        begun = count_started_splits(state)
        assert begun is not None
        assert begun <= len(order)
        # Later epochs and parts were not assigned here.
        assert {value for value in seen if value < 9} <= {*order[:begun]}


@pytest.mark.parametrize("name", HOLDING)
def test_a_plan_with_a_holding_step_has_no_count_of_started_splits(name: str) -> None:
    states = states_of(HOLDING[name](Dataset.range(9)).plan, 3)
    assert states
    assert {count_started_splits(state) for _, state in states} == {None}


@pytest.mark.parametrize(
    ("state", "begun"),
    [
        ({"assigned": 7, "position": 12}, 7),
        ({"assigned": 7, "position": 12, "started": 8}, 8),
        ({"index": {"assigned": 7, "position": 7}, "ordinal": 0}, 7),
        ({"index": {"assigned": 7, "position": 7}, "ordinal": 3, "hint": 512}, 8),
        ({"offset": 0, "input": {"assigned": 7}}, 7),
        ({"offset": 2, "input": {"assigned": 7}}, 8),
        ({"epoch": 3, "input": {"current": 1, "input": {"count": 9, "input": {"assigned": 5}}}}, 5),
        ({"offset": 1, "input": {"epoch": 0, "input": {"assigned": 5}}}, 6),
    ],
)
def test_a_state_of_sequential_steps_contains_the_number_of_started_splits(
    state: Any, begun: int
) -> None:
    assert count_started_splits(state) == begun


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        [{"assigned": 7}],
        {"delivered": [], "input": {"assigned": 7}},
        {"input": {"assigned": 7}, "slots": [{"assigned": 5}]},
        {"drawn": 3, "emptied": 2, "first_ordinal": 1, "input": {"assigned": 7}},
        {"count": 3, "seed": 1, "failed": 0, "hint": {"assigned": 7}, "ended": False},
    ],
)
def test_a_state_of_a_holding_step_has_no_count_of_started_splits(state: Any) -> None:
    assert count_started_splits(state) is None


# --- sets of delivered elements: their stable form in states --------------------------------------


def test_delivered_elements_have_a_stable_json_form() -> None:
    delivered = DeliveredElements()
    delivered.add(
        [
            (0, 2, 0, END_ORDINAL),
            (4, 1, 0, END_ORDINAL),
            (6, 2, 0, 2),
            (6, 2, 4, END_ORDINAL - 4),
            (9, 1, 1, 1),
        ]
    )
    state = {
        "watermark": 2,
        "delivered": [[4, 5]],
        "partial_splits": [[6, 2, [[0, 2], [4, None]]], [9, 1, [[1, 2]]]],
    }
    assert delivered.to_json() == state
    assert DeliveredElements.from_json(state).to_json() == state


def test_empty_entries_are_omitted() -> None:
    assert DeliveredElements().to_json() == {"watermark": 0}
    assert not DeliveredElements.from_json({"watermark": 0})


@pytest.mark.parametrize(
    "state", [None, {}, {"watermark": "x"}, {"watermark": 0, "partial_splits": [[1]]}]
)
def test_invalid_sets_of_delivered_elements_are_rejected(state: Any) -> None:
    with pytest.raises(FailedPreconditionError, match="a set of delivered elements"):
        DeliveredElements.from_json(state)


def test_a_split_delivered_in_parts_becomes_complete() -> None:
    delivered = DeliveredElements()
    delivered.add([(3, 1, 0, 2), (3, 1, 2, END_ORDINAL - 2), (0, 3, 0, END_ORDINAL)])
    assert (delivered.complete_splits, delivered.partial_splits, delivered.watermark) == (
        ((0, 4),),
        (),
        4,
    )


def test_the_last_element_of_a_split_adds_its_end() -> None:
    ends = [(5, 2, 3, END_ORDINAL - 3)]
    assert with_split_ends([(5, 1, 0, 3), (6, 1, 0, 2)], ends) == [
        (5, 1, 0, 3),
        (6, 1, 0, 2),
        (5, 1, 3, END_ORDINAL - 3),
    ]


def test_missing_ordinals_are_the_complement_of_the_delivered_ones() -> None:
    assert find_missing_ordinals(((1, 2), (4, END_ORDINAL))) == ((0, 1), (2, 4))
    assert find_missing_ordinals(((0, 2),)) == ((2, END_ORDINAL),)


def test_a_position_within_a_delivery_includes_its_first_elements() -> None:
    log = DeliveryLog()
    log.add(0, 3, lambda count: [(0, 1, 0, count)])
    log.add(3, 2, lambda count: [(1, 1, 0, count)])
    assert log.delivered_before(2).partial_splits == ((0, ((0, 2),)),)
    assert log.delivered_before(4).partial_splits == ((0, ((0, 3),)), (1, ((0, 1),)))
    log.discard_before(3)
    assert log.delivered_before(3).partial_splits == ((0, ((0, 3),)),)
    with pytest.raises(FailedPreconditionError, match="advanced to position 3"):
        log.delivered_before(2)


# --- positions of errors among the elements of their splits ---------------------------------------


PLACES = np.array([(5, 0), (5, 3), (8, 1)], dtype=[("split", "<i8"), ("ordinal", "<i8")])


def test_an_element_that_fails_above_the_boundary_is_counted_there() -> None:
    # A reader that continues after the error has finished element 3 of split 5, and starts with 4.
    error = ValueError()
    attach_element_position(error, PLACES, 1)
    position = get_error_position(error)
    assert position == ErrorPosition(split=5, ordinal=4, number_at_ordinal=0)
    assert position.element == 3


def test_an_error_at_the_boundary_precedes_an_element() -> None:
    error = ValueError()
    set_error_position(error, ErrorPosition(5, 4, 1))
    position = get_error_position(error)
    assert position is not None
    assert position.element == 4


def test_an_error_of_an_element_without_an_id_has_no_position() -> None:
    error = ValueError()
    attach_element_position(error, None, 0)
    attach_element_position(error, np.array([(5,)], dtype=[("split", "<i8")]), 0)
    assert get_error_position(error) is None


@pytest.mark.parametrize(
    ("position", "stands_for_all"),
    [
        (ErrorPosition(5, 0, 1, is_last=True), True),
        (ErrorPosition(5, 0, 1), False),
        (ErrorPosition(5, 2, 1, is_last=True), False),
    ],
)
def test_an_error_may_be_the_whole_content_of_a_split(
    position: ErrorPosition, stands_for_all: bool
) -> None:
    assert position.is_whole_split is stands_for_all


def test_sorted_error_positions_are_in_error_order() -> None:
    # Element 0 of the split failed; then two errors precede element 1.
    failed, first, second = ErrorPosition(5, 1, 0), ErrorPosition(5, 1, 1), ErrorPosition(5, 1, 2)
    assert sorted([second, ErrorPosition(6, 0, 1), failed, first])[:3] == [failed, first, second]


# --- remaining elements of a plan after others were delivered -------------------------------------


PLACE = {"watermark": 2, "delivered": [[4, 5]], "partial_splits": [[6, 1, [[0, 2]]]]}


def test_partially_delivered_splits_remain_first_and_in_part() -> None:
    left = [*remaining_splits(DeliveredElements.from_json(PLACE), 9)]
    assert left == [PartialSplit(6, ((2, None),)), (2, 4), (5, 6), (7, 9)]


def test_an_infinite_plan_always_has_remaining_splits() -> None:
    left = [*islice(remaining_splits(DeliveredElements.from_json(PLACE), INFINITE), 5)]
    assert left[:3] == [PartialSplit(6, ((2, None),)), (2, 4), (5, 6)]
    assert left[3] == (7, 7 + (1 << 16))
    assert left[4][0] == left[3][1]  # type: ignore[index]


@pytest.mark.parametrize(
    "state",
    [
        {"watermark": 21},
        {"watermark": 0, "delivered": [[4, 21]]},
        {"watermark": 0, "partial_splits": [[20, 1, [[0, 2]]]]},
    ],
)
def test_a_state_of_a_larger_dataset_is_rejected(state: Any) -> None:
    rest = build_remaining(hr.Dataset.range(20).plan, seed=7)
    with pytest.raises(FailedPreconditionError, match=r"splits up to 21, but the dataset has 20"):
        rest.set_state(state)


def test_the_last_split_may_be_partially_delivered() -> None:
    rest = build_remaining(hr.Dataset.range(20).plan, seed=7)
    state = {"watermark": 17, "partial_splits": [[19, 1, [[1, None]]]]}
    rest.set_state(state)
    assert rest.get_state() == state
    rows = []
    while (chunk := rest.next_chunk(5)) is not None:
        rows += [int(each) for each in chunk.rows()]
    assert sorted(rows) == [17, 18, 19]
    assert rest.get_state() == {"watermark": 20}
    rest.close()
