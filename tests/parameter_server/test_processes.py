"""Parameter servers in separate processes that are killed, paused and restarted."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import headrace as hr
from headrace.errors import AbortedError
from headrace.parameter_server.optimizer_steps import ClosureServers
from headrace.parameter_server.partitioners import FixedShardsPartitioner
from headrace.parameter_server.write_context import ClosureRun, write_as
from tests.coordinator.processes import Task
from tests.parameter_server.small_cluster import strategy_at, until

F32 = np.float32
MIB = 1 << 20
#: Coordinator terms; several tests share the servers, which refuse earlier terms.
TERMS = itertools.count(1)

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Task]]:
    with Task("ps", 0) as first, Task("ps", 1) as second:
        first.wait_until_ready()
        second.wait_until_ready()
        yield [first, second]


@pytest.fixture
def strategy(processes):
    with strategy_at(processes, FixedShardsPartitioner(2)) as made:
        yield made


def test_large_values_round_trip(strategy):
    value = np.arange(2 * MIB, dtype=F32).reshape(-1, 64)
    with strategy.scope():
        v = hr.Variable(value, name="large")
    kept = [v.read() for _ in range(6)]
    for _ in range(3):
        hr.optimizers.SGD(1.0, name="large").apply_gradients([(np.ones_like(value), v)])
    assert all(np.array_equal(each, value) for each in kept)
    assert np.array_equal(v.read(), value - 3)
    ids = np.random.default_rng(1).integers(0, len(value), 20_000)
    assert np.array_equal(v.gather(ids), (value - 3)[ids])


def test_a_read_never_sees_a_partial_write(strategy, processes):
    with strategy_at(processes[:1]) as whole, ThreadPoolExecutor(1) as threads:
        with whole.scope():
            v = hr.Variable(np.zeros(MIB, F32), name="whole")

        def write():
            for number in range(30):
                v.assign(np.full(MIB, number, F32))

        writing = threads.submit(write)
        reads = 0
        while not writing.done() or not reads:
            found = v.read()
            assert found[0] == found[-1] == found[MIB // 2]
            assert (found == found[0]).all()
            reads += 1


def test_requests_wait_for_a_paused_server(strategy, processes):
    with strategy.scope():
        v = hr.Variable(np.zeros(4, F32), name="paused")
    processes[1].pause()
    thread = threading.Thread(target=lambda: v.assign_add(np.ones(4)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    processes[1].resume()
    thread.join(60)
    assert v.read().tolist() == [1, 1, 1, 1]


@pytest.fixture
def killable() -> Iterator[Task]:
    """A server that a test may kill; the test must restart it."""
    with Task("ps", 0) as process:
        process.wait_until_ready()
        yield process


def test_requests_wait_for_a_killed_server_to_be_restored(processes, killable, caplog):
    servers, halves = [killable, processes[1]], FixedShardsPartitioner(2)
    start, term = np.arange(8, dtype=F32), next(TERMS)
    with strategy_at(servers, halves) as strategy, strategy_at(servers, halves) as other:
        with strategy.scope():
            v = hr.Variable(start, name="killed")
        killable.kill()

        def train():
            with write_as(ClosureRun(term, 1, 0)):
                v.assign_add(np.ones(8))
                return v.read().tolist()

        def restore(server):
            with other.scope():
                hr.Variable(start * 10, name="killed")

        strategy.cluster.servers.states.on_restart(restore)
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(train)
            time.sleep(0.2)
            assert not found.done(), "it waits for the server"
            killable.start()
            assert found.result(60) == [1, 11, 21, 31, 5, 6, 7, 8]
    assert f"parameter server 0 at {killable.address} was restarted" in caplog.text


def test_a_server_killed_during_training_restores_the_last_increment(processes, killable, tmp_path):
    servers, halves = [killable, processes[1]], FixedShardsPartitioner(2)
    with strategy_at(servers, halves) as strategy, ExitStack() as stack:
        with strategy.scope():
            w = hr.Variable(np.zeros((1000, 64), F32), name="trained")
        sgd = hr.optimizers.SGD(1.0, name="trained")
        checkpoint = hr.Checkpoint(w=w, sgd=sgd)
        manager = stack.enter_context(
            hr.CheckpointManager(checkpoint, tmp_path, incremental_seconds=0.1)
        )
        done = threading.Event()
        steps, term = 0, next(TERMS)

        def train():
            nonlocal steps
            while not done.is_set():
                with write_as(ClosureRun(term, steps, 0)):
                    sgd.apply_gradients([(np.ones((1000, 64), F32), w)])
                steps += 1

        thread = threading.Thread(target=train)
        thread.start()
        until(lambda: manager.latest_increment)
        killable.kill()
        at_loss = steps
        killable.start()
        until(lambda: steps > at_loss + 20, 30)
        done.set()
        thread.join(10)
        value = w.read()
        # The running server lost nothing. All rows of the other have the same state, and its lost
        # updates were pushed between the last increment and the loss.
        assert (value[500:] == -steps).all()
        assert (value[:500] == value[0, 0]).all()
        assert at_loss < steps
        assert manager.lost_updates <= value[0, 0] + steps <= at_loss + 1
        path = manager.save()
        with strategy.scope():
            other = hr.Variable(np.zeros((1000, 64), F32), name="read")
        hr.Checkpoint(w=other).restore(path)
        assert np.array_equal(other.read(), value)


@pytest.mark.catalogue("4.3.19")
def test_a_new_coordinator_restores_servers_and_fences_the_previous_one(processes, tmp_path):
    with strategy_at(processes) as old, strategy_at(processes) as new:
        before, now = next(TERMS), next(TERMS)
        with old.scope():
            v = hr.Variable(np.zeros(4, F32), name="fenced")
        ClosureServers(old.cluster.servers, before)
        v.assign(np.full(4, 7))
        hr.CheckpointManager(hr.Checkpoint(v=v), tmp_path).save()
        with write_as(ClosureRun(before, 5, 0)):
            v.assign_add(np.ones(4))
        ClosureServers(new.cluster.servers, now)
        with new.scope():
            again = hr.Variable(np.zeros(4, F32), name="fenced")
        hr.CheckpointManager(hr.Checkpoint(v=again), tmp_path).restore_or_initialize()
        with (
            write_as(ClosureRun(before, 6, 0)),
            pytest.raises(AbortedError, match="coordinator term"),
        ):
            v.assign_add(np.ones(4))
        with write_as(ClosureRun(now, 5, 0)):
            again.assign_add(np.ones(4))
        assert again.read().tolist() == [8] * 4
