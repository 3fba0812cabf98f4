"""Coordinated reads with real servers: consumers read rounds, each from one worker."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    UserFunctionError,
)
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

Range = hr.Dataset.range
BOTH = [ShardingPolicy.OFF, ShardingPolicy.DYNAMIC]


def make_consumers(
    cluster: LocalCluster,
    dataset: hr.Dataset,
    number: int,
    *,
    mode: ShardingPolicy = ShardingPolicy.OFF,
    job_name: str = "test",
    **options: Any,
) -> list[hr.Dataset]:
    """Return the distributed dataset of each consumer."""
    return [
        dataset.apply(
            distribute(
                mode,
                cluster.target,
                job_name=job_name,
                consumer_index=index,
                num_consumers=number,
                **options,
            )
        )
        for index in range(number)
    ]


def grouped_numbers(number: int) -> hr.Dataset:
    """Return the numbers x * n to x * n + n - 1, for x = 0 and then infinitely many random x."""
    starts = Range(1).concatenate(hr.Dataset.random(seed=None).map(lambda x: x % (1 << 32)))
    return starts.flat_map(lambda x: Range(x * number, x * number + number))


def read_rounds(iterators: Sequence[Iterator[Any]], count: int) -> list[list[int]]:
    """Return the elements of `count` rounds; each consumer reads in its own thread."""
    found: list[list[int]] = [[] for _ in iterators]
    failures: list[BaseException] = []

    def read(index: int) -> None:
        try:
            for _ in range(count):
                found[index].append(int(next(iterators[index])))
        except BaseException as error:
            failures.append(error)

    run_in_threads(read, len(iterators))
    if failures:
        raise failures[0]
    return [list(each) for each in zip(*found, strict=True)]


def run_in_threads(read: Callable[[int], None], number: int) -> None:
    threads = [threading.Thread(target=read, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a consumer does not end"


def check_groups(found: list[list[int]]) -> int:
    """Check that each round comes from one worker, in order; return the number of started tasks."""
    for group in found:
        assert group == list(range(group[0], group[0] + len(group))), group
        assert group[0] % len(group) == 0
    return sum(group[0] == 0 for group in found)


def read_all(datasets: list[hr.Dataset]) -> list[list[Any]]:
    """Return all elements of each consumer."""
    found: list[list[Any]] = [[] for _ in datasets]
    failures: list[BaseException] = []

    def read(index: int) -> None:
        reader = iter(datasets[index])
        try:
            found[index] = list(reader)
        except BaseException as error:
            failures.append(error)
        finally:
            reader.close()

    run_in_threads(read, len(datasets))
    if failures:
        raise failures[0]
    return found


@pytest.mark.catalogue("CR1", "WT6")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("mode", BOTH)
def test_each_round_comes_from_one_worker_and_consumer_i_gets_element_i(
    cluster: LocalCluster, workers: int, number: int, mode: ShardingPolicy
) -> None:
    for _ in range(workers - 1):
        cluster.add_worker()
    dataset = grouped_numbers(number)
    if mode is ShardingPolicy.DYNAMIC:
        # With DYNAMIC, the splits are the rows, and each row makes one round.
        dataset = Range(1 << 40).flat_map(lambda x: Range(x * number, x * number + number))
    readers = [iter(each) for each in make_consumers(cluster, dataset, number, mode=mode)]
    check_groups(read_rounds(readers, 50))
    for each in readers:
        each.close()


def test_workers_take_turns(cluster: LocalCluster) -> None:
    cluster.add_worker()
    numbered = hr.Dataset.counter().map(lambda x: x)
    one, two = (iter(each) for each in make_consumers(cluster, numbered, 2))
    found = read_rounds([one, two], 6)
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    one.close()
    two.close()


@pytest.mark.catalogue("CR4", "CR5")
@pytest.mark.parametrize("mode", BOTH)
def test_finite_data_ends_for_all_after_the_same_number_of_rounds(
    cluster: LocalCluster, mode: ShardingPolicy
) -> None:
    found = read_all(make_consumers(cluster, Range(11), 3, mode=mode))
    assert found == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_epochs_of_finite_data_are_read_one_after_another(cluster: LocalCluster) -> None:
    datasets = make_consumers(cluster, Range(4), 2)
    for _ in range(3):
        assert read_all(datasets) == [[0, 2], [1, 3]]


def test_padding_gives_empty_batches_to_consumers_without_a_batch(cluster: LocalCluster) -> None:
    datasets = make_consumers(cluster, Range(10).batch(2), 3, remainder="pad")
    found = [[batch.tolist() for batch in each] for each in read_all(datasets)]
    assert found == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], []]]


def test_end_together_divides_the_rows_of_the_last_round_evenly(cluster: LocalCluster) -> None:
    datasets = make_consumers(cluster, Range(10).batch(3), 3, remainder="end_together")
    found = [[batch.tolist() for batch in each] for each in read_all(datasets)]
    assert found == [[[0, 1, 2], [9]], [[3, 4, 5], []], [[6, 7, 8], []]]
    datasets = make_consumers(
        cluster, Range(20).batch(4), 3, remainder="end_together", job_name="other"
    )
    found = [[batch.tolist() for batch in each] for each in read_all(datasets)]
    assert [each[1] for each in found] == [[12, 13, 14], [15, 16, 17], [18, 19]]
    assert datasets[0].element_spec == hr.ArraySpec((None,), np.int64)


def test_unbatched_elements_cannot_be_padded_and_the_error_suggests_batch(
    cluster: LocalCluster,
) -> None:
    datasets = make_consumers(cluster, Range(1), 2, remainder="pad")
    with pytest.raises(ValueError, match="Put `batch` before `distribute`"):
        read_all(datasets)


def test_costs_are_balanced_with_equal_row_counts(cluster: LocalCluster) -> None:
    lengths = np.random.default_rng(1).lognormal(0.0, 1.0, 4 * 32 * 5)
    data = hr.Dataset.from_tensor_slices(lengths).batch(32)
    found = read_all(make_consumers(cluster, data, 4, cost_fn=lambda row: row))
    assert sorted(np.concatenate([batch for each in found for batch in each])) == sorted(lengths)
    for batches in zip(*found, strict=True):
        assert {len(batch) for batch in batches} == {32}
        costs = [batch.sum() for batch in batches]
        assert max(costs) <= max(1.05 * np.mean(costs), max(map(np.max, batches)))


def test_an_error_replaces_one_element_and_other_consumers_get_theirs(
    cluster: LocalCluster,
) -> None:
    def fails_on_one(x: Any) -> Any:
        if x == 3:
            raise ValueError("three")
        return x

    one, two = (iter(each) for each in make_consumers(cluster, Range(8).map(fails_on_one), 2))
    outcomes: list[Any] = []

    def read(index: int) -> None:
        if index:
            assert int(next(two)) == 1
            with pytest.raises(UserFunctionError, match="three"):
                next(two)
            outcomes.extend(int(x) for x in two)
        else:
            assert [int(x) for x in one] == [0, 2, 4, 6]

    run_in_threads(read, 2)
    assert outcomes == [5, 7]


def test_a_failing_cost_function_raises_at_every_consumer(cluster: LocalCluster) -> None:
    def costly_failure(row: Any) -> float:
        raise KeyError("no price")

    datasets = make_consumers(cluster, Range(8).batch(2), 2, cost_fn=costly_failure)
    failures = []

    readers = [iter(each) for each in datasets]

    def read(index: int) -> None:
        with pytest.raises(UserFunctionError) as caught:
            next(readers[index])
        failures.append(str(caught.value))

    run_in_threads(read, 2)
    for each in readers:
        each.close()
    assert len(failures) == 2
    assert all("no price" in each and "costly_failure" in each for each in failures)


def test_the_timeout_error_names_the_missing_consumer_and_the_round(cluster: LocalCluster) -> None:
    one, _ = make_consumers(cluster, hr.Dataset.counter(), 2, wait_timeout=0.5)
    reader = iter(one)
    with pytest.raises(DeadlineExceededError, match="consumer 1 of 2 did not read round 0"):
        next(reader)
    reader.close()


def test_a_consumer_that_leaves_is_named_in_the_errors_of_the_others(
    cluster: LocalCluster,
) -> None:
    one, two = (iter(each) for each in make_consumers(cluster, hr.Dataset.counter(), 2))
    read_rounds([one, two], 5)
    two.close()
    with pytest.raises(FailedPreconditionError, match=r"consumer 1 \(client .*\) has left"):
        list(islice(one, 1000))
    one.close()


@pytest.mark.catalogue("CR2")
def test_a_second_group_of_consumers_is_rejected_while_the_first_reads(
    cluster: LocalCluster,
) -> None:
    data = hr.Dataset.counter()
    first = [iter(each) for each in make_consumers(cluster, data, 3)]
    read_rounds(first, 20)
    second = [iter(each) for each in make_consumers(cluster, data, 3)]
    with pytest.raises(FailedPreconditionError, match="current round has already reached"):
        next(second[1])
    for each in (*first, *second):
        each.close()


def test_two_readers_with_the_same_consumer_index_are_rejected(cluster: LocalCluster) -> None:
    data = hr.Dataset.counter()
    readers = [iter(each) for each in make_consumers(cluster, data, 2)]
    read_rounds(readers, 1)
    second = iter(make_consumers(cluster, data, 2)[0])
    with pytest.raises(FailedPreconditionError, match="consumer 0 of 2 of job test"):
        next(second)
    for each in (*readers, second):
        each.close()


def test_equal_cost_functions_of_two_processes_match(cluster: LocalCluster) -> None:
    def make_cost_fn() -> Callable[[Any], Any]:
        return lambda row: row * 2

    data = Range(8).batch(2)
    one = make_consumers(cluster, data, 2, cost_fn=make_cost_fn())[0]
    two = make_consumers(cluster, data, 2, cost_fn=make_cost_fn())[1]
    assert len(read_all([one, two])) == 2


def test_a_registered_dataset_is_read_in_rounds(cluster: LocalCluster) -> None:
    dataset_id = hr.service.register_dataset(cluster.target, Range(6))
    datasets = [
        hr.service.from_dataset_id(
            ShardingPolicy.OFF,
            cluster.target,
            dataset_id,
            job_name="test",
            consumer_index=index,
            num_consumers=2,
        )
        for index in range(2)
    ]
    assert read_all(datasets) == [[0, 2, 4], [1, 3, 5]]


def test_one_request_at_a_time_is_enough(cluster: LocalCluster) -> None:
    cluster.add_worker()
    datasets = make_consumers(cluster, Range(20), 2, max_outstanding_requests=1)
    found = read_all(datasets)
    assert found[0] == [each for x in range(0, 20, 2) for each in (x, x)]
    assert found[1] == [each for x in range(1, 20, 2) for each in (x, x)]


@pytest.mark.catalogue("CR3")
def test_each_round_of_bucketed_batches_comes_from_one_bucket(cluster: LocalCluster) -> None:
    for _ in range(3):
        cluster.add_worker()
    number = 15
    data = (
        Range(100)
        .shuffle(100)
        .repeat()
        .bucket_by_sequence_length(
            lambda x: x,
            bucket_boundaries=[30, 60],
            bucket_batch_sizes=[10] * 3,
            drop_remainder=True,
        )
        .group_by_window(
            key_func=lambda batch: np.searchsorted([30, 60], batch.min(), side="right"),
            reduce_func=lambda _, window: window,
            window_size=number,
        )
    )
    datasets = make_consumers(cluster, data, number)
    found: list[list[Any]] = [[] for _ in range(number)]
    readers = [iter(each) for each in datasets]

    def read(index: int) -> None:
        found[index] = [next(readers[index]) for _ in range(4)]

    run_in_threads(read, number)
    for batches in zip(*found, strict=True):
        buckets = {int(b) for batch in batches for b in np.searchsorted([30, 60], batch, "right")}
        assert len(buckets) == 1
    for each in readers:
        each.close()


def read_until(
    iterators: Sequence[Iterator[Any]], condition: Callable[[list[list[int]]], bool]
) -> list[list[int]]:
    """Return the rounds read until they satisfy a condition; fail after a minute."""
    found: list[list[int]] = []
    deadline = time.monotonic() + 60.0
    while not condition(found):
        assert time.monotonic() < deadline, f"not so after {len(found)} rounds"
        found += read_rounds(iterators, 20)
    return found


@pytest.mark.catalogue("CF1")
@pytest.mark.parametrize("added", [1, 3])
def test_joining_workers_enter_the_rotation_without_torn_rounds(
    cluster: LocalCluster, added: int
) -> None:
    cluster.add_worker()
    number = 3
    readers = [iter(each) for each in make_consumers(cluster, grouped_numbers(number), number)]
    began = check_groups(read_rounds(readers, 25))
    for _ in range(added):
        cluster.add_worker()
    found = read_until(readers, lambda found: began + check_groups(found) >= 2 + added)
    check_groups(found + read_rounds(readers, 25))
    for each in readers:
        each.close()


@pytest.mark.catalogue("CF2", "CF3")
@pytest.mark.parametrize("mode", BOTH)
def test_rounds_stay_complete_across_restarts_of_workers_and_dispatcher(
    mode: ShardingPolicy, tmp_path: Path
) -> None:
    number = 3
    config = hr.service.DispatcherConfig(
        port=0, work_dir=str(tmp_path), fault_tolerant_mode=True, worker_timeout_ms=2000
    )
    dispatcher = hr.service.DispatchServer(config)
    address = dispatcher.target.removeprefix("tcp://")

    def worker(port: int = 0) -> hr.service.WorkerServer:
        return hr.service.WorkerServer(
            hr.service.WorkerConfig(dispatcher_address=address, port=port)
        )

    workers = [worker() for _ in range(3)]
    dataset = grouped_numbers(number)
    if mode is ShardingPolicy.DYNAMIC:
        dataset = Range(1 << 40).flat_map(lambda x: Range(x * number, x * number + number))
    readers = [
        iter(
            dataset.apply(
                distribute(
                    mode,
                    dispatcher.target,
                    job_name="test",
                    consumer_index=index,
                    num_consumers=number,
                )
            )
        )
        for index in range(number)
    ]
    found = read_rounds(readers, 20)
    for index in (0, 1):
        port = int(workers[index].address.rpartition(":")[2])
        workers[index].stop()
        found += read_rounds(readers, 20)
        workers[index] = worker(port)
        found += read_rounds(readers, 20)
    workers.append(worker())
    dispatcher.stop()
    dispatcher = hr.service.DispatchServer(
        dataclasses.replace(config, port=int(address.rpartition(":")[2]))
    )
    found += read_rounds(readers, 20)
    for each in workers[:3]:
        each.stop()
    found += read_rounds(readers, 20)
    check_groups(found)
    for reader in readers:
        reader.close()
    workers[3].stop()
    dispatcher.stop()


def test_a_killed_worker_process_tears_no_round() -> None:
    number = 4
    with LocalCluster(num_workers=2, worker_timeout_ms=2000) as cluster:
        datasets = make_consumers(cluster, grouped_numbers(number), number)
        readers = [iter(each) for each in datasets]
        found = read_rounds(readers, 50)
        found += read_until(readers, lambda found: len(found) >= 20)
        cluster.kill_worker(0)
        found += read_rounds(readers, 100)
        cluster.add_worker()
        began = check_groups(found)
        found += read_until(readers, lambda more: began + check_groups(more) >= 3)
        check_groups(found)
        for each in readers:
            each.close()


_CONSUMER = """
import sys, json
import headrace as hr
index, target = int(sys.argv[1]), sys.argv[2]
data = hr.Dataset.range(3000).batch(1)
consumer = {"job_name": "j", "consumer_index": index, "num_consumers": 3}
share = hr.service.distribute("parallel_epochs", target, **consumer)
print(json.dumps([int(x[0]) for x in data.apply(share)]))
"""


def test_consumers_may_be_processes() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        running = [
            subprocess.Popen(
                [sys.executable, "-c", _CONSUMER, str(index), cluster.target],
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(3)
        ]
        found = [json.loads(each.communicate(timeout=60.0)[0]) for each in running]
    assert [each.returncode for each in running] == [0, 0, 0]
    assert found == [list(range(index, 3000, 3)) for index in range(3)]


def test_a_consumer_that_stops_reading_blocks_the_others_until_the_timeout(
    cluster: LocalCluster,
) -> None:
    one, two = (
        iter(each)
        for each in make_consumers(
            cluster, hr.Dataset.counter(), 2, wait_timeout=1.0, max_outstanding_requests=1
        )
    )
    read_rounds([one, two], 3)
    with pytest.raises(DeadlineExceededError, match=r"consumer 1 of 2 did not read round"):
        list(islice(one, 10))
    one.close()
    two.close()


def test_a_plan_that_cannot_be_opened_raises_at_every_consumer(cluster: LocalCluster) -> None:
    dataset = hr.Dataset.from_generator(lambda: [][1])
    failures = []
    readers = [iter(each) for each in make_consumers(cluster, dataset, 2)]

    def read(index: int) -> None:
        with pytest.raises(UserFunctionError, match="IndexError"):
            list(readers[index])
        failures.append(index)

    run_in_threads(read, 2)
    for each in readers:
        each.close()
    assert sorted(failures) == [0, 1]


def test_after_all_consumers_left_the_next_group_restarts_the_epoch(cluster: LocalCluster) -> None:
    data = hr.Dataset.counter()
    for _ in range(2):
        readers = [iter(each) for each in make_consumers(cluster, data, 2)]
        assert read_rounds(readers, 3) == [[0, 1], [2, 3], [4, 5]]
        for each in readers:
            each.close()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"number": 3}, "num_consumers"),
        ({"remainder": "pad"}, "remainder"),
        ({"mode": ShardingPolicy.DYNAMIC}, "processing mode"),
        ({"cost_fn": len}, "cost_fn"),
    ],
)
def test_consumers_that_join_a_job_must_have_the_same_options(
    cluster: LocalCluster, other: dict[str, Any], difference: str
) -> None:
    data = Range(1 << 20).batch(1)
    one = iter(make_consumers(cluster, data, 1)[0])
    next(one)
    two = iter(make_consumers(cluster, data, **{"number": 1, **other})[0])
    with pytest.raises(AlreadyExistsError, match=f"Existing {difference}"):
        next(two)
    one.close()
    two.close()
