"""Batches that an error interrupts: it is raised once, whichever state is restored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.execution.build import start
from headrace.execution.context import Context
from headrace.execution.iterator import make_iterator
from headrace.plan.batching import Batch

from .contract import ListIterator, assert_keeps_contract, copied, with_input

Dataset = hr.Dataset
CONTEXT = Context(seed=11, build=lambda plan, context: None)


def fails_in_fours(x):
    if x % 4 in (1, 2):
        raise ValueError(int(x))
    return x


def outcomes(iterator, limit=1):
    """Return lists of numbers, and the names of errors where they were raised."""
    found = []
    while True:
        try:
            chunk = iterator.next_chunk(limit)
        except Exception as error:
            found.append(type(error).__name__)
            continue
        if chunk is None:
            return found
        found += [np.asarray(row).tolist() for row in chunk.rows()]


def test_an_error_within_a_batch_is_not_raised_again_after_a_restore():
    plan = Dataset.range(9).map(fails_in_fours).batch(3).plan
    whole = start(plan, seed=1)
    failed = "UserFunctionError"
    for _ in range(2):
        with pytest.raises(hr.errors.UserFunctionError):
            whole.next_chunk(1)
    state = copied(whole.get_state())
    assert state == {"failed": [[1, 3]], "input": 0}
    again = start(plan, seed=1)
    again.set_state(state)
    assert again.get_state() == state
    assert outcomes(again) == outcomes(whole) == [[0, 3, 4], failed, failed, [7, 8]]
    assert again.get_state() == whole.get_state() == {"failed": [], "input": 9}


def test_small_batches_of_rows_at_hand_come_together():
    plan = Dataset.range(40).map(lambda x: np.full(2, int(x))).batch(3).plan
    iterator, one_by_one = start(plan, seed=1), start(plan, seed=1)
    sizes, at = [], 0
    while (chunk := iterator.next_chunk(5)) is not None:
        sizes.append(chunk.size)
        for index, row in enumerate(chunk.rows()):
            assert copied(chunk.state_at(index)) == copied(one_by_one.get_state())
            (alone,) = one_by_one.next_chunk(1).rows()
            assert row.tolist() == alone.tolist()
            assert index == 0 or not np.shares_memory(row, chunk.rows()[0])
            at += 1
        assert copied(chunk.state_at(chunk.size)) == copied(one_by_one.get_state())
    assert at == 14
    assert max(sizes) == 5


def test_large_batches_of_rows_come_one_by_one():
    plan = Dataset.range(40).map(lambda x: np.zeros(1 << 15)).batch(2).plan
    assert start(plan, seed=1).next_chunk(5).size == 1


def test_a_batch_that_cannot_be_stacked_is_raised_after_those_before_it():
    plan = Dataset.range(12).map(lambda x: np.zeros(1 + (x == 7))).batch(2).plan
    found = outcomes(start(plan, seed=1), limit=6)
    assert found == outcomes(start(plan, seed=1)) == [
        *[[[0.0], [0.0]]] * 3, "InvalidElementError", *[[[0.0], [0.0]]] * 2,
    ]  # fmt: skip


def test_a_batch_that_does_not_fit_into_memory_is_passed_over_as_others_that_fail():
    # Two rows of nothing, which are padded to 140 TB.
    shapes = {6: (0, 1 << 23), 7: (1 << 23, 0)}
    plan = Dataset.range(12).map(lambda x: np.zeros(shapes.get(int(x), (1, 1)), np.int8))
    iterator = start(plan.padded_batch(2).plan, seed=1)
    found = [len(iterator.next_chunk(6))]
    with pytest.raises(MemoryError):
        iterator.next_chunk(6)
    while (chunk := iterator.next_chunk(6)) is not None:
        found.append(len(chunk))
    assert found == [3, 2]


def test_an_error_between_batches_is_part_of_neither():
    plan = Dataset.range(4).map(fails_in_fours).batch(1).plan
    iterator = start(plan, seed=1)
    iterator.next_chunk(5)
    with pytest.raises(hr.errors.UserFunctionError):
        iterator.next_chunk(5)
    assert iterator.get_state() == {"failed": [], "input": 2}


def test_an_error_of_the_last_element_is_before_the_place_after_the_batch():
    plan = Dataset.range(2).map(fails_in_fours).batch(3).plan
    iterator = start(plan, seed=1)
    with pytest.raises(hr.errors.UserFunctionError):
        iterator.next_chunk(1)
    chunk = iterator.next_chunk(1)
    assert chunk.state_at(0) == {"failed": [[1, 2]], "input": 0}
    assert chunk.state_at(1) == iterator.get_state() == {"failed": [], "input": 2}


def test_an_element_that_fails_no_more_is_in_its_batch_and_what_fails_newly_is_raised():
    ill = {1}

    def fails(x):
        if int(x) in ill:
            raise ValueError(int(x))
        return x

    plan = Dataset.range(6).map(fails).batch(3).plan
    iterator = start(plan, seed=1)
    with pytest.raises(hr.errors.UserFunctionError):
        iterator.next_chunk(1)
    state = iterator.get_state()
    ill.clear()
    ill.add(4)
    iterator.set_state(state)
    assert outcomes(iterator) == [[0, 1, 2], "UserFunctionError", [3, 5]]


@pytest.mark.parametrize("limit", [1, 7])
def test_rows_of_batches_go_on_from_any_state_past_errors(limit):
    for seed in range(30):
        plan = Dataset.range(30).map(fails_in_fours).batch(3).unbatch().plan
        assert_keeps_contract(
            lambda plan=plan: start(plan, seed=7), seed, restores=6, largest=limit
        )


ENTRY = st.integers(0, 9).map(np.int64) | st.builds(KeyError)


@given(
    entries=st.lists(ENTRY, max_size=30),
    size=st.integers(1, 5),
    drop=st.booleans(),
    free=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_batches_of_any_outcomes_keep_the_contract(entries, size, drop, free, seed):
    def make():
        node = Batch(input=Dataset.range(1).plan, size=size, drop_remainder=drop)
        input_ = ListIterator(entries, reads_ahead_freely=free)
        return make_iterator(node, with_input(node, input_, CONTEXT))

    found = assert_keeps_contract(make, seed)
    good = [entry for entry in entries if not isinstance(entry, KeyError)]
    assert found.count("KeyError") == len(entries) - len(good)
    assert len(found) - found.count("KeyError") == (
        len(good) // size if drop else -(-len(good) // size)
    )
