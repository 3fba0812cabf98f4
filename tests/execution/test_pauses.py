"""Pauses between assigned splits: held elements are yielded first, then later splits follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

import headrace as hr
from headrace.execution.assigned_iterators import AssignedPlanIterator
from headrace.execution.build import build_iterator
from headrace.execution.split_progress import FinishedSplits
from headrace.execution.split_provider import NextSplits, PartialSplit, Pause

Dataset = hr.Dataset


def tens(number: int) -> hr.Dataset:
    return Dataset.range(10 * number, 10 * number + 10)


def splits_of_plan() -> hr.Dataset:
    return Dataset.range(12).interleave(tens, cycle_length=3)


PLANS: dict[str, Callable[[], hr.Dataset]] = {
    "a shuffle of values": lambda: splits_of_plan().shuffle(1000, seed=3),
    "a batch": lambda: splits_of_plan().batch(7),
    "steps that read ahead": lambda: (
        splits_of_plan()
        .map(lambda x: x, num_parallel_calls=2)
        .shuffle(30, seed=3)
        .map(lambda x: x, num_parallel_calls=2)
        .batch(4)
        .prefetch(3)
    ),
    "a filter": lambda: splits_of_plan().filter(lambda x: x % 10 < 3).shuffle(1000, seed=3),
    "passes": lambda: Dataset.range(4).flat_map(tens).shuffle(1000, seed=3).repeat(3),
    "nothing that holds": lambda: Dataset.range(12).map(lambda x: x),
}


def expected(name: str) -> Counter[int]:
    return Counter(int(x) for each in PLANS[name]().as_numpy_iterator() for x in each.ravel())


def assigned_iterator(
    plan: hr.Dataset, grants: list[tuple[int, int] | PartialSplit | Pause], seen: list[int]
):
    """Return an iterator over assigned splits; record the elements yielded before each."""
    pending = iter(grants)
    got: list[int] = []

    def next_units() -> tuple[int, int] | PartialSplit | Pause | None:
        seen.append(len(got))
        return next(pending, None)

    assign: NextSplits = next_units
    iterator = build_iterator(plan.plan, seed=7, next_splits=assign, with_element_ids=True)
    assert isinstance(iterator, AssignedPlanIterator)
    return iterator, got


@pytest.mark.parametrize("name", PLANS)
def test_splits_before_a_pause_are_yielded_before_those_after_it(name: str) -> None:
    before: list[int] = []
    iterator, got = assigned_iterator(
        PLANS[name](), [(0, 5), (5, 7), Pause.PAUSE, (7, 8), Pause.PAUSE, (8, 12)], before
    )
    given = []
    while (chunk := iterator.next_chunk(4)) is not None:
        given.append(iterator.num_delivered)
        got += [int(x) for row in chunk.rows() for x in row.ravel()]
    iterator.close()

    all_of_it = expected(name)
    assert Counter(got) == all_of_it
    assert sorted(set(given) - {0}) == [7, 8], "splits_of_plan that were whole after each pause"
    of_a_unit = len(got) // 12
    # Asked for splits_of_plan: at first, for more, in vain, and after the pause again.
    assert before[3] >= 7 * of_a_unit
    assert before[5] >= 8 * of_a_unit


def test_finished_splits_are_reported_at_a_pause_and_partial_splits_follow() -> None:
    before: list[int] = []
    plan = Dataset.range(12).flat_map(tens).filter(lambda x: x >= 20).shuffle(1000, seed=3)
    part = PartialSplit(split=4, wanted_ordinals=((8, None),))
    iterator, got = assigned_iterator(
        plan, [(0, 3), Pause.PAUSE, part, Pause.PAUSE, (5, 6)], before
    )
    ended: list[list[FinishedSplits]] = []
    while (chunk := iterator.next_chunk(100)) is not None:
        ended.append(list(iterator.take_finished()))
        got += [int(x) for x in chunk.rows()]
    iterator.close()
    assert sorted(got[:10]) == list(range(20, 30))
    assert sorted(got[10:12]) == [48, 49]
    assert sorted(got[12:]) == list(range(50, 60))
    assert sum(each.num_splits for each in ended[0]) == 3


def test_a_single_split_plan_holds_nothing_before_it_is_assigned() -> None:
    plan = Dataset.from_generator(lambda: [1, 2, 3])
    before: list[int] = []
    iterator, got = assigned_iterator(plan, [Pause.PAUSE, Pause.PAUSE, (0, 1)], before)
    while (chunk := iterator.next_chunk(100)) is not None:
        got += [int(x) for x in chunk.rows()]
    iterator.close()
    assert got == [1, 2, 3]
