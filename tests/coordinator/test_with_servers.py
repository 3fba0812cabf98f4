"""Scheduled functions that read and write variables on parameter servers."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from headrace.parameter_server.operations import Apply, DescribeStore
from headrace.parameter_server.store import ShardStore
from tests.coordinator.in_process import SECONDS, shared_here, wait_until, with_servers


def test_closing_the_strategy_closes_its_coordinator():
    with with_servers() as (strategy, coordinator):
        assert coordinator.schedule(lambda: 1).fetch(SECONDS) == 1
        strategy.close()
        with pytest.raises(CancelledError, match="the coordinator is closed"):
            coordinator.schedule(lambda: 1)


@pytest.mark.catalogue("3.22.2")
def test_the_local_optimizer_counts_steps_of_workers():
    with with_servers() as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(np.zeros(2, np.float32), name="v")
            first, second = hr.optimizers.Adam(), hr.optimizers.Adam()
        assert (first.name, second.name) == ("Adam", "Adam_1")
        assert first.iterations == 0
        for _ in range(3):
            coordinator.schedule(
                lambda: first.apply_gradients([(np.ones(2, np.float32), v)]) and None
            )
        coordinator.join(SECONDS)
        assert (first.iterations, second.iterations) == (3, 0)


def test_a_pickled_coordinator_has_the_workers_strategy():
    with with_servers() as (strategy, coordinator):

        def count() -> int:
            return coordinator.strategy.run(lambda: coordinator.strategy.num_replicas_in_sync)

        assert coordinator.schedule(count).fetch() == strategy.num_replicas_in_sync


@pytest.mark.catalogue("3.1.18", "3.1.43", "3.1.51", "3.1.52", "3.9.23")
def test_writes_of_functions_are_visible_after_join():
    with with_servers() as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(0.0, name="v")
        coordinator.join()
        assert v.numpy() == 0.0
        for _ in range(5):
            coordinator.schedule(lambda: v.assign_add(2.0))
        coordinator.join(SECONDS)
        assert v.numpy() == 10.0
        for _ in range(5):
            coordinator.schedule(lambda variable: variable.assign_add(2.0), (v,))
        for _ in range(3):
            coordinator.join(SECONDS)
        assert v.numpy() == 20.0
        assert coordinator.done()


@pytest.mark.catalogue("2.7.4", "3.1.41", "3.9.24")
def test_a_function_looks_rows_up_in_shards():
    partitioner = hr.distribute.partitioners.FixedShardsPartitioner(3)
    with with_servers(num_ps=3, partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            table = hr.Variable(np.arange(1.0, 11.0).reshape(5, 2), name="table")
        rows = coordinator.schedule(lambda ids: table.gather(ids), (np.array([0, 3, 4]),))
        assert rows.fetch(SECONDS).tolist() == [[1, 2], [7, 8], [9, 10]]


def test_without_staleness_results_equal_one_process_bitwise():
    def step(weights: Any, optimizer: Any, inputs: Any) -> None:
        gradient = (weights.read() @ inputs - 1.0)[:, None] * inputs[None, :]
        optimizer.apply_gradients([(gradient.astype(np.float32), weights)])

    data = np.random.default_rng(3).normal(size=(40, 8)).astype(np.float32)

    def run(num_workers: int, staleness: int | None) -> Any:
        with with_servers(num_workers, staleness=staleness) as (strategy, coordinator):
            with strategy.scope():
                weights = hr.Variable(np.zeros((4, 8), np.float32), name="weights")
                optimizer = hr.optimizers.Adam(0.05)
            for inputs in data:
                coordinator.schedule(step, (weights, optimizer, inputs))
                if staleness is None:
                    coordinator.join(SECONDS)
            coordinator.join(SECONDS)
            return weights.read()

    np.testing.assert_array_equal(run(3, 0), run(1, None))


@pytest.mark.parametrize("staleness", [1, 4])
def test_no_function_reads_values_beyond_the_staleness_bound(staleness: int):
    def step(number: int) -> int:
        missing = number - int(applied.read()[:number].sum())
        time.sleep(0.001 * (number % 4))
        applied.scatter_update([number], [1])
        return missing

    with with_servers(3, staleness=staleness) as (strategy, coordinator):
        with strategy.scope():
            applied = hr.Variable(np.zeros(80, np.int64), name="applied")
        values = [coordinator.schedule(step, (number,)) for number in range(80)]
        gaps = coordinator.fetch(values, SECONDS)
    assert 1 <= max(gaps) <= staleness


@pytest.mark.parametrize("way", ["cancelled", "took too long"])
def test_writes_of_a_cancelled_function_are_rejected(way: str):
    with with_servers(1) as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(0.0, name="v")
        shared_here.update(began=threading.Event(), go_on=threading.Event(), refused=[])
        timeout = None if way == "cancelled" else 0.1
        value = coordinator.schedule(_write_twice, (v,), timeout=timeout)
        if way == "cancelled":
            assert shared_here["began"].wait(SECONDS)
            assert value.cancel()
            with pytest.raises(CancelledError):
                value.fetch()
            assert coordinator.schedule(lambda: v.read()).fetch(SECONDS) == 1.0
            coordinator.join(SECONDS)
        else:
            with pytest.raises(DeadlineExceededError):
                coordinator.join(SECONDS)
        shared_here["go_on"].set()
        wait_until(lambda: shared_here["refused"])
        assert v.read() == 1.0
        assert isinstance(shared_here["refused"][0], CancelledError)


def _write_twice(variable: Any) -> None:
    variable.assign_add(1.0)
    shared_here["began"].set()
    shared_here["go_on"].wait(SECONDS)
    try:
        variable.assign_add(1.0)
    except CancelledError as error:
        shared_here["refused"].append(error)
        raise


def test_write_keys_of_ended_functions_are_forgotten():
    with with_servers(2, 1) as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(0.0, name="v")
        for _ in range(50):
            coordinator.schedule(lambda: v.assign_add(1.0))
        coordinator.join(SECONDS)
        described, _ = strategy.cluster.servers.execute(0, DescribeStore())
        assert described.keys == 0


@pytest.mark.catalogue("3.1.42")
def test_a_strategy_runs_a_function_on_the_replicas_of_a_worker():
    with with_servers(1) as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(1.0, name="v")

        def replica_fn(x: Any) -> tuple[Any, Any]:
            return x + v.read(), x - v.read()

        def step(x: Any) -> Any:
            return strategy.run(replica_fn, args=(x,))

        assert coordinator.schedule(step, (1.0,)).fetch(SECONDS) == (2.0, 0.0)


@pytest.mark.catalogue("2.9.8", "3.1.48-52")
def test_a_dataset_of_the_strategy_is_read_by_workers():
    with with_servers() as (strategy, coordinator):
        per_worker = coordinator.create_per_worker_dataset(
            strategy.distribute_dataset(hr.Dataset.range(1, 11).batch(4))
        )
        first = coordinator.schedule(lambda it: next(it), (iter(per_worker),)).fetch(SECONDS)
        assert np.asarray(first).tolist() == [1, 2, 3, 4]
        made = coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(
                lambda context: hr.Dataset.range(context.num_input_pipelines)
            )
        )
        assert coordinator.schedule(lambda it: int(next(it)), (iter(made),)).fetch(SECONDS) == 0


@pytest.mark.parametrize("in_scope", [True, False])
def test_creating_a_variable_in_a_function_raises(in_scope: bool):
    with with_servers(1) as (strategy, coordinator):

        def make() -> None:
            with strategy.scope() if in_scope else contextlib.nullcontext():
                hr.Variable(0.0, name="inside")

        coordinator.schedule(make)
        with pytest.raises(
            FailedPreconditionError, match="Variable 'inside' is created inside a scheduled fun"
        ):
            coordinator.join(SECONDS)


@pytest.mark.catalogue("3.1.20")
def test_creating_a_variable_in_a_dataset_function_raises():
    with with_servers(1) as (_, coordinator):

        def make() -> Any:
            offset = hr.Variable(1, "offset")
            return hr.Dataset.range(3).map(lambda x: x + offset.read())

        dataset = coordinator.create_per_worker_dataset(make)
        value = coordinator.schedule(next, (iter(dataset),))
        with pytest.raises(ValueError, match=r"Creating variables in dataset_fn .*'offset'"):
            value.fetch(SECONDS)


def test_per_worker_values_may_be_variables_and_functions_have_metrics():
    with with_servers(1) as (_, coordinator):
        calls = coordinator.create_per_worker_values(lambda: hr.Variable(0))

        def count(calls: Any) -> float:
            mean = hr.metrics.Mean()
            mean.update_state([float(calls.assign_add(1)), 4.0])
            return float(mean.result())

        assert [coordinator.schedule(count, (calls,)).fetch(SECONDS) for _ in range(2)] == [2.5, 3]


@pytest.mark.parametrize("initial_value", [0.0, lambda: np.float64(0)])
def test_per_worker_variables_are_read_from_all_workers(initial_value: Any):
    with with_servers(2, 1) as (strategy, coordinator):
        with strategy.scope():
            own = hr.Variable(initial_value, name="own", per_worker_variable=True)
        assert (own.name, own.shape, own.dtype, own.trainable) == ("own", (), np.float64, False)

        def add(variable: Any) -> int:
            variable.assign_add(1.0)
            return hr.coordinator.get_current_worker_index()

        wait_until(lambda: all(each.is_connected for each in coordinator.status().workers))
        added = [0, 0]
        for _ in range(10):
            added[coordinator.schedule(add, (own,)).fetch(SECONDS)] += 1
            assert own.read_all() == added
        assert coordinator.schedule(lambda: own.read()).fetch(SECONDS) in added
        with pytest.raises(
            FailedPreconditionError, match=r"`assign_add` is available only .* read_all"
        ):
            own.assign_add(1.0)
        with pytest.raises(FailedPreconditionError, match="inside a scheduled function"):
            coordinator.schedule(
                lambda: hr.Variable(0.0, per_worker_variable=True, name="inside")
            ).fetch(SECONDS)
    with strategy.scope(), pytest.raises(ValueError, match="must be a number"):
        hr.Variable("text", per_worker_variable=True)


def test_in_a_caching_scope_a_variable_keeps_its_first_value():
    with with_servers(1, 2, hr.distribute.partitioners.FixedShardsPartitioner(2)) as (strategy, _):
        with strategy.scope():
            v = hr.Variable(np.arange(4.0), name="v")
        with hr.distribute.cache_variable_reads():
            assert v.gather([1]).tolist() == [1]
            first = v.read()
            first[:] = 9  # each reader gets its own array
            v.assign(np.full(4, 5.0))
            assert (v * 2).tolist() == [0, 2, 4, 6]
            assert v.gather([[3, 3], [0, 1]]).tolist() == [[3, 3], [0, 1]]
            assert v[2] == 2
            with pytest.raises(ValueError, match="cannot be nested"):
                hr.distribute.cache_variable_reads().__enter__()
        assert v.read().tolist() == [5] * 4
        with hr.distribute.cache_variable_reads():
            assert v.read().tolist() == [5] * 4


def test_functions_of_per_worker_values_cannot_write():
    with with_servers(1) as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(3.0, name="v")
        read = coordinator.create_per_worker_values(lambda: float(v.read()))
        assert coordinator.schedule(lambda value: value, (read,)).fetch(SECONDS) == 3.0
        wrote = coordinator.create_per_worker_values(lambda: v.assign_add(1.0))
        with pytest.raises(FailedPreconditionError, match="may read variables but not write them"):
            coordinator.schedule(lambda value: value, (wrote,)).fetch(SECONDS)
        assert v.read() == 3.0


def test_a_shared_dataset_trains_a_variable():
    with with_servers() as (strategy, coordinator):
        with strategy.scope():
            seen = hr.Variable(np.zeros(64), name="seen")

        def step(elements: Any) -> None:
            for _ in range(2):
                ids = next(elements)
                seen.scatter_add(ids, np.ones(len(ids)))

        shared = coordinator.create_shared_dataset(hr.Dataset.range(64).shuffle(64).batch(4))
        for epoch in (1, 2):
            assert 6 <= coordinator.run_epoch(step, (shared,)) <= 8
            assert seen.read().tolist() == [float(epoch)] * 64


def test_evaluating_an_infinite_dataset_raises():
    with (
        with_servers() as (_, coordinator),
        pytest.raises(ValueError, match="must be finite"),
    ):
        coordinator.evaluate(len, hr.Dataset.range(3).repeat(), 2, sum)


@pytest.mark.parametrize("options", [{}, {"mode": "sync", "round_size": 2}])
def test_background_steps_are_done_when_their_function_ends(options: dict[str, Any]) -> None:
    with with_servers(**options) as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(np.zeros(2, np.float32), name="v")
            later = hr.optimizers.InBackground(hr.optimizers.SGD(1.0), in_flight=3)

        def step(times: int) -> int:
            for _ in range(times):
                later.apply_gradients([(np.ones(2, np.float32), v)])
            return times

        values = [coordinator.schedule(step, (times,)) for times in (1, 5, 0, 4)]
        coordinator.join()
        assert coordinator.fetch(values) == [1, 5, 0, 4]
        if not options:
            assert v.read().tolist() == [-10, -10]
            assert later.iterations == 10


def test_a_failed_background_step_fails_its_function() -> None:
    with with_servers() as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(np.zeros(2, np.float32), name="v")
            later = hr.optimizers.InBackground(hr.optimizers.SGD(1.0))

        def step(value: float) -> None:
            later.apply_gradients([(np.full(2, value, np.float32), v)])
            if value == 2:
                raise KeyError("of the function")

        failing = coordinator.schedule(step, (float("nan"),))
        with pytest.raises(Exception, match="not finite"):
            failing.fetch(SECONDS)
        with pytest.raises(Exception, match="not finite"):
            coordinator.join()
        failing = coordinator.schedule(step, (2.0,))
        with pytest.raises(Exception, match="of the function"):
            failing.fetch(SECONDS)
        with pytest.raises(Exception, match="of the function"):
            coordinator.join()
        coordinator.schedule(step, (1.0,)).fetch(SECONDS)
        assert v.read().tolist() == [-3, -3], "steps started before the error are applied"


def test_a_failed_background_step_is_raised_at_the_end_of_the_data(monkeypatch: Any) -> None:
    carry_out = ShardStore.execute

    def fail(self: ShardStore, operation: Any, arrays: Any) -> Any:
        if isinstance(operation, Apply):
            raise InvalidArgumentError("no such step")
        return carry_out(self, operation, arrays)

    monkeypatch.setattr(ShardStore, "execute", fail)
    with with_servers(1) as (strategy, coordinator):
        with strategy.scope():
            v = hr.Variable(np.zeros(2, np.float32), name="v")
            later = hr.optimizers.InBackground(hr.optimizers.SGD(1.0), in_flight=9)

        def take(elements: Any) -> None:
            while True:
                next(elements)
                later.apply_gradients([(np.ones(2, np.float32), v)])

        shared = coordinator.create_shared_dataset(hr.Dataset.range(3))
        with pytest.raises(InvalidArgumentError, match="no such step"):
            coordinator.run_epoch(take, (shared,))
