"""A producer cuts an iterator's elements into portions, and always says when it ends."""

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
from tests.service.worker.driving import definition
from tests.service.worker.listed import SECONDS, Listed


class Collected:
    """Takes all portions."""

    def __init__(self) -> None:
        self.portions: list[ResultBatch] = []
        self.failure: str | None = None
        self.ended = threading.Event()
        self.refused: BaseException | None = None
        self.delivers_at_once = False
        self.max_elements: int | None = None

    def wait_for_room(self) -> bool:
        return True

    def put(self, portion: ResultBatch) -> None:
        if self.refused is not None:
            raise self.refused
        self.portions.append(portion)

    def end(self, failure: str | None) -> None:
        self.failure = failure
        self.ended.set()

    def elements(self) -> list[list[int]]:
        return [
            [int(row) for row in wire.decode(p.buffers).rows()]
            for p in self.portions
            if p.num_elements
        ]

    def errors(self) -> list[Exception]:
        return [portion.error for portion in self.portions if portion.error is not None]


def produce(
    open_plan: Callable[[], ElementIterator],
    outlet: Collected | None = None,
    *,
    counts_units: bool = False,
    portion_bytes: int | None = None,
) -> Collected:
    outlet = outlet or Collected()
    producer = Producer(
        "task-1",
        lambda _: open_plan(),
        outlet,
        counts_splits=counts_units,
        max_batch_bytes=portion_bytes,
    )
    producer.start()
    assert outlet.ended.wait(SECONDS)
    producer.join(SECONDS)
    return outlet


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
def test_portions_grow_while_they_are_made_soon_and_are_small(
    limit: int, count: int, size: int, seconds: float, expected: int
) -> None:
    assert next_batch_limit(limit, count, size, seconds) == expected


def test_the_first_portion_holds_one_element_and_none_twice_as_many_as_the_last() -> None:
    found = produce(lambda: Listed([list(range(100))])).elements()
    sizes = [len(values) for values in found]
    assert sizes[0] == 1
    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
    assert [value for values in found for value in values] == list(range(100))


class Ticking(Listed):
    """Each element takes four milliseconds of a clock of its own."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = super().next_chunk(limit)
        self.now += 0.0 if chunk is None else 0.004 * chunk.size
        return chunk


def test_a_portion_of_slow_elements_lasts_up_to_40_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elements = Ticking([list(range(40))])
    monkeypatch.setattr("headrace.service.worker.producer.time", elements)
    found = produce(lambda: elements).elements()
    assert [len(values) for values in found] == [1, 2, 4, 8, 8, 8, 8, 1]


def test_units_are_counted_from_the_state_after_each_portion() -> None:
    portions = produce(lambda: Listed([list(range(20))]), counts_units=True).portions
    assert [(p.done_from, p.done_to) for p in portions] == [
        (p.first_element, p.first_element + p.num_elements) for p in portions
    ]
    assert all(portion.delivered_end == portion.done_to for portion in portions)


def dealt(dataset: hr.Dataset, *ranges: tuple[int, int]) -> Callable[[], ElementIterator]:
    waiting = iter(ranges)
    return lambda: build_iterator(dataset.plan, seed=7, next_splits=lambda: next(waiting, None))


def test_portions_have_no_more_elements_than_are_wanted() -> None:
    outlet = Collected()
    outlet.max_elements = 3
    produce(lambda: Listed([list(range(20))]), outlet)
    assert [len(each) for each in outlet.elements()] == [1, 2, 3, 3, 3, 3, 3, 2]


def test_portions_have_no_more_bytes_than_they_may() -> None:
    outlet = produce(lambda: Listed([list(range(4000))]), portion_bytes=400)
    sizes = [each.size for each in outlet.portions if each.num_elements > 1]
    assert max(sizes) <= 800
    assert max(each.num_elements for each in outlet.portions) > 20


def test_a_plan_of_one_unit_is_touched_by_its_first_element_and_whole_at_its_end() -> None:
    evens = hr.Dataset.range(20).filter(lambda x: bool(x % 2 == 0))
    pairs = hr.Dataset.zip(evens, evens).map(lambda a, b: a)
    portions = produce(dealt(pairs, (0, 1)), counts_units=True).portions
    assert all(portion.delivered_end == 1 and not portion.num_splits for portion in portions)


SEVERAL_OPEN = [
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


@pytest.mark.parametrize("plan", SEVERAL_OPEN)
def test_nothing_of_a_unit_comes_before_a_portion_that_says_so(
    plan: Callable[[], hr.Dataset],
) -> None:
    """An element is the number of its unit, or of its position where four are a unit."""
    count = compute_split_space(prepare(plan().plan).plan).size
    size = 4 if count == 75 else 1
    ranges = [(count // 2, count), (3, count // 2), (0, 3)]
    order = [unit for start, stop in ranges for unit in range(start, stop)]
    if count == 609:  # two passes, then others: units of the passes alone
        order = [unit % 300 if unit < 600 else unit - 600 for unit in order]
    portions = produce(dealt(plan(), *ranges), counts_units=True).portions
    touched = 0
    for portion in portions:
        units = [int(row) // size for row in wire.decode(portion.buffers).rows()]
        assert portion.done_to <= portion.delivered_end
        assert touched <= portion.delivered_end
        touched = portion.delivered_end
        assert {*units} <= {*order[portion.done_from : touched]}


def test_a_step_that_reads_ahead_touches_no_more_than_what_was_yielded() -> None:
    plan = hr.Dataset.range(500).map(lambda x: x, num_parallel_calls=2).prefetch(8)
    portions = produce(dealt(plan, (0, 500)), counts_units=True).portions
    assert [portion.delivered_end for portion in portions] == [
        portion.done_to for portion in portions
    ]


def test_a_batch_that_an_element_failed_for_begins_another_unit() -> None:
    def picky(x: int) -> int:
        if x == 1:
            raise ValueError("one")
        return x

    plan = hr.Dataset.range(12).map(picky).batch(4)
    portions = produce(dealt(plan, (0, 3)), counts_units=True).portions
    for portion in portions:
        if portion.num_elements:
            last = int(np.max(wire.decode(portion.buffers).rows()[-1]))
            assert portion.delivered_end >= last // 4 + 1


def test_an_element_that_fails_touches_its_unit() -> None:
    def picky(x: int) -> int:
        if x == 0:
            raise ValueError("none")
        return x

    plan = hr.Dataset.range(4).filter(lambda x: bool(picky(int(x)) >= 0))
    failed = produce(dealt(plan, (0, 4)), counts_units=True).portions[0]
    assert failed.error is not None
    assert failed.delivered_end >= 1


def test_a_unit_that_fails_is_whole_with_its_error_and_no_other_is() -> None:
    def picky(x: Any) -> Any:
        if x == 2:
            raise ValueError("no twos")
        return x

    portions = produce(dealt(hr.Dataset.range(4).map(picky), (0, 4)), counts_units=True).portions
    (failed,) = (portion for portion in portions if portion.error is not None)
    assert (failed.done_from, failed.done_to, failed.delivered_end) == (2, 3, 3)
    assert [(p.done_from, p.done_to) for p in portions if p.num_elements][-1] == (3, 4)


def test_what_was_yielded_is_put_at_once_where_that_is_wanted() -> None:
    outlet = Collected()
    outlet.delivers_at_once = True
    iterator = Listed([[number] for number in range(20)])
    Producer("task-1", lambda _: iterator, outlet).start()
    assert outlet.ended.wait(SECONDS)
    assert [portion.num_elements for portion in outlet.portions] == [1] * 20


def test_an_element_that_fails_is_an_error_of_its_own_and_the_rest_follows() -> None:
    outlet = produce(lambda: Listed([[0], hr.errors.DataLossError("torn"), [1]]))
    assert outlet.elements() == [[0], [1]]
    assert [str(error) for error in outlet.errors()] == ["torn"]
    assert outlet.failure is None


def test_what_escapes_that_is_no_exception_is_reported_and_the_task_fails() -> None:
    iterator = Listed([[0], SystemExit(3), [1]])
    outlet = produce(lambda: iterator)
    (error,) = outlet.errors()
    assert isinstance(error, hr.errors.UserFunctionError)
    assert outlet.elements() == [[0]]
    assert outlet.failure == "SystemExit: 3"
    assert iterator.closed


def test_a_function_that_says_that_nothing_is_left_does_not_end_the_task() -> None:
    outlet = produce(lambda: Listed([[0], hr.errors.OutOfRangeError("none"), [1]]))
    (error,) = outlet.errors()
    assert isinstance(error, hr.errors.UserFunctionError)
    assert outlet.elements() == [[0], [1]]
    assert outlet.failure is None


@pytest.mark.parametrize("error", [ImportError("no such module"), SystemExit(1)])
def test_a_plan_that_cannot_be_opened_is_reported_and_the_task_fails(error: BaseException) -> None:
    def open_plan() -> ElementIterator:
        raise error

    outlet = produce(open_plan)
    assert len(outlet.errors()) == 1
    assert outlet.failure is not None
    assert "cannot be opened" in outlet.failure


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
def test_a_function_that_interrupts_or_exits_costs_its_own_element_alone(
    kind: type[BaseException], plan: Callable[[Callable[[int], int]], hr.Dataset]
) -> None:
    def picky(x: int) -> int:
        if x == 7:
            raise kind
        return int(x)

    dataset, units = plan(picky), iter([(0, 20)])
    outlet = produce(
        lambda: build_iterator(
            dataset.plan, seed=7, next_splits=lambda: next(units, None), contain_exits=True
        ),
        counts_units=True,
    )
    (error,) = outlet.errors()
    assert isinstance(error, hr.errors.UserFunctionError)
    assert error.original_type == kind.__name__
    values = sorted(value for values in outlet.elements() for value in values)
    assert values == [value for value in range(20) if value != 7]
    assert outlet.failure is None


class Granting:
    """Grants units once, and then none for a while; counts the elements that are put."""

    def __init__(self, units: tuple[int, int]) -> None:
        self.feed = ProducerChannel(1, self)
        self._units: tuple[int, int] | None = units
        self.elements: list[int] = []
        self.touched = 0
        self.ended_with: list[str | None] = []

    def batch_produced(self, producer: int, portion: ResultBatch) -> None:
        assert portion.error is None
        assert portion.done_to <= portion.delivered_end
        self.touched = max(self.touched, portion.delivered_end)
        self.elements += [int(np.max(row)) for row in wire.decode(portion.buffers).rows()]
        self.feed.resume()

    def splits_needed(self, producer: int) -> None:
        if self._units is not None:
            units, self._units = self._units, None
            self.feed.grant(SplitGrant(producer=1, splits=units))

    def producer_ended(self, producer: int, failure: str | None) -> None:
        self.ended_with.append(failure)


def tens(number: int) -> hr.Dataset:
    return hr.Dataset.range(10 * number, 10 * number + 10)


@pytest.mark.parametrize(
    ("plan", "units", "ready"),
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
@pytest.mark.parametrize("origins", [False, True])
def test_what_is_ready_does_not_wait_until_more_units_come(
    plan: Callable[[hr.Dataset], hr.Dataset], units: int, ready: int, origins: bool
) -> None:
    dataset = plan(hr.Dataset.range(100))
    task = definition(dealt=True, origins=origins)
    outlet = Granting((0, units))
    producer = Producer(
        "task-1",
        lambda hand_over: open_plan(
            dump_plan(dataset.plan), task, partial(outlet.feed.next_splits, hand_over), worker="w:1"
        ),
        outlet.feed,
        counts_splits=True,
        reports_element_ids=origins,
    )
    producer.start()
    try:
        wait_until(lambda: len(outlet.elements) >= ready)
        assert len(outlet.elements) == len({*outlet.elements}) == ready
        assert outlet.touched == units
        outlet.feed.grant(SplitGrant(producer=1))
        wait_until(lambda: outlet.ended_with == [None])
        assert len(outlet.elements) == ready
    finally:
        outlet.feed.close()
        producer.join(SECONDS)


def test_a_task_that_fails_alike_for_ever_ends() -> None:
    class Broken(Listed):
        def next_chunk(self, limit: int) -> Chunk | None:
            raise OSError("disk is full")

    outlet = produce(lambda: Broken([]))
    assert len(outlet.errors()) == 100
    assert outlet.failure == "the same error 100 times in a row: OSError: disk is full"


def test_elements_that_cannot_be_sent_are_an_error_and_the_rest_follows() -> None:
    class Unsendable(Listed):
        def next_chunk(self, limit: int) -> Chunk | None:
            chunk = super().next_chunk(1)
            if chunk is not None and chunk.rows() == [1]:
                return Chunk.of_rows([object()], chunk.states)
            return chunk

    outlet = produce(lambda: Unsendable([[0, 1, 2]]), counts_units=True)
    assert len(outlet.errors()) == 1
    assert [value for values in outlet.elements() for value in values] == [0, 2]
    assert sum(portion.num_splits for portion in outlet.portions) == 3


def test_an_iterator_that_fails_when_it_is_closed_does_not_hide_the_end() -> None:
    class Stuck(Listed):
        def close(self) -> None:
            raise SystemExit("cannot close")

    outlet = produce(lambda: Stuck([[0]]))
    assert outlet.elements() == [[0]]
    assert outlet.failure is not None


def test_an_outlet_that_takes_nothing_hears_of_the_end_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outlet = Collected()
    outlet.refused = MemoryError("full")
    produce(lambda: Listed([[0]]), outlet)
    assert outlet.failure == "MemoryError: full"
    assert "task-1 failed: MemoryError: full" in caplog.text


def test_the_plan_is_released_as_soon_as_it_is_open() -> None:
    class Plan:
        pass

    plan: Any = Plan()
    gone = weakref.ref(plan)
    opened, go_on = threading.Event(), threading.Event()

    class Waiting(Listed):
        def next_chunk(self, limit: int) -> Chunk | None:
            opened.set()
            go_on.wait(SECONDS)
            return None

    outlet = Collected()
    producer = Producer("task-1", lambda _, plan=plan: plan and Waiting([]), outlet)
    del plan
    producer.start()
    assert opened.wait(SECONDS)
    gc.collect()
    assert gone() is None
    go_on.set()
    producer.join(SECONDS)


@pytest.mark.parametrize(
    "step", [lambda ds: ds, lambda ds: ds.repeat(5), lambda ds: ds.prefetch(2)]
)
def test_large_elements_are_sent_from_where_the_source_keeps_them(step: Any) -> None:
    array = np.arange(8 * 9000.0).reshape(8, 9000)
    dataset = step(hr.Dataset.from_tensor_slices(array))
    outlet = produce(lambda: build_iterator(dataset.plan, seed=1, is_read_only=True))
    sent = [row for portion in outlet.portions for row in wire.decode(portion.buffers).rows()]
    assert max(portion.num_elements for portion in outlet.portions) > 1
    assert [row[0] for row in sent] == [row[0] for row in dataset]
    assert all(np.shares_memory(row, array) for row in sent)


def test_elements_that_came_in_pieces_are_not_joined_where_they_are_large() -> None:
    image = np.arange(9000.0)
    dataset = hr.Dataset.from_tensors(image).repeat(20)
    outlet = produce(lambda: build_iterator(dataset.plan, seed=1, is_read_only=True))
    sent = [row for portion in outlet.portions for row in wire.decode(portion.buffers).rows()]
    assert len(sent) == 20
    assert len(outlet.portions) < 20
    assert all(np.shares_memory(row, image) for row in sent)


def test_the_plan_of_a_task_is_opened_by_somebody_who_only_reads() -> None:
    dataset = hr.Dataset.from_tensors(np.arange(9000.0))
    iterator = open_plan(dump_plan(dataset.plan), definition(), None, worker="worker:1")
    chunk = iterator.next_chunk(1)
    assert chunk is not None
    (row,) = chunk.rows()
    assert not row.flags.writeable
