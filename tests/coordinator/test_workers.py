"""Replacement of coordinators, and workers that are added, removed, lost and registered."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import weakref
from typing import Any

import pytest

import headrace as hr
from headrace.coordinator import (
    ClosureWorker,
    ClusterCoordinator,
    coordinator_server,
    get_current_worker_index,
)
from headrace.coordinator.cluster import Workers
from headrace.coordinator.coordinator_server import (
    CoordinatorReply,
    RegisterTrainingWorker,
    TrainingWorkerRegistered,
)
from headrace.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
)
from headrace.transport import zeromq
from headrace.transport.security import Security, new_keys
from tests.coordinator.in_process import (
    SECONDS,
    begin_and_wait,
    coordinating,
    divide,
    shared_here,
    wait_for_release,
    wait_until,
)


@pytest.mark.catalogue("1.9.1", "3.1.14")
def test_a_strategy_has_one_coordinator():
    with ClosureWorker(0) as worker:
        strategy = Workers([worker.address])
        first = ClusterCoordinator(strategy)
        assert ClusterCoordinator(strategy) is first
        assert first.strategy is strategy
        with pytest.raises(ValueError, match="already has a coordinator"):
            ClusterCoordinator(strategy, closures_in_flight=5)
        first.close()
        second = ClusterCoordinator(strategy, closures_in_flight=5)
        assert second is not first
        assert ClusterCoordinator(strategy) is second, "omitted options do not differ"
        assert second.schedule(divide, (1, 1)).fetch(SECONDS) == 1.0
        second.close()


@pytest.mark.catalogue("2.8.1")
def test_an_unreferenced_coordinator_closes():
    with ClosureWorker(0) as worker:
        coordinator = ClusterCoordinator(Workers([worker.address]))
        coordinator.schedule(divide, (1, 1)).fetch(SECONDS)
        gone = weakref.ref(coordinator)
        del coordinator
        gc.collect()
        assert gone() is None


@pytest.mark.catalogue("1.9.1", "4.3.20")
@pytest.mark.parametrize("strategy", [None, "x", hr.distribute.MirroredStrategy(["cpu:0"])])
def test_other_strategies_are_rejected(strategy: Any):
    with pytest.raises(ValueError, match="Only a ParameterServerStrategy is supported"):
        ClusterCoordinator(strategy)


@pytest.mark.catalogue("4.3.19")
def test_a_newer_coordinator_takes_the_workers_and_the_older_one_fails(
    caplog: pytest.LogCaptureFixture,
):
    with ClosureWorker(0) as worker:
        old = ClusterCoordinator(Workers([worker.address]))
        assert old.schedule(divide, (1, 1)).fetch(SECONDS) == 1.0
        with ClusterCoordinator(Workers([worker.address])) as new:
            assert new.schedule(divide, (2, 1)).fetch(SECONDS) == 2.0
            # Even without a call of the old coordinator.
            wait_until(lambda: "this coordinator was superseded" in caplog.text)
            other = f"a newer coordinator, in process [^ ]*:{os.getpid()} "
            assert re.search(other, caplog.text)
            with pytest.raises(AbortedError, match=other):
                old.schedule(divide, (3, 1)).fetch(SECONDS)
            assert new.schedule(divide, (4, 1)).fetch(SECONDS) == 4.0
        old.close()


# --- workers come and go -----------------------------------------------------------------------


@pytest.mark.catalogue("1.9.5")
def test_a_function_gets_the_worker_index(coordinator: ClusterCoordinator):
    seen: set[int] = set()
    wait_until(
        lambda: seen.add(coordinator.schedule(get_current_worker_index).fetch()) or len(seen) == 2
    )
    assert seen == {0, 1}
    with pytest.raises(FailedPreconditionError, match="Cannot retrieve the worker index"):
        get_current_worker_index()


@pytest.mark.catalogue("1.6.3", "2.8.18")
def test_functions_wait_for_a_worker_that_starts_later():
    with ClosureWorker(0) as worker:
        address = worker.address
    with ClusterCoordinator(Workers([address])) as coordinator:
        value = coordinator.schedule(divide, (1, 1))
        with pytest.raises(DeadlineExceededError, match=r"worker 0 .* has not been connected for"):
            value.fetch(0.2)
        with ClosureWorker(0, port=int(address.rpartition(":")[2])):
            assert value.fetch(SECONDS) == 1.0


def test_a_worker_that_stops_loses_a_function_that_runs_once():
    begun, release = threading.Event(), threading.Event()
    shared_here.update(begun=begun, release=release)
    with ClosureWorker(0) as worker, ClusterCoordinator(Workers([worker.address])) as coordinator:
        value = coordinator.schedule(begin_and_wait, retries=1)
        assert begun.wait(SECONDS)
        worker.stop()  # takes a while, since the function is running
        release.set()
        with ClosureWorker(0, port=int(worker.address.rpartition(":")[2])):
            assert value.fetch(SECONDS) == "done"


@pytest.mark.catalogue("3.5.1", "3.5.2", "3.5.4")
def test_workers_are_added_and_removed_while_functions_run(coordinator: ClusterCoordinator):
    values = [coordinator.schedule(_where, (0.01,)) for _ in range(100)]
    with ClosureWorker(2) as third:
        assert coordinator.add_worker(third.address) == 2
        coordinator.remove_worker(0)
        wait_until(lambda: 0 not in coordinator.workers)
        values += [coordinator.schedule(_where, (0.005,)) for _ in range(20)]
        coordinator.join(SECONDS)
        assert set(coordinator.workers) == {1, 2}
        seen = coordinator.fetch(values)
        assert set(seen[100:]) <= {1, 2}
        assert 2 in seen
        coordinator.remove_worker(2)
        wait_until(lambda: set(coordinator.workers) == {1})
        assert coordinator.schedule(_where, (0.0,)).fetch(SECONDS) == 1
        with pytest.raises(ValueError, match="no worker 9; known workers"):
            coordinator.remove_worker(9)


@pytest.mark.catalogue("3.5.1", "3.5.2")
def test_workers_register_with_a_listening_coordinator():
    with ClosureWorker(0) as first, ClusterCoordinator(Workers([first.address])) as coordinator:
        address = coordinator.listen()
        with ClosureWorker(1, coordinator=address) as second:
            wait_until(lambda: coordinator.workers == {0: first.address, 1: second.address})
            wait_until(lambda: all(each.is_connected for each in coordinator.status().workers))
            coordinator.remove_worker(0)
            coordinator.remove_worker(1)
            wait_until(lambda: coordinator.workers == {})
            again = RegisterTrainingWorker(address=second.address, process_id="another process")
            channel = zeromq.connect(address, reply_type=CoordinatorReply)
            answer, _ = channel.call(again, timeout=SECONDS)
            channel.close()
            assert answer == TrainingWorkerRegistered(worker=2)
            assert coordinator.schedule(_where, (0.0,)).fetch(SECONDS) == 2


def test_a_worker_warns_if_its_coordinator_does_not_reply(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    tries, said = [], threading.Event()

    class Silent:
        def call(self, message: Any, timeout: float) -> None:
            tries.append(message)
            if "no reply from the coordinator at host:1" in caplog.text or len(tries) == 20:
                said.set()
            time.sleep(0.1)
            raise DeadlineExceededError("no answer")

        def close(self) -> None:
            pass

    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.2)
    monkeypatch.setattr(coordinator_server, "_REGISTER_INTERVAL", 0.01)
    monkeypatch.setattr(coordinator_server.zeromq, "connect", lambda *_, **__: Silent())
    looking = coordinator_server.WorkerRegistration("host:1", "host:2", None)
    assert said.wait(SECONDS)
    looking.close()
    looking._thread.join(SECONDS)
    assert len(tries) < 10


def test_the_status_lists_running_functions_and_workers(coordinator: ClusterCoordinator):
    shared_here["release"] = threading.Event()
    values = [coordinator.schedule(wait_for_release) for _ in range(8)]
    wait_until(lambda: sum(len(each.running) for each in coordinator.status().workers) == 2)
    status = coordinator.status()
    assert status.num_unfinished == 8
    assert status.num_waiting == 8 - sum(each.num_in_flight for each in status.workers)
    assert "wait_for_release" in status.workers[0].running[0][0]
    shared_here["release"].set()
    coordinator.fetch(values)
    coordinator.join(SECONDS)
    assert coordinator.status().num_finished >= 8
    assert coordinator.status().staleness_gap == 0


def _where(seconds: float) -> int:
    time.sleep(seconds)
    return get_current_worker_index()


def test_remote_workers_require_security_keys(tmp_path: Any):
    keys = new_keys(tmp_path / "keys")
    strangers = new_keys(tmp_path / "others")
    with pytest.raises(ValueError, match="requires security="):
        ClosureWorker(0, host="0.0.0.0")
    server = Security.load(keys, "server")
    with ClosureWorker(0, security=server) as worker:
        known = Workers([worker.address], security=Security.load(keys, "client"))
        with ClusterCoordinator(known) as coordinator:
            assert coordinator.schedule(divide, (1, 1)).fetch(SECONDS) == 1.0
        for security in (None, Security.load(strangers, "client")):
            stranger = Workers([worker.address], security=security)
            with ClusterCoordinator(stranger) as coordinator:
                value = coordinator.schedule(divide, (1, 1))
                with pytest.raises(DeadlineExceededError, match=r"worker 0 .* has not been"):
                    value.fetch(0.5)


def test_scheduling_in_a_loop_lets_workers_start():
    before = sys.getswitchinterval()
    with coordinating(1) as coordinator:
        coordinator.schedule(divide, (1, 1)).fetch(SECONDS)
        sys.setswitchinterval(10.0)  # this thread keeps the interpreter
        try:
            for _ in range(500):
                coordinator.schedule(divide, (1, 1))
            sent = coordinator._runner.core.stats.newest_number
        finally:
            sys.setswitchinterval(before)
        coordinator.join(SECONDS)
    assert sent > 1
