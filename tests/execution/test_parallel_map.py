"""Parallel map: ordered or unordered, in bounded memory, without deadlocks."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.execution.build import build_iterator
from headrace.execution.context import Context
from headrace.execution.parallel_map import ParallelMapIterator
from headrace.execution.step_iterator import mask_to_runs, runs_to_mask
from headrace.plan.elementwise import Map

from .contract import ListIterator, assert_keeps_contract, copied, plain, with_input
from .test_prefetch import Gate, take_all, until

Dataset = hr.Dataset
CONTEXT = Context(seed=11, build=lambda plan, context: None)


def parallel(input_, fn, threads: int = 3, *, ordered: bool = True) -> ParallelMapIterator:
    node = Map(
        input=Dataset.range(1).plan, fn=fn, num_parallel_calls=threads, deterministic=ordered
    )
    free = frozenset() if ordered else frozenset([id(node)])
    context = dataclasses.replace(CONTEXT, unordered_steps=free)
    return ParallelMapIterator(node, with_input(node, input_, context))


def fails_at(numbers):
    def fn(x):
        if x in numbers:
            raise KeyError(int(x))
        return x * 2

    return fn


@given(st.sets(st.integers(0, 300)))
def test_runs_and_masks_are_equivalent(numbers):
    mask = sum(1 << number for number in numbers)
    runs = mask_to_runs(mask)
    assert runs_to_mask(runs) == mask
    assert [n for start, stop in runs for n in range(start, stop)] == sorted(numbers)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))


@settings(max_examples=40)
@given(
    count=st.integers(0, 40),
    failing=st.sets(st.integers(0, 39)),
    raising=st.sets(st.integers(0, 39)),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_an_ordered_parallel_map_equals_a_serial_map(count, failing, raising, threads, seed):
    entries = [ValueError() if n in failing else np.int64(n) for n in range(count)]

    def make():
        return parallel(ListIterator(entries), fails_at(raising), threads)

    outcomes = assert_keeps_contract(make, seed, restores=4)
    assert outcomes == [
        "ValueError"
        if n in failing
        else "UserFunctionError"
        if n in raising
        else plain(np.int64(n * 2))
        for n in range(count)
    ]


def test_states_of_serial_and_parallel_maps_are_interchangeable():
    def fn(x):
        return x + 1 if x % 2 else x

    serial = Dataset.range(50).map(fn)
    parallel_one = Dataset.range(50).map(fn, num_parallel_calls=3)
    for one, other in ((serial, parallel_one), (parallel_one, serial)):
        first, second = build_iterator(one.plan, seed=1), build_iterator(other.plan, seed=1)
        taken = 0
        while taken < 20:
            taken += first.next_chunk(20 - taken).size
        state = copied(first.get_state())
        assert state == 20
        second.set_state(state)
        assert second.get_state() == state
        assert second.next_chunk(1).rows() == [20]
        first.close()
        second.close()


@settings(max_examples=40)
@given(
    count=st.integers(0, 40),
    failing=st.sets(st.integers(0, 39)),
    raising=st.sets(st.integers(0, 39)),
    seed=st.integers(0, 2**32),
)
def test_unordered_mode_neither_loses_nor_repeats_elements_from_any_state(
    count, failing, raising, seed
):
    chance = random.Random(seed)
    entries = [ValueError() if n in failing else np.int64(n) for n in range(count)]

    def slow(x):
        if x % 3 == 0:
            time.sleep(0.0003)
        return fails_at(raising)(x)

    want = sorted(
        "ValueError" if n in failing else "KeyError" if n in raising else str(2 * n)
        for n in range(count)
    )
    iterator = parallel(ListIterator(entries), slow, 4, ordered=False)
    seen: list[str] = []
    while True:
        try:
            chunk = iterator.next_chunk(chance.randint(1, 5))
        except Exception as error:
            seen.append(getattr(error, "original_type", type(error).__name__))
            state = iterator.get_state()
        else:
            if chunk is None:
                break
            kept = chance.randint(0, chunk.size)
            if chance.random() < 0.5:
                kept = chunk.size
            seen += [str(int(row)) for row in chunk.rows()[:kept]]
            state = chunk.state_at(kept)
            if kept == chunk.size and chance.random() < 0.5:
                state = iterator.get_state()
            elif kept < chunk.size:
                iterator.set_state(copied(state))
                assert iterator.get_state() == state
                continue
        if chance.random() < 0.3:
            if chance.random() < 0.5:
                iterator.close()
                iterator = parallel(ListIterator(entries), slow, 4, ordered=False)
            iterator.set_state(copied(state))
            assert iterator.get_state() == state
    iterator.close()
    assert sorted(seen) == want


def test_unordered_results_are_yielded_as_they_complete():
    gate = Gate()
    iterator = parallel(
        ListIterator([np.int64(n) for n in range(8)]),
        lambda x: gate(x) if x == 0 else x,
        2,
        ordered=False,
    )
    seen = [int(x) for _ in range(3) for x in iterator.next_chunk(1).rows()]
    assert 0 not in seen
    state = iterator.get_state()
    assert state["input"] == 0
    assert sum(stop - first for first, stop in state["delivered"]) == 3
    gate.is_open.set()
    while (chunk := iterator.next_chunk(9)) is not None:
        seen += [int(x) for x in chunk.rows()]
    assert sorted(seen) == list(range(8))
    iterator.close()


def test_fast_elements_do_not_wait_for_a_slow_one():
    gate = Gate()
    done = []

    def fn(x):
        if x == 0:
            gate(x)
        done.append(int(x))
        return x

    iterator = parallel(ListIterator([np.int64(n) for n in range(4)]), fn, 2)
    reader = threading.Thread(target=lambda: iterator.next_chunk(1))
    reader.start()
    until(lambda: len(done) == 3)  # all others are done while it is not
    gate.is_open.set()
    reader.join(10.0)
    assert not reader.is_alive()
    iterator.close()


def test_the_input_is_read_while_the_consumer_is_idle():
    asked = []

    def note(x):
        asked.append(int(x))
        return x

    plan = Dataset.range(100).map(note).map(lambda x: x if x >= 0 else -x, num_parallel_calls=2)
    iterator = build_iterator(plan.plan, seed=1)
    iterator.next_chunk(1)
    until(lambda: len(asked) >= 3)
    assert asked == list(range(len(asked)))
    iterator.close()


def test_buffered_bytes_are_bounded():
    made = []

    class Large(ListIterator):
        def next_chunk(self, limit):
            start, self.at = self.at, self.at + limit
            rows = [np.zeros(1 << 20, np.uint8) for _ in range(limit)]
            made.append(limit)
            return Chunk.of_rows(rows, lambda index: start + index)

    input_ = Large([])
    iterator = parallel(input_, lambda x: x + 1 if x.size else x, 8)
    taken = 0
    for _ in range(60):
        taken += iterator.next_chunk(4).size
        assert input_.at - taken <= 64 + 16
    iterator.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_base_exception_reaches_the_consumer(ordered):
    iterator = parallel(
        ListIterator([np.int64(n) for n in range(9)]),
        lambda x: sys.exit(5) if x == 3 else x,
        2,
        ordered=ordered,
    )
    seen: list[np.int64] = []
    with pytest.raises(SystemExit):
        take_all(iterator, seen)
    if ordered:
        assert seen == [0, 1, 2]
    iterator.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_base_exception_of_the_input_reaches_the_consumer(error):
    iterator = parallel(ListIterator([np.int64(0), error]), lambda x: x, 2)
    assert iterator.next_chunk(1).rows() == [0]
    with pytest.raises(type(error)):
        iterator.next_chunk(1)
    assert iterator.next_chunk(1) is None
    iterator.close()


HOLDING = {
    "shuffle": lambda ds: ds.filter(lambda x: x >= 0).shuffle(7, seed=1),
    "cache": lambda ds: ds.cache(),
    "unbatch": lambda ds: ds.batch(4).unbatch(),
    "zip": lambda ds: Dataset.zip(ds, Dataset.range(99)),
    "flat_map": lambda ds: ds.flat_map(lambda x: Dataset.range(int(x), int(x) + 2)),
    "a second one": lambda ds: ds.map(uneven, num_parallel_calls=2, deterministic=False),
    "batch": lambda ds: ds.batch(4),
    "filter": lambda ds: ds.filter(lambda x: x % 3 > 0),
}


def uneven(x):
    time.sleep(0.0005 if x % 4 == 0 else 0)
    return x + 1


@pytest.mark.parametrize("name", HOLDING)
def test_unordered_mode_below_any_step_neither_loses_nor_repeats_elements(name):
    dataset = HOLDING[name](
        Dataset.range(40).map(uneven, num_parallel_calls=3, deterministic=False)
    )
    found = []
    with iter(dataset) as iterator:
        for count in range(5):
            found += [element for _, element in zip(range(count + 3), iterator, strict=False)]
            state = copied(iterator.get_state())
            if count % 2:
                iterator.close()
            iterator.set_state(state)
        found += list(iterator)
    numbers = [int(np.ravel(x)[0] if not isinstance(x, tuple) else x[0]) for x in found]
    if name == "batch":
        numbers = [int(x) for batch in found for x in batch]
    ordered = HOLDING[name](Dataset.range(40).map(uneven))
    want = [int(x[0]) if isinstance(x, tuple) else x for x in ordered]
    if name == "batch":
        want = [x for batch in want for x in batch]
    assert sorted(numbers) == sorted(map(int, want))
