"""Producer: batches of an iterator's elements, counting of splits, and errors."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.execution.build import build_iterator
from headrace.execution.iterator import ElementIterator
from headrace.plan.serialize import dump_plan
from headrace.rewrites.optimize import prepare
from headrace.rewrites.split_space import compute_split_space
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.producer import Producer, next_batch_limit
from headrace.service.worker.producer_channel import ProducerChannel
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.task_iterator import open_plan
from tests.service.reading import wait_until
from tests.service.worker.core_driver import definition
from tests.service.worker.scripted_iterator import SECONDS, ScriptedIterator


class CollectingSink:
    """Sink that collects all batches."""

    def __init__(self) -> None:
        self.batches: list[ResultBatch] = []
        self.failure: str | None = None
        self.ended = threading.Event()
        self.refused: BaseException | None = None
        self.delivers_at_once = False
        self.max_elements: int | None = None

    def wait_for_room(self) -> bool:
        return True

    def put(self, batch: ResultBatch) -> None:
        if self.refused is not None:
            raise self.refused
        self.batches.append(batch)

    def end(self, failure: str | None) -> None:
        self.failure = failure
        self.ended.set()

    def elements(self) -> list[list[int]]:
        return [
            [int(row) for row in wire.decode(p.buffers).rows()]
            for p in self.batches
            if p.num_elements
        ]

    def errors(self) -> list[Exception]:
        return [batch.error for batch in self.batches if batch.error is not None]


def produce(
    open_plan: Callable[[], ElementIterator],
    sink: CollectingSink | None = None,
    *,
    counts_splits: bool = False,
    max_batch_bytes: int | None = None,
) -> CollectingSink:
    sink = sink or CollectingSink()
    producer = Producer(
        "task-1",
        lambda _: open_plan(),
        sink,
        counts_splits=counts_splits,
        max_batch_bytes=max_batch_bytes,
    )
    producer.start()
    assert sink.ended.wait(SECONDS)
    producer.join(SECONDS)
    return sink


@pytest.mark.parametrize(
    ("limit", "count", "size", "seconds", "expected"),
    [
        (1, 1, 8, 0.0, 2),
        (64, 64, 512, 0.015, 128),
        (64, 64, 512, 0.03, 64),
        (64, 64, 512, 0.1, 32),
        (1, 1, 8, 1.0, 1),
        (64, 10, 80, 0.0, 64),
        (1 << 16, 1 << 16, 1 << 16, 0.0, 1 << 16),
        (4, 4, 32 << 20, 0.0, 1),
        (1, 1, 1 << 20, 0.0, 2),
        (8, 8, 8 << 20, 0.0, 8),
    ],
)
def test_batch_limits_grow_while_batches_are_fast_and_small(
    limit: int, count: int, size: int, seconds: float, expected: int
) -> None:
    assert next_batch_limit(limit, count, size, seconds) == expected


def test_the_first_batch_has_one_element_and_sizes_at_most_double() -> None:
    found = produce(lambda: ScriptedIterator([list(range(100))])).elements()
    sizes = [len(values) for values in found]
    assert sizes[0] == 1
    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
    assert [value for values in found for value in values] == list(range(100))


class ClockedIterator(ScriptedIterator):
    """Iterator and clock: each element takes four milliseconds."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = super().next_chunk(limit)
        self.now += 0.0 if chunk is None else 0.004 * chunk.size
        return chunk


def test_a_batch_of_slow_elements_takes_at_most_40_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elements = ClockedIterator([list(range(40))])
    monkeypatch.setattr("headrace.service.worker.producer.time", elements)
    found = produce(lambda: elements).elements()
    assert [len(values) for values in found] == [1, 2, 4, 8, 8, 8, 8, 1]


def test_splits_are_counted_from_the_state_after_each_batch() -> None:
    batches = produce(lambda: ScriptedIterator([list(range(20))]), counts_splits=True).batches
    assert [(p.done_from, p.done_to) for p in batches] == [
        (p.first_element, p.first_element + p.num_elements) for p in batches
    ]
    assert all(batch.delivered_end == batch.done_to for batch in batches)


def reading_splits(dataset: hr.Dataset, *ranges: tuple[int, int]) -> Callable[[], ElementIterator]:
    waiting = iter(ranges)
    return lambda: build_iterator(dataset.plan, seed=7, next_splits=lambda: next(waiting, None))


def test_batches_have_at_most_the_requested_elements() -> None:
    sink = CollectingSink()
    sink.max_elements = 3
    produce(lambda: ScriptedIterator([list(range(20))]), sink)
    assert [len(each) for each in sink.elements()] == [1, 2, 3, 3, 3, 3, 3, 2]


def test_batches_have_at_most_the_allowed_bytes() -> None:
    sink = produce(lambda: ScriptedIterator([list(range(4000))]), max_batch_bytes=400)
    sizes = [each.size for each in sink.batches if each.num_elements > 1]
    assert max(sizes) <= 800
    assert max(each.num_elements for each in sink.batches) > 20


def test_a_single_split_starts_with_its_first_element_and_completes_at_the_end() -> None:
    evens = hr.Dataset.range(20).filter(lambda x: bool(x % 2 == 0))
    pairs = hr.Dataset.zip(evens, evens).map(lambda a, b: a)
    batches = produce(reading_splits(pairs, (0, 1)), counts_splits=True).batches
    assert all(batch.delivered_end == 1 and not batch.num_splits for batch in batches)


PLANS_WITH_SEVERAL_OPEN_SPLITS = [
    lambda: hr.Dataset.range(30).interleave(
        lambda x: hr.Dataset.range(20).map(lambda _: x), cycle_length=4
    ),
    lambda: hr.Dataset.range(300).filter(lambda x: bool(x % 2)).shuffle(20, seed=3),
    lambda: hr.Dataset.range(300).map(lambda x: x, num_parallel_calls=2, deterministic=False),
    lambda: hr.Dataset.range(300).map(lambda x: x, num_parallel_calls=2).prefetch(4),
    lambda: hr.Dataset.range(30).flat_map(lambda x: hr.Dataset.range(20).map(lambda _: x)),
    lambda: hr.Dataset.range(300).map(lambda x: x).batch(4).unbatch(),
    lambda: hr.Dataset.range(300).map(lambda x: x).repeat(2).concatenate(hr.Dataset.range(9)),
]


@pytest.mark.parametrize("plan", PLANS_WITH_SEVERAL_OPEN_SPLITS)
def test_no_element_precedes_the_batch_that_reports_its_split_as_started(
    plan: Callable[[], hr.Dataset],
) -> None:
    """An element is the number of its split, or its position if splits have four elements."""
    count = compute_split_space(prepare(plan().plan).plan).size
    size = 4 if count == 75 else 1
    ranges = [(count // 2, count), (3, count // 2), (0, 3)]
    order = [split for start, stop in ranges for split in range(start, stop)]
    if count == 609:  # two epochs of 300 splits, then nine splits of the concatenated range
        order = [split % 300 if split < 600 else split - 600 for split in order]
    batches = produce(reading_splits(plan(), *ranges), counts_splits=True).batches
    delivered_end = 0
    for batch in batches:
        splits = [int(row) // size for row in wire.decode(batch.buffers).rows()]
        assert batch.done_to <= batch.delivered_end
        assert delivered_end <= batch.delivered_end
        delivered_end = batch.delivered_end
        assert {*splits} <= {*order[batch.done_from : delivered_end]}


def test_a_read_ahead_step_does_not_start_unyielded_splits() -> None:
    plan = hr.Dataset.range(500).map(lambda x: x, num_parallel_calls=2).prefetch(8)
    batches = produce(reading_splits(plan, (0, 500)), counts_splits=True).batches
    assert [batch.delivered_end for batch in batches] == [batch.done_to for batch in batches]


def test_a_batch_after_a_failed_element_starts_another_split() -> None:
    def picky(x: int) -> int:
        if x == 1:
            raise ValueError("one")
        return x

    plan = hr.Dataset.range(12).map(picky).batch(4)
    batches = produce(reading_splits(plan, (0, 3)), counts_splits=True).batches
    for batch in batches:
        if batch.num_elements:
            last = int(np.max(wire.decode(batch.buffers).rows()[-1]))
            assert batch.delivered_end >= last // 4 + 1


def test_a_failed_element_starts_its_split() -> None:
    def picky(x: int) -> int:
        if x == 0:
            raise ValueError("none")
        return x

    plan = hr.Dataset.range(4).filter(lambda x: bool(picky(int(x)) >= 0))
    failed = produce(reading_splits(plan, (0, 4)), counts_splits=True).batches[0]
    assert failed.error is not None
    assert failed.delivered_end >= 1


def test_a_failed_split_is_complete_with_its_error() -> None:
    def picky(x: Any) -> Any:
        if x == 2:
            raise ValueError("no 2")
        return x

    batches = produce(
        reading_splits(hr.Dataset.range(4).map(picky), (0, 4)), counts_splits=True
    ).batches
    (failed,) = (batch for batch in batches if batch.error is not None)
    assert (failed.done_from, failed.done_to, failed.delivered_end) == (2, 3, 3)
    assert [(p.done_from, p.done_to) for p in batches if p.num_elements][-1] == (3, 4)


def test_elements_are_put_at_once_if_requested() -> None:
    sink = CollectingSink()
    sink.delivers_at_once = True
    iterator = ScriptedIterator([[number] for number in range(20)])
    Producer("task-1", lambda _: iterator, sink).start()
    assert sink.ended.wait(SECONDS)
    assert [batch.num_elements for batch in sink.batches] == [1] * 20


def test_a_failed_element_is_a_separate_error_and_reading_continues() -> None:
    sink = produce(lambda: ScriptedIterator([[0], hr.errors.DataLossError("corrupt"), [1]]))
    assert sink.elements() == [[0], [1]]
    assert [str(error) for error in sink.errors()] == ["corrupt"]
    assert sink.failure is None


def test_an_escaped_error_that_is_no_exception_fails_the_task() -> None:
    iterator = ScriptedIterator([[0], SystemExit(3), [1]])
    sink = produce(lambda: iterator)
    (error,) = sink.errors()
    assert isinstance(error, hr.errors.UserFunctionError)
    assert sink.elements() == [[0]]
    assert sink.failure == "SystemExit: 3"
    assert iterator.closed


def test_a_function_raising_out_of_range_does_not_end_the_task() -> None:
    sink = produce(lambda: ScriptedIterator([[0], hr.errors.OutOfRangeError("none"), [1]]))
    (error,) = sink.errors()
    assert isinstance(error, hr.errors.UserFunctionError)
    assert sink.elements() == [[0], [1]]
    assert sink.failure is None


@pytest.mark.parametrize("error", [ImportError("no such module"), SystemExit(1)])
def test_a_plan_that_cannot_be_opened_fails_the_task(error: BaseException) -> None:
    def open_plan() -> ElementIterator:
        raise error

    sink = produce(open_plan)
    assert len(sink.errors()) == 1
    assert sink.failure is not None
    assert "cannot be opened" in sink.failure


FAILING_PLANS: list[Callable[[Callable[[int], int]], hr.Dataset]] = [
    lambda fn: hr.Dataset.range(20).map(fn),
    lambda fn: hr.Dataset.range(20).map(fn, num_parallel_calls=2),
    lambda fn: hr.Dataset.range(20).filter(lambda x: fn(x) >= 0).prefetch(2),
    lambda fn: hr.Dataset.range(20).flat_map(lambda x: hr.Dataset.from_tensors(x).map(fn)),
    lambda fn: hr.Dataset.range(20).interleave(
        lambda x: hr.Dataset.from_tensors(fn(x)), cycle_length=2, num_parallel_calls=2
    ),
]


@pytest.mark.parametrize("plan", FAILING_PLANS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_a_function_that_interrupts_or_exits_fails_only_its_element(
    kind: type[BaseException], plan: Callable[[Callable[[int], int]], hr.Dataset]
) -> None:
    def picky(x: int) -> int:
        if x == 7:
            raise kind
        return int(x)

    dataset, splits = plan(picky), iter([(0, 20)])
    sink = produce(
        lambda: build_iterator(
            dataset.plan, seed=7, next_splits=lambda: next(splits, None), contain_exits=True
        ),
        counts_splits=True,
    )
    (error,) = sink.errors()
    assert isinstance(error, hr.errors.UserFunctionError)
    assert error.original_type == kind.__name__
    values = sorted(value for values in sink.elements() for value in values)
    assert values == [value for value in range(20) if value != 7]
    assert sink.failure is None


class OneTimeGranter:
    """Grants splits once, then none until the test grants more; counts received elements."""

    def __init__(self, splits: tuple[int, int]) -> None:
        self.channel = ProducerChannel(1, self)
        self._units: tuple[int, int] | None = splits
        self.elements: list[int] = []
        self.delivered_end = 0
        self.ended_with: list[str | None] = []

    def batch_produced(self, producer: int, batch: ResultBatch) -> None:
        assert batch.error is None
        assert batch.done_to <= batch.delivered_end
        self.delivered_end = max(self.delivered_end, batch.delivered_end)
        self.elements += [int(np.max(row)) for row in wire.decode(batch.buffers).rows()]
        self.channel.resume()

    def splits_needed(self, producer: int) -> None:
        if self._units is not None:
            splits, self._units = self._units, None
            self.channel.grant(SplitGrant(producer=1, splits=splits))

    def producer_ended(self, producer: int, failure: str | None) -> None:
        self.ended_with.append(failure)


def tens(number: int) -> hr.Dataset:
    return hr.Dataset.range(10 * number, 10 * number + 10)


@pytest.mark.parametrize(
    ("plan", "splits", "ready"),
    [
        (lambda data: data.map(lambda x: x), 3, 3),
        (lambda data: data.map(lambda x: x, num_parallel_calls=2), 3, 3),
        (lambda data: data.map(lambda x: x).prefetch(8), 3, 3),
        (lambda data: data.flat_map(tens), 3, 30),
        (lambda data: data.flat_map(tens).prefetch(2), 2, 20),
        (lambda data: data.interleave(tens, cycle_length=1), 3, 30),
        (lambda data: data.filter(lambda x: bool(x % 2)), 8, 4),
    ],
)
@pytest.mark.parametrize("with_ids", [False, True])
def test_ready_elements_do_not_wait_for_more_splits(
    plan: Callable[[hr.Dataset], hr.Dataset], splits: int, ready: int, with_ids: bool
) -> None:
    dataset = plan(hr.Dataset.range(100))
    task = definition(assigns_splits=True, with_ids=with_ids)
    sink = OneTimeGranter((0, splits))
    producer = Producer(
        "task-1",
        lambda flush: open_plan(
            dump_plan(dataset.plan), task, partial(sink.channel.next_splits, flush), worker="w:1"
        ),
        sink.channel,
        counts_splits=True,
        reports_element_ids=with_ids,
    )
    producer.start()
    try:
        wait_until(lambda: len(sink.elements) >= ready)
        assert len(sink.elements) == len({*sink.elements}) == ready
        assert sink.delivered_end == splits
        sink.channel.grant(SplitGrant(producer=1))
        wait_until(lambda: sink.ended_with == [None])
        assert len(sink.elements) == ready
    finally:
        sink.channel.close()
        producer.join(SECONDS)


def test_a_task_that_repeats_the_same_error_ends() -> None:
    class Broken(ScriptedIterator):
        def next_chunk(self, limit: int) -> Chunk | None:
            raise OSError("disk is full")

    sink = produce(lambda: Broken([]))
    assert len(sink.errors()) == 100
    assert sink.failure == "the same error 100 times in a row: OSError: disk is full"


def test_unsendable_elements_are_errors_and_reading_continues() -> None:
    class Unsendable(ScriptedIterator):
        def next_chunk(self, limit: int) -> Chunk | None:
            chunk = super().next_chunk(1)
            if chunk is not None and chunk.rows() == [1]:
                return Chunk.of_rows([object()], chunk.states)
            return chunk

    sink = produce(lambda: Unsendable([[0, 1, 2]]), counts_splits=True)
    assert len(sink.errors()) == 1
    assert [value for values in sink.elements() for value in values] == [0, 2]
    assert sum(batch.num_splits for batch in sink.batches) == 3


def test_an_error_on_closing_the_iterator_does_not_hide_the_end() -> None:
    class Stuck(ScriptedIterator):
        def close(self) -> None:
            raise SystemExit("close failed")

    sink = produce(lambda: Stuck([[0]]))
    assert sink.elements() == [[0]]
    assert sink.failure is not None


def test_a_sink_that_rejects_batches_still_receives_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = CollectingSink()
    sink.refused = MemoryError("full")
    produce(lambda: ScriptedIterator([[0]]), sink)
    assert sink.failure == "MemoryError: full"
    assert "task-1 failed: MemoryError: full" in caplog.text


def test_the_plan_is_released_once_it_is_opened() -> None:
    class Plan:
        pass

    plan: Any = Plan()
    reference = weakref.ref(plan)
    opened, released = threading.Event(), threading.Event()

    class Waiting(ScriptedIterator):
        def next_chunk(self, limit: int) -> Chunk | None:
            opened.set()
            released.wait(SECONDS)
            return None

    sink = CollectingSink()
    producer = Producer("task-1", lambda _, plan=plan: plan and Waiting([]), sink)
    del plan
    producer.start()
    assert opened.wait(SECONDS)
    gc.collect()
    assert reference() is None
    released.set()
    producer.join(SECONDS)


@pytest.mark.parametrize(
    "step", [lambda ds: ds, lambda ds: ds.repeat(5), lambda ds: ds.prefetch(2)]
)
def test_large_elements_are_sent_without_a_copy(step: Any) -> None:
    array = np.arange(8 * 9000.0).reshape(8, 9000)
    dataset = step(hr.Dataset.from_tensor_slices(array))
    sink = produce(lambda: build_iterator(dataset.plan, seed=1, is_read_only=True))
    sent = [row for batch in sink.batches for row in wire.decode(batch.buffers).rows()]
    assert max(batch.num_elements for batch in sink.batches) > 1
    assert [row[0] for row in sent] == [row[0] for row in dataset]
    assert all(np.shares_memory(row, array) for row in sent)


def test_large_elements_from_several_chunks_are_not_concatenated() -> None:
    image = np.arange(9000.0)
    dataset = hr.Dataset.from_tensors(image).repeat(20)
    sink = produce(lambda: build_iterator(dataset.plan, seed=1, is_read_only=True))
    sent = [row for batch in sink.batches for row in wire.decode(batch.buffers).rows()]
    assert len(sent) == 20
    assert len(sink.batches) < 20
    assert all(np.shares_memory(row, image) for row in sent)


def test_the_plan_of_a_task_is_opened_read_only() -> None:
    dataset = hr.Dataset.from_tensors(np.arange(9000.0))
    iterator = open_plan(dump_plan(dataset.plan), definition(), None, worker="worker:1")
    chunk = iterator.next_chunk(1)
    assert chunk is not None
    (row,) = chunk.rows()
    assert not row.flags.writeable
