"""A step over rows has states, raises errors in turn, and makes no extra calls."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.errors import UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.iterator import END
from headrace.execution.step_iterator import NO_ELEMENT, RowStepIterator
from headrace.plan.user_function import UserFunction

Dataset = hr.Dataset


class TakeWhileIterator(RowStepIterator):
    """Ends before the first element that fails the predicate."""

    def step(self, row):
        return row if self.call(row) else END


class ChangesIterator(RowStepIterator):
    """Yields doubled elements that satisfy the predicate."""

    def step(self, row):
        return row * 2 if self.call(row) else NO_ELEMENT


def over(kind, dataset, fn):
    return kind(
        build_iterator(dataset.plan, seed=1), UserFunction(fn, "step (local_workers.py:1)", False)
    )


def read(iterator, limit):
    """Return (state before, element, state after) of each element, and errors by position."""
    found = []
    while True:
        try:
            chunk = iterator.next_chunk(limit)
        except UserFunctionError as error:
            found.append(error.position)
            continue
        if chunk is None:
            return found
        assert 1 <= chunk.size <= limit
        assert chunk.state_at(chunk.size) == iterator.get_state()
        found += [(chunk.state_at(i), int(row)) for i, row in enumerate(chunk.rows())]


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_a_step_that_returned_end_stays_ended(limit):
    iterator = over(TakeWhileIterator, Dataset.range(300), lambda x: x < 70)
    assert [value for _, value in read(iterator, limit)] == list(range(70))
    assert iterator.next_chunk(limit) is None
    assert iterator.get_state() == 70
    iterator.set_state(68)
    assert read(iterator, limit) == [(68, 68), (69, 69)]
    iterator.close()


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_elements_are_dropped_and_errors_are_raised_in_their_turn(limit):
    calls = []

    def third(x):
        calls.append(int(x))
        if x in (4, 7):
            raise ValueError("no")
        return x % 3 == 0

    iterator = over(ChangesIterator, Dataset.range(12), third)
    assert read(iterator, limit) == [(0, 0), (3, 6), 4, (6, 12), 7, (9, 18)]
    assert calls == list(range(12))
    for position, rest in ((1, 5), (4, 4), (5, 3), (8, 1), (10, 0)):
        iterator.set_state(position)
        assert iterator.get_state() == position
        assert len(read(iterator, limit)) == rest


def test_the_function_is_called_only_until_the_request_is_filled():
    calls = []
    iterator = over(
        ChangesIterator, Dataset.range(500), lambda x: calls.append(int(x)) or x % 5 == 4
    )
    assert [int(x) for x in iterator.next_chunk(1).rows()] == [8]
    assert calls == list(range(5))
    assert not iterator.can_read_ahead
