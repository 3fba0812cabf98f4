"""The threads of a parallel map notify the consumer for several results at once."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.execution.parallel_calls import PENDING, ParallelCalls
from headrace.execution.threads import ReadResult
from headrace.plan.user_function import UserFunction

from .contract import ListIterator


class CountingCondition:
    """Stub of a condition that counts its notifications."""

    def __init__(self) -> None:
        self.number = 0

    def notify_all(self) -> None:
        self.number += 1


@pytest.fixture
def work() -> ParallelCalls:
    """Parallel calls without threads: the test does their work."""
    made = ParallelCalls(ListIterator([]), UserFunction(abs, "map", False), 2, 0, is_ordered=True)
    made.ready = CountingCondition()
    made.window = 48  # so that a handful is 6
    return made


def put(work: ParallelCalls, count: int) -> None:
    rows = [np.int64(number) for number in range(work.num_read, work.num_read + count)]
    with work.reader_thread.lock:
        work._add_result(ReadResult(Chunk.of_rows(rows, lambda index: index), None, None))


def do(work: ParallelCalls, *numbers: int) -> None:
    for number in numbers:
        batch = next(b for b in work.batches if number < b.first + len(b.results))
        work._call_function(batch, number - batch.first, number - batch.first + 1)


def test_a_consumer_is_notified_when_results_of_several_batches_are_done(work):
    for _ in range(4):
        put(work, 2)
    work.await_results(6)
    before = work.ready.number
    do(work, 1, 2, 3, 4)
    do(work, 5)
    assert work.ready.number == before  # the first is missing
    do(work, 0)
    assert work.ready.number == before + 1
    assert [result is PENDING for batch in work.batches for result in batch.results] == (
        [False] * 6 + [True] * 2
    )


def test_a_consumer_waits_for_few_results_while_the_window_grows(work):
    put(work, 48)
    work.await_results(64)
    before = work.ready.number
    do(work, *range(6))
    assert work.ready.number == before + 1


def test_a_consumer_waits_for_at_most_half_of_a_stable_window(work):
    put(work, 48)
    work._is_growing = False
    work.await_results(64)
    before = work.ready.number
    do(work, *range(23))
    assert work.ready.number == before
    do(work, 23)
    assert work.ready.number == before + 1


def test_a_consumer_waits_for_at_most_the_elements_read(work):
    put(work, 3)
    work.await_results(64)
    do(work, 0, 1)
    assert work.ready.number == 1  # that of `put`: there was nothing
    do(work, 2)
    assert work.ready.number == 2


def test_a_consumer_waiting_for_any_result_is_notified_of_results_and_end(work):
    work.await_results(8)
    put(work, 1)
    assert work.ready.number == 1
    work.await_results(8)
    with work.reader_thread.lock:
        work._add_result(ReadResult(None, None, None))
    assert work.ready.number == 2
    assert work.has_ended


def test_reading_starts_with_space_for_several_elements_and_fills_it(work):
    assert work._free_space() == 48
    work.num_read = 47
    assert work._free_space() == 1
    work.num_read = 48
    assert work._free_space() == 0
    work.num_delivered = 5
    assert work._free_space() == 0
    work.num_delivered = 6
    assert work._free_space() == 6
    work.num_read = 51
    assert work._free_space() == 3
