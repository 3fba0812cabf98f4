"""The stats of a service that runs: what is made, who waits, and what for."""

from __future__ import annotations

import time

import pytest

import headrace as hr
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    ShardingPolicy,
    distribute,
)


def slowly(x):
    time.sleep(0.01)
    return x


def poll(found, seconds=20.0):
    """Return what `found` returns as soon as that is something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        result = found()
        if result:
            return result
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def test_slow_workers_show_as_waiting_clients_and_a_step_that_takes_the_time():
    with DispatchServer() as dispatcher, worker_of(dispatcher):
        dataset = hr.Dataset.range(100_000).map(slowly).batch(2)
        share = distribute(ShardingPolicy.DYNAMIC, dispatcher.target, job_name="training")
        with iter(dataset.apply(share)) as batches:

            def found():
                for _ in range(20):
                    next(batches)
                (job,) = dispatcher.stats().jobs
                (iteration,) = job.passes
                is_known = iteration.clients[0].waiting > 0.5 and len(iteration.stages) > 0
                return is_known and iteration

            iteration = poll(found)
    assert iteration.stages[0].stage.startswith("map at test_stats.py:")
    assert iteration.elements_per_second > 0
    assert iteration.units == 50_000
    assert 0 < iteration.progress < 1
    assert iteration.seconds_left > 1
    (client,) = iteration.clients
    assert client.waited > 0
    assert client.elements > 0


def test_a_client_that_does_not_read_shows_as_a_task_that_waits_for_clients():
    with DispatchServer() as dispatcher, worker_of(dispatcher):
        share = distribute("parallel_epochs", dispatcher.target)
        with iter(hr.Dataset.range(10_000_000).batch(100).apply(share)) as batches:
            next(batches)

            def found():
                (job,) = dispatcher.stats().jobs
                (task,) = job.passes[0].tasks
                return task.waits_for == "clients" and task.buffers and task

            task = poll(found)
    assert task.elements > 0
    assert task.buffer_bytes > 0


def test_lost_workers_are_in_the_stats(tmp_path):
    with LocalCluster(num_workers=1, processes=True) as cluster:
        target = cluster.target
        share = distribute(ShardingPolicy.DYNAMIC, target)
        with iter(hr.Dataset.range(1_000_000).map(slowly).apply(share)) as elements:
            next(elements)
            cluster.kill_worker(0)
            stats = poll(lambda: (s := cluster.dispatcher.stats()).workers_lost and s)
    assert stats.last_lost[0].reason


def test_a_server_that_was_not_started_has_none():
    with pytest.raises(RuntimeError, match="before it is started"):
        DispatchServer(DispatcherConfig(), start=False).stats()


def worker_of(dispatcher):
    address = dispatcher.target.removeprefix("tcp://")
    return hr.service.WorkerServer(hr.service.WorkerConfig(address))
