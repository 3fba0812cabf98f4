"""Killed processes: functions are rerun, writes are applied once, iterators resume."""

from __future__ import annotations

import contextvars
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.coordinator import ClusterCoordinator
from headrace.errors import FailedPreconditionError
from tests.coordinator.in_process import resolver_of, wait_until
from tests.coordinator.processes import Task
from tests.parameter_server.small_cluster import is_replicated

pytestmark = pytest.mark.system

HALVES = hr.distribute.partitioners.FixedShardsPartitioner(2)


class Tasks:
    """Two workers and two parameter servers, as processes."""

    def __init__(self, stack: ExitStack) -> None:
        self.workers = [stack.enter_context(Task("worker", index)) for index in range(2)]
        self.servers = [stack.enter_context(Task("ps", index)) for index in range(2)]
        for each in (*self.workers, *self.servers):
            each.wait_until_ready()

    @contextmanager
    def running(self, in_flight: int | None = None, **options: Any) -> Iterator[tuple[Any, Any]]:
        """Yield a strategy and its coordinator."""
        tasks = {"worker": self.workers, "ps": self.servers}
        resolver = resolver_of({kind: [each.address for each in of] for kind, of in tasks.items()})
        strategy = hr.distribute.ParameterServerStrategy(resolver, **options)
        with ClusterCoordinator(strategy, closures_in_flight=in_flight) as coordinator:
            yield strategy, coordinator
        strategy.close()


@pytest.fixture(scope="module")
def tasks() -> Iterator[Tasks]:
    with ExitStack() as stack:
        yield Tasks(stack)


def _num_ready(values: list[Any]) -> int:
    return sum(value.status.name == "READY" for value in values)


def _step(variable: Any, rows: Any, seconds: float) -> int:
    """Add 1 to each of some rows, one after another, and 1 to row 0 as well."""
    for row in rows:
        variable.scatter_add([row], np.ones((1, 2)))
        time.sleep(seconds)
    variable.scatter_add([0], np.ones((1, 2)))
    return hr.coordinator.get_current_worker_index()


@pytest.mark.catalogue("2.8.15", "3.2.1", "3.2.2", "3.3.6", "4.3.14")
def test_a_killed_worker_loses_or_duplicates_no_write(tasks: Tasks) -> None:
    with tasks.running(in_flight=4, variable_partitioner=HALVES) as (strategy, coordinator):
        with strategy.scope():
            counts = hr.Variable(np.zeros((41, 2)), name="counts")
        values = [
            coordinator.schedule(_step, (counts, [1 + number, 40 - number], 0.002))
            for number in range(40)
        ]
        for ended in (4, 24):
            wait_until(lambda ended=ended: _num_ready(values) >= ended)
            tasks.workers[1].kill()
            tasks.workers[1].start()
        coordinator.join(60)
        at = Counter(coordinator.fetch(values))
        assert set(at) <= {0, 1}
        result = counts.read()
    assert result[0].tolist() == [40.0, 40.0]
    assert result[1:].tolist() == [[2.0, 2.0]] * 40


def _draw(iterator: Any, seconds: float) -> tuple[int, int]:
    element = int(next(iterator))
    time.sleep(seconds)
    return hr.coordinator.get_current_worker_index(), element


@pytest.mark.catalogue("2.8.19", "4.3.18")
def test_an_iterator_resumes_after_its_worker_was_killed(tasks: Tasks) -> None:
    with tasks.running() as (_, coordinator):
        dataset = coordinator.create_per_worker_dataset(
            lambda: hr.Dataset.range(10_000).shuffle(50, seed=7)
        )
        iterator = iter(dataset)
        values = [coordinator.schedule(_draw, (iterator, 0.002)) for _ in range(120)]
        wait_until(lambda: _num_ready(values) >= 40)
        tasks.workers[0].kill()
        tasks.workers[0].begin()
        coordinator.join(60)
        tasks.workers[0].wait_until_ready()
        values += [coordinator.schedule(_draw, (iterator, 0.002)) for _ in range(60)]
        coordinator.join(60)
        drawn: dict[int, list[int]] = {0: [], 1: []}
        for worker, element in coordinator.fetch(values):
            drawn[worker].append(element)
    expected = [int(each) for each in hr.Dataset.range(10_000).shuffle(50, seed=7).take(180)]
    for elements in drawn.values():
        assert sorted(elements) == sorted(expected[: len(elements)])


def test_a_shared_dataset_delivers_each_element_once_despite_a_killed_worker(tasks: Tasks) -> None:
    with tasks.running() as (strategy, coordinator):
        with strategy.scope():
            visits = hr.Variable(np.zeros((300, 1)), name="visits")

        def visit(elements: Any, visits: Any) -> None:
            for _ in range(7):
                visits.scatter_add([int(next(elements))], np.ones((1, 1)))
                time.sleep(0.001)

        shared = coordinator.create_shared_dataset(hr.Dataset.range(300))
        worker = tasks.workers[0]

        def strike() -> None:
            wait_until(lambda: visits.read().sum() >= 50)
            worker.kill()
            worker.start()

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            steps = coordinator.run_epoch(visit, (shared, visits))
        finally:
            thread.join()
        result = visits.read()
    assert 40 <= steps <= 42
    assert result.ravel().tolist() == [1.0] * 300


@pytest.mark.catalogue("2.8.9", "3.2.6", "3.3.18", "3.3.19")
def test_a_result_can_be_fetched_after_its_worker_was_killed(tasks: Tasks) -> None:
    with tasks.running() as (_, coordinator):
        values = [coordinator.schedule(np.ones, ((400, 1000),)) for _ in range(4)]
        coordinator.join(30)
        tasks.workers[0].kill()
        tasks.workers[0].begin()
        assert all(value.fetch().sum() == 400_000 for value in values)
        tasks.workers[0].wait_until_ready()


@pytest.mark.catalogue("2.8.22", "3.2.3-5")
def test_a_lost_parameter_server_is_named_after_the_timeout(tasks: Tasks) -> None:
    with tasks.running(server_timeout=1.0) as (strategy, coordinator):
        with strategy.scope():
            variable = hr.Variable(np.zeros(3), name="lost")
        coordinator.schedule(lambda: variable.assign_add(np.ones(3)))
        coordinator.join(30)
        server = tasks.servers[0]
        server.kill()
        coordinator.schedule(lambda: variable.assign_add(np.ones(3)))
        with pytest.raises(hr.errors.UnavailableError, match="parameter server 0 at"):
            coordinator.join(60)
        server.start()
        assert coordinator.schedule(lambda: 3).fetch(30) == 3


def test_a_write_on_a_functions_thread_is_rejected_or_has_its_key(
    tasks: Tasks,
) -> None:
    with tasks.running() as (strategy, coordinator):
        with strategy.scope():
            total = hr.Variable(0, name="written on threads")

        def on_a_thread(call: Callable[..., Any]) -> None:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(call, total.assign_add, 1).result()

        plain = coordinator.schedule(on_a_thread, (_call,))
        with pytest.raises(FailedPreconditionError, match="on a thread that it started"):
            plain.fetch(30)
        with pytest.raises(FailedPreconditionError, match="on a thread that it started"):
            coordinator.join(30)
        coordinator.schedule(_in_context, (on_a_thread,)).fetch(30)
        assert total.read() == 1


def test_a_process_forked_by_a_function_is_rejected_at_once(tasks: Tasks) -> None:
    with tasks.running() as (strategy, coordinator):
        with strategy.scope():
            total = hr.Variable(0, name="written by a fork")

        def fork() -> list[str]:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                for call in (functools.partial(total.assign_add, 1), total.read):
                    try:
                        call()
                    except FailedPreconditionError as error:
                        os.write(writer, f"{error}\n".encode())
                os._exit(0)
            os.close(writer)
            os.waitpid(child, 0)
            with os.fdopen(reader) as words:
                return words.readlines()

        refusals = coordinator.schedule(fork).fetch(30)
        assert ["was forked inside a function" in each for each in refusals] == [True, True]
        coordinator.schedule(lambda: total.assign_add(2) and None).fetch(30)
        assert total.read() == 2


def _call(function: Callable[..., Any], *args: Any) -> None:
    function(*args)


def _in_context(on_a_thread: Callable[..., Any]) -> None:
    context = contextvars.copy_context()
    on_a_thread(lambda function, value: context.run(_call, function, value))


def _train(counts: Any, weights: Any, optimizer: Any, number: int) -> int:
    """Write with all kinds of write keys. Integers, so that every order has the same sum."""
    counts.scatter_add([number], np.ones((1, 2)))
    optimizer.apply_gradients([(np.full(3, float(number)), weights)])
    counts.assign_add(np.ones_like(counts))
    optimizer.apply_gradients([(np.full(3, float(number)), weights)])
    time.sleep(0.001)
    return number


@pytest.mark.parametrize("waits", [True, False])
def test_a_killed_replicated_server_loses_or_duplicates_no_write(tasks: Tasks, waits: bool) -> None:
    options = {"replication": 2, "variable_partitioner": HALVES}
    with tasks.running(in_flight=4, **options) as (strategy, coordinator):
        with strategy.scope():
            counts = hr.Variable(np.zeros((10, 2)), name=f"replicated counts, {waits}")
            weights = hr.Variable(np.zeros(3), name=f"replicated weights, {waits}")
            optimizer: Any = hr.optimizers.SGD(1.0, name=f"replicated, {waits}")
            if not waits:
                optimizer = hr.optimizers.InBackground(optimizer)
        servers = strategy.cluster.servers

        def are_whole() -> bool:
            return is_replicated([servers.status(index).replicas for index in range(2)])

        scheduled, longest = 0, 0.0
        values: list[Any] = []
        for lost in (0, 1, 0):
            wait_until(are_whole)
            batch = [
                coordinator.schedule(_train, (counts, weights, optimizer, number % 10))
                for number in range(scheduled, scheduled + 60)
            ]
            scheduled += 60
            wait_until(lambda batch=batch: _num_ready(batch) >= 10)
            tasks.servers[lost].kill()
            began, done = time.monotonic(), _num_ready(batch)
            wait_until(lambda batch=batch, done=done: _num_ready(batch) > done + 9)
            longest = max(longest, time.monotonic() - began)
            tasks.servers[lost].start()
            values += batch
        coordinator.join(60)
        numbers = coordinator.fetch(values)
        assert numbers == [number % 10 for number in range(scheduled)]
        assert (counts.read() == scheduled + scheduled // 10).all()
        assert weights.read().tolist() == [-2.0 * sum(numbers)] * 3
        assert optimizer.iterations == 2 * scheduled
    assert longest < 10.0


def test_rounds_count_closures_of_a_killed_worker_once(tasks: Tasks) -> None:
    with tasks.running(mode="sync", round_size=4) as (strategy, coordinator):
        with strategy.scope():
            weights = hr.Variable(np.zeros(3), name="of rounds")
            optimizer = hr.optimizers.SGD(1.0, name="of rounds")

        def step(number: int) -> float:
            before = float(weights.read()[0])
            optimizer.apply_gradients([(np.full(3, 4.0 * number), weights)])
            time.sleep(0.005)
            return before

        values = [coordinator.schedule(step, (number,)) for number in range(60)]
        wait_until(lambda: _num_ready(values) >= 10)
        tasks.workers[0].kill()
        tasks.workers[0].begin()
        coordinator.join(60)
        tasks.workers[0].wait_until_ready()
        sums = [-float(sum(range(4 * (number // 4)))) for number in range(60)]
        assert coordinator.fetch(values) == sums
        assert weights.read().tolist() == [-float(sum(range(60)))] * 3
        assert optimizer.iterations == 15
