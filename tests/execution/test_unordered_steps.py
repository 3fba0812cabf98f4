"""Unordered steps: which steps are unordered, and their states, do not depend on threads."""

from __future__ import annotations

import itertools
import threading

import pytest

import headrace as hr
from headrace.execution.build import build_iterator

from .contract import copied

Dataset = hr.Dataset
THREADS = (None, 1, 2)
FREE = hr.Options(deterministic=False, seed=1)


def opaque(x):
    # No proof says what this does to columns.
    try:
        return x + 0
    finally:
        pass


def is_even(x):
    try:
        return bool(x % 2 == 0)
    finally:
        pass


def two_maps(threads, last=opaque):
    first, second = threads
    return (
        Dataset.range(40)
        .map(opaque, num_parallel_calls=first)
        .filter(is_even)
        .map(last, num_parallel_calls=second)
        .with_options(FREE)
    )


@pytest.mark.parametrize("saved", list(itertools.product(THREADS, repeat=2)), ids=str)
def test_no_element_is_lost_or_repeated_with_another_thread_count(saved):
    is_over = threading.Event()

    def late(x):
        if x == 0 and saved[1] == 2:
            is_over.wait(30)  # the others come before it
        return opaque(x)

    iterator = iter(two_maps(saved, late))
    seen = [int(next(iterator)) for _ in range(5)]
    state = copied(iterator.get_state())
    is_over.set()
    iterator.close()
    assert (0 in seen) == (saved[1] != 2)
    for restored in itertools.product(THREADS, repeat=2):
        other = iter(two_maps(restored, late))
        other.set_state(state)
        assert other.get_state() == state
        rest = [int(x) for x in other]
        assert sorted(seen + rest) == list(range(0, 40, 2)), (saved, restored, state)


@pytest.mark.parametrize("fn", [opaque, lambda x: x + 0], ids=["a call each", "columns"])
@pytest.mark.parametrize("threads", THREADS)
def test_an_unordered_map_continues_after_elements_yielded_early(fn, threads):
    dataset = Dataset.range(9).map(fn, num_parallel_calls=threads, deterministic=False)
    position = {"delivered": [[0, 1], [2, 4], [6, 8]], "input": 1}
    iterator = build_iterator(dataset.plan)
    iterator.set_state(position)
    assert iterator.get_state() == position
    rest = []
    while (chunk := iterator.next_chunk(2)) is not None:
        middle = copied(chunk.state_at(1))
        fresh = build_iterator(dataset.plan)
        fresh.set_state(middle)
        later = []
        while (more := fresh.next_chunk(50)) is not None:
            later += [int(x) for x in more.rows()]
        fresh.close()
        rest += [int(x) for x in chunk.rows()]
        assert sorted(rest[: len(rest) - chunk.size + 1] + later) == [2, 5, 6]
    assert sorted(rest) == [2, 5, 6]
    iterator.close()


def test_errors_among_elements_yielded_early_count():
    def fails_at_even(x):
        if x % 2 == 0:
            raise ValueError
        return x

    dataset = Dataset.range(8).map(fails_at_even, deterministic=False)
    iterator = build_iterator(dataset.plan)
    iterator.set_state({"delivered": [[1, 2], [4, 5]], "input": 0})
    outcomes = []
    while True:
        try:
            chunk = iterator.next_chunk(1)
        except hr.errors.UserFunctionError:
            outcomes.append("error")
            continue
        if chunk is None:
            break
        outcomes += [int(x) for x in chunk.rows()]
    assert outcomes == ["error", "error", 3, 5, "error", 7]


def nested(x):
    return Dataset.range(3).map(lambda y: y + 10 * x)


@pytest.mark.parametrize("saved", THREADS)
@pytest.mark.parametrize("restored", THREADS)
def test_an_unordered_interleave_continues_with_another_thread_count(saved, restored):
    def dataset(threads):
        return (
            Dataset.range(6)
            .map(opaque, num_parallel_calls=threads)
            .interleave(nested, 2, num_parallel_calls=threads)
            .with_options(FREE)
        )

    wanted = sorted(int(x) for x in dataset(None))
    for taken in range(0, 18, 4):
        iterator = iter(dataset(saved))
        seen = [int(next(iterator)) for _ in range(taken)]
        state = copied(iterator.get_state())
        iterator.close()
        other = iter(dataset(restored))
        other.set_state(state)
        assert sorted(seen + [int(x) for x in other]) == wanted
