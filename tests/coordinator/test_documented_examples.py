"""Documented examples of coordinators and workers, with their numbers."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.coordinator import (
    ClusterCoordinator,
    RemoteValueStatus,
    get_current_worker_index,
)
from headrace.coordinator.cluster import Workers
from headrace.coordinator.coordinator_server import CoordinatorReply, RegisterTrainingWorker
from headrace.errors import (
    CancelledError,
    InvalidArgumentError,
    UnavailableError,
)
from headrace.transport import zeromq
from tests.coordinator.in_process import SECONDS, shared_here, wait_until
from tests.coordinator.test_closure_queue import Driver


@contextmanager
def _cluster(num_workers: int = 2, num_ps: int = 1, **options: Any) -> Iterator[tuple[Any, ...]]:
    """Yield a cluster in this process, a strategy and a coordinator."""
    with hr.distribute.LocalCluster(num_workers, num_ps, processes=False) as local:
        strategy = hr.distribute.ParameterServerStrategy(local.cluster_resolver, **options)
        with ClusterCoordinator(strategy) as coordinator:
            yield local, strategy, coordinator
        strategy.close()


def _restart(local: Any, *tasks: tuple[str, int]) -> None:
    for task in tasks:
        local.kill(*task)
    for task in tasks:
        local.restart(*task)


# --- data of workers ---------------------------------------------------------------------------


@pytest.mark.catalogue("2.9.1", "3.1.13")
def test_each_of_five_workers_sums_its_shard():
    with _cluster(5) as (_, _, coordinator):
        dataset = coordinator.create_per_worker_dataset(
            lambda: hr.Dataset.range(10).shard(5, get_current_worker_index())
        )
        assert dataset.element_spec == hr.Dataset.range(10).element_spec
        sums: dict[int, int] = {}
        while len(sums) < 5:
            worker, total = coordinator.schedule(
                lambda data: (get_current_worker_index(), sum(map(int, data))), (dataset,)
            ).fetch(SECONDS)
            sums[worker] = total
    assert sums == {0: 5, 1: 7, 2: 9, 3: 11, 4: 13}


@pytest.mark.catalogue("3.1.19", "3.1.28")
def test_datasets_are_zipped_and_restart_with_new_iterators():
    with _cluster(1) as (_, _, coordinator):
        low = coordinator.create_per_worker_dataset(hr.Dataset.range(0, 5))
        high = coordinator.create_per_worker_dataset(lambda: hr.Dataset.range(5, 10))
        mapped = coordinator.create_per_worker_dataset(hr.Dataset.range(10).map(lambda x: x + 10))

        def add(first: Any, second: Any) -> int:
            return int(next(first)) + int(next(second))

        first, second = iter(low), iter(high)
        found = [coordinator.schedule(add, (first, second)).fetch(SECONDS) for _ in range(2)]
        found.append(coordinator.schedule(add, (iter(low), second)).fetch(SECONDS))
        found.append(coordinator.schedule(add, (iter(low), iter(mapped))).fetch(SECONDS))
        assert found == [0 + 5, 1 + 6, 0 + 7, 0 + 10]


@pytest.mark.catalogue("2.9.7", "3.1.26")
def test_a_dataset_function_may_capture_a_local_dataset():
    part = hr.Dataset.range(3)
    with _cluster(1) as (_, _, coordinator):
        made = coordinator.create_per_worker_dataset(lambda: part.map(lambda x: 2 * x))
        read = coordinator.schedule(lambda data: [int(each) for each in data], (made,))
        assert read.fetch(SECONDS) == [0, 2, 4]


@pytest.mark.catalogue("2.8.20", "3.3.8", "3.3.9")
def test_a_dataset_is_built_when_its_lost_worker_returns():
    with _cluster(1) as (local, _, coordinator):
        local.kill("worker", 0)
        wait_until(lambda: not coordinator.status().workers[0].is_connected)
        iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(7, 9)))
        value = coordinator.schedule(lambda it: int(next(it)), (iterator,))
        local.restart("worker", 0)
        assert value.fetch(SECONDS) == 7


def _build_slowly() -> hr.Dataset:
    shared_here["building"].set()
    assert shared_here["release"].wait(SECONDS)
    return hr.Dataset.range(3)


@pytest.mark.catalogue("3.3.8", "3.3.9")
def test_a_worker_lost_while_building_a_dataset_rebuilds_it():
    shared_here.update(building=threading.Event(), release=threading.Event())
    with _cluster(1) as (local, _, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(_build_slowly))
        value = coordinator.schedule(lambda it: int(next(it)), (iterator,))
        assert shared_here["building"].wait(SECONDS)
        local.kill("worker", 0)
        shared_here["release"].set()
        local.restart("worker", 0)
        assert value.fetch(SECONDS) == 0


@pytest.mark.catalogue("2.8.17", "2.8.30")
def test_resources_of_a_lost_worker_are_aborted_until_recreated():
    with _cluster(1) as (local, _, coordinator):
        kept = coordinator.create_per_worker_values(lambda: [0])
        coordinator.schedule(lambda cell: cell.append(1), (kept,))
        assert coordinator.schedule(len, (kept,)).fetch(SECONDS) == 2
        local.kill("worker", 0)
        wait_until(lambda: kept.statuses == (RemoteValueStatus.ABORTED,))
        local.restart("worker", 0)
        assert coordinator.schedule(len, (kept,)).fetch(SECONDS) == 1, (
            "it starts from the beginning"
        )
        assert kept.statuses == (RemoteValueStatus.READY,)


# --- replicas of a worker --------- ------------------------------------------------------------


@pytest.mark.catalogue("3.1.44-46", "3.7.13", "3.7.14", "3.35.2")
def test_replicas_of_a_worker_reduce_their_values_and_aggregate_their_writes():
    with _cluster(1, replicas=2) as (_, strategy, coordinator):
        with strategy.scope():
            summed = hr.Variable(0.0, name="summed", aggregation="SUM")
            mean = hr.Variable(1, name="mean", aggregation="MEAN")
            first = hr.Variable(1.0, name="first", aggregation="ONLY_FIRST_REPLICA")

        def replica_fn(x: float) -> tuple[float, float]:
            number = hr.distribute.get_replica_context().replica_id_in_sync_group
            summed.assign(number + 1.0)
            mean.assign_add(2)
            first.assign_add(x)
            return x + 1.0, x - 1.0

        def step() -> tuple[float, float]:
            a, b = strategy.run(replica_fn, args=(3.0,))
            return strategy.reduce("SUM", a, axis=None), strategy.reduce("SUM", b, axis=None)

        assert coordinator.schedule(step).fetch(SECONDS) == (8.0, 4.0)
        assert (summed.numpy(), mean.numpy(), first.numpy()) == (3.0, 3, 4.0)


# --- losses ------------------------------------------------------------------------------------


@pytest.mark.catalogue("2.8.16", "3.3.7")
def test_a_function_error_is_raised_despite_a_simultaneous_worker_loss():
    driver = Driver(2)
    failing, long, queued = driver.schedule(), driver.schedule(), driver.schedule()
    driver.ends(0, failing.number, ValueError("Some error."))
    driver.lose(1)
    driver.forget_keys()
    assert str(driver.take_error()) == "Some error."
    assert driver.queue.is_drained
    for closure in (long, queued):
        assert isinstance(closure.result.error, CancelledError)
    driver.sent(1)
    later = [driver.schedule() for _ in range(3)]
    while not driver.queue.is_drained:
        for worker in (0, 1):
            for number in driver.at[worker][:1]:
                driver.ends(worker, number)
    assert not any(closure.result.error for closure in later)


@pytest.mark.catalogue("2.8.18", "3.3.2-5", "3.4.1", "3.4.2", "3.5.3")
def test_steps_before_and_after_a_worker_restart_count_once():
    with _cluster(2) as (local, strategy, coordinator):
        with strategy.scope():
            iterations = hr.Variable(0, name="iterations")

        def step() -> None:
            iterations.assign_add(1)

        for expected, lost in ((2, [0]), (4, [0, 1]), (6, [0]), (8, [])):
            for _ in range(2):
                coordinator.schedule(step)
            coordinator.join(SECONDS)
            assert iterations.numpy() == expected
            _restart(local, *(("worker", number) for number in lost))
        wait_until(lambda: all(each.is_connected for each in coordinator.status().workers))
        assert all(each.num_losses for each in coordinator.status().workers)


@pytest.mark.catalogue("3.3.18-20")
def test_values_and_variables_are_readable_without_workers():
    with _cluster(1) as (local, strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(1.0, name="v")
        value = coordinator.schedule(lambda: v.assign_add(1.0).numpy())
        coordinator.join(SECONDS)
        local.kill("worker", 0)
        wait_until(lambda: not coordinator.status().workers[0].is_connected)
        assert "worker 0" not in coordinator.status().failure
        assert value.fetch(SECONDS) == value.get() == 2.0
        assert v.numpy() == 2.0
        assert v.assign_add(1.0).numpy() == 3.0
        local.restart("worker", 0)
        assert coordinator.schedule(v.numpy).fetch(SECONDS) == 3.0


@pytest.mark.catalogue("2.8.22", "3.2.3-5", "3.3.15-17")
@pytest.mark.parametrize("way", ["join", "schedule", "done"])
def test_a_parameter_server_lost_with_a_worker_is_named(way: str):
    with _cluster(2, server_timeout=0.3) as (local, strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(0.0, name="v")
        local.kill("worker", 0)
        local.kill("ps", 0)

        def use() -> None:
            coordinator.schedule(lambda: v.assign_add(1.0))
            if way == "join":
                coordinator.join(SECONDS)
            elif way == "schedule":
                while True:
                    coordinator.schedule(time.sleep, (0.01,))
            else:
                wait_until(coordinator.done)

        with pytest.raises(UnavailableError, match="parameter server 0 at"):
            use()


@pytest.mark.catalogue("3.18.2")
def test_evaluation_of_128_shards_is_exact_despite_restarted_workers():
    with _cluster(3) as (local, _, coordinator):

        def strike() -> None:
            wait_until(lambda: coordinator.status().num_finished >= 20)
            _restart(local, ("worker", 0), ("worker", 1))

        def one(shard: Any) -> tuple[int, int]:
            time.sleep(0.002)
            values = [int(each) for each in shard]
            return sum(values), len(values)

        thread = threading.Thread(target=strike)
        thread.start()
        mean = coordinator.evaluate(
            one,
            hr.Dataset.range(1024),
            num_shards=128,
            merge=lambda parts: sum(s for s, _ in parts) / sum(n for _, n in parts),
        )
        thread.join()
    assert mean == 511.5


@pytest.mark.catalogue("2.8.3")
def test_functions_can_be_scheduled_while_another_thread_joins():
    shared_here.update({name: threading.Event() for name in ("building", "release", "go on")})
    with _cluster(1) as (_, _, coordinator):
        coordinator.schedule(_build_slowly)
        waiting = threading.Thread(target=coordinator.join)
        waiting.start()
        assert shared_here["building"].wait(SECONDS)
        later = coordinator.schedule(_wait_for_release)
        shared_here["release"].set()
        waiting.join(SECONDS)
        assert not waiting.is_alive()
        assert later.status is RemoteValueStatus.NOT_READY
        shared_here["go on"].set()
        coordinator.join(SECONDS)


def _wait_for_release() -> None:
    assert shared_here["go on"].wait(SECONDS)


def test_an_invalid_registration_is_rejected_without_a_log_message(caplog: Any):
    with ClusterCoordinator(Workers([])) as coordinator:
        channel = zeromq.connect(coordinator.listen(), reply_type=CoordinatorReply)
        for address in ("nonsense", "a:99999", ""):
            with pytest.raises(InvalidArgumentError, match="address="):
                channel.call(
                    RegisterTrainingWorker(address=address, process_id="x"), timeout=SECONDS
                )
        channel.close()
        assert coordinator.workers == {}
    assert not caplog.records


# --- a whole loop ------------------------------------------------------------------------------


@pytest.mark.catalogue("3.20.1")
def test_ten_epochs_of_a_hundred_steps_count_every_step():
    with _cluster(3, 2) as (_, strategy, coordinator):
        with strategy.scope():
            kernel = hr.Variable(np.ones(2, np.float32), name="kernel")
            optimizer = hr.optimizers.SGD(0.01)
        dataset = coordinator.create_per_worker_dataset(
            lambda: hr.Dataset.from_tensors(np.ones(2, np.float32)).repeat().batch(4)
        )

        def ten_steps(iterator: Any) -> float:
            for _ in range(10):
                error = next(iterator) @ kernel.read()
                optimizer.apply_gradients([(np.full(2, error.mean(), np.float32), kernel)])
            return float(error.mean())

        for _ in range(10):
            iterator = iter(dataset)
            values = [coordinator.schedule(ten_steps, (iterator,)) for _ in range(10)]
            coordinator.join(SECONDS)
        assert optimizer.iterations == 1000
        assert abs(values[-1].fetch()) < 1e-3


# --- a coordinator's end -----------------------------------------------------------------------


@pytest.mark.catalogue("2.8.1", "3.3.1")
def test_threads_of_an_unreferenced_coordinator_end_within_a_second():
    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "headrace-coordinator"}

    before = threads()
    coordinator = ClusterCoordinator(Workers([]))
    own = threads() - before
    assert own
    del coordinator
    gc.collect()
    wait_until(lambda: not any(each.is_alive() for each in own), 1.0)
