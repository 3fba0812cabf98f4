"""Per-worker datasets and values."""

from __future__ import annotations

import gc
import pickle
import time
from typing import Any

import pytest

import headrace as hr
from headrace.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValueStatus,
    get_current_worker_index,
)
from headrace.coordinator.closure_context import RunningClosure, SessionResources, current_closure
from headrace.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    UserFunctionError,
)
from tests.coordinator.in_process import SECONDS, coordinating, divide, take_next, wait_until


@pytest.mark.catalogue("2.9.2", "2.9.3")
def test_each_worker_reads_the_whole_of_a_per_worker_dataset():
    # The number of elements equals that of functions: one worker may run all of them while the
    # other creates its dataset.
    for made in (hr.Dataset.range(6), lambda: hr.Dataset.range(6)):
        with coordinating(2, closures_in_flight=1) as coordinator:
            wait_until(lambda c=coordinator: all(each.is_connected for each in c.status().workers))
            iterator = iter(coordinator.create_per_worker_dataset(made))
            seen: dict[int, list[int]] = {0: [], 1: []}
            for _ in range(6):
                worker, element = coordinator.schedule(
                    lambda it: (get_current_worker_index(), int(next(it))), (iterator,)
                ).fetch(SECONDS)
                seen[worker].append(element)
            assert len(seen[0]) + len(seen[1]) == 6
            assert all(elements == list(range(len(elements))) for elements in seen.values())


@pytest.mark.catalogue("3.1.27")
def test_an_iterator_may_be_captured(coordinator: ClusterCoordinator):
    iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(1, 11).batch(4)))
    assert coordinator.schedule(lambda: next(iterator)).fetch(SECONDS).tolist() == [1, 2, 3, 4]


@pytest.mark.catalogue("2.9.5", "3.1.17")
def test_each_iterator_begins_at_the_beginning(coordinator: ClusterCoordinator):
    dataset = coordinator.create_per_worker_dataset(hr.Dataset.range(1, 2))
    for _ in range(3):
        assert coordinator.schedule(take_next, (iter(dataset),)).fetch(SECONDS) == 1


@pytest.mark.catalogue("2.9.4", "3.1.21", "3.1.53")
def test_workers_shuffle_differently(coordinator: ClusterCoordinator):
    dataset = coordinator.create_per_worker_dataset(hr.Dataset.range(100).shuffle(100).batch(100))
    iterator = iter(dataset)
    seen = {}
    while len(seen) < 2:
        worker, order = coordinator.schedule(
            lambda it: (get_current_worker_index(), next(it).tolist()), (iter(dataset),)
        ).fetch(SECONDS)
        seen[worker] = order
    assert seen[0] != seen[1]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(100))
    assert iterator.element_spec == dataset.element_spec


@pytest.mark.catalogue("2.9.1", "3.1.55")
def test_a_dataset_function_gets_the_worker_index():
    with coordinating(3) as coordinator:
        dataset = coordinator.create_per_worker_dataset(
            lambda: hr.Dataset.range(9).shard(3, get_current_worker_index())
        )
        assert dataset.element_spec == hr.Dataset.range(9).element_spec
        sums = {}
        while len(sums) < 3:
            worker, total = coordinator.schedule(
                lambda data: (get_current_worker_index(), sum(int(each) for each in data)),
                (dataset,),
            ).fetch(SECONDS)
            sums[worker] = total
        assert sums == {0: 9, 1: 12, 2: 15}


@pytest.mark.catalogue("2.8.30", "2.9.6")
def test_the_end_of_a_per_worker_dataset_raises(coordinator: ClusterCoordinator):
    iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(1)))
    coordinator.schedule(take_next, (iterator,)).fetch(SECONDS)
    ends = [coordinator.schedule(time.sleep, (0.01,)) for _ in range(4)]

    def schedule_more() -> None:
        for _ in range(100):
            coordinator.schedule(take_next, (iterator,))
        coordinator.join(SECONDS)

    with pytest.raises(OutOfRangeError):
        schedule_more()
    assert all(value.status is RemoteValueStatus.READY for value in ends)
    coordinator.join(SECONDS)


@pytest.mark.catalogue("2.8.11", "3.1.40")
def test_an_iterator_outlives_an_error_of_a_function():
    with coordinating(1) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(10)))
        assert coordinator.schedule(take_next, (iterator,)).fetch(SECONDS) == 0
        coordinator.schedule(divide, (1, 0))
        with pytest.raises(UserFunctionError):
            coordinator.join(SECONDS)
        assert coordinator.schedule(take_next, (iterator,)).fetch(SECONDS) == 1


@pytest.mark.catalogue("2.8.21", "3.1.37", "3.1.38")
def test_a_failed_dataset_fails_only_functions_that_use_it(coordinator: ClusterCoordinator):
    def broken() -> Any:
        raise LookupError("no files")

    iterator = iter(coordinator.create_per_worker_dataset(broken))
    assert coordinator.schedule(divide, (1, 1)).fetch(SECONDS) == 1.0
    coordinator.join(SECONDS)
    value = coordinator.schedule(take_next, (iterator,))
    with pytest.raises(UserFunctionError, match="no files"):
        coordinator.join(SECONDS)
    with pytest.raises(UserFunctionError, match="no files"):
        value.fetch()
    wrong = coordinator.create_per_worker_dataset(lambda: [1, 2])
    with pytest.raises(InvalidArgumentError, match="must return a Dataset"):
        coordinator.schedule(take_next, (iter(wrong),)).fetch(SECONDS)


@pytest.mark.catalogue("1.4.7", "1.9.4")
def test_a_per_worker_dataset_cannot_be_read_in_the_coordinator(coordinator: ClusterCoordinator):
    iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(3)))
    with pytest.raises(NotImplementedError, match="not supported right now"):
        next(iterator)
    with pytest.raises(NotImplementedError, match="not supported right now"):
        iterator.get_next()
    for wrong in (3, [1, 2], None):
        with pytest.raises(ValueError, match="Unexpected dataset type!"):
            coordinator.create_per_worker_dataset(wrong)


@pytest.mark.catalogue("1.4.7", "1.9.4")
def test_a_distributed_dataset_may_be_per_worker(coordinator: ClusterCoordinator):
    strategy = hr.distribute.OneDeviceStrategy("cpu:0")
    distributed = strategy.distribute_dataset(hr.Dataset.range(1, 11).batch(4))
    iterator = iter(coordinator.create_per_worker_dataset(distributed))
    assert coordinator.schedule(lambda it: next(it), (iterator,)).fetch(SECONDS).tolist() == [
        1, 2, 3, 4,
    ]  # fmt: skip


@pytest.mark.catalogue("2.9.5", "3.1.29")
def test_unreferenced_resources_are_released_by_workers(coordinator: ClusterCoordinator):
    dataset = coordinator.create_per_worker_dataset(hr.Dataset.range(1000))
    for _ in range(5):
        iterator = iter(dataset)
        coordinator.fetch([coordinator.schedule(take_next, (iterator,)) for _ in range(3)])
    held = coordinator._runner.core.resources
    assert len(held) <= 6
    del iterator
    gc.collect()
    coordinator._runner.wake()
    wait_until(lambda: len(held) == 1)
    last = coordinator.schedule(take_next, (iter(dataset),))
    assert last.fetch(SECONDS) == 0, "kept while a function needs it"


@pytest.mark.catalogue("1.6.7", "1.9.6", "2.8.8", "3.1.22", "3.1.23")
def test_values_for_each_worker(coordinator: ClusterCoordinator):
    mine = PerWorkerValues(["first", "second"])
    values = [
        coordinator.schedule(lambda v: (get_current_worker_index(), v), (mine,)) for _ in range(9)
    ]
    assert set(coordinator.fetch(values)) <= {(0, "first"), (1, "second")}
    made = coordinator.create_per_worker_values(lambda start: [start], (10,))

    def add(cell: list[int]) -> None:
        cell[0] += 1

    for _ in range(10):
        coordinator.schedule(add, (made,))
    coordinator.join(SECONDS)
    totals = {}
    while len(totals) < 2:
        worker, total = coordinator.schedule(
            lambda cell: (get_current_worker_index(), cell[0]), (made,)
        ).fetch(SECONDS)
        totals[worker] = total
    assert sum(totals.values()) == 10 + 10 + 10
    assert made.statuses == (RemoteValueStatus.READY,) * 2


def test_a_worker_without_a_value_raises():
    values = pickle.dumps(PerWorkerValues(["first", "second"]))
    token = current_closure.set(RunningClosure(2, SessionResources(), is_only_thread=True))
    try:
        with pytest.raises(FailedPreconditionError, match="has 2 values, but none for worker 2"):
            pickle.loads(values)
    finally:
        current_closure.reset(token)


def test_threads_of_a_worker_share_an_iterator():
    with coordinating(1, threads_per_worker=4) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(200)))
        values = [coordinator.schedule(take_next, (iterator,)) for _ in range(200)]
        assert sorted(coordinator.fetch(values)) == list(range(200))
