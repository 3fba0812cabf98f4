"""Workers that die, hang, never start or run other operations: the others raise and name them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import headrace as hr
from headrace.cluster.resolver import SimpleClusterResolver
from headrace.cluster.spec import ClusterSpec
from headrace.distribute import MultiWorkerMirroredStrategy, PerReplica
from headrace.errors import InvalidArgumentError, UnavailableError
from headrace.transport.security import Security, new_keys
from tests.distribute import scenarios
from tests.distribute.several_workers import Workers, free_ports

pytestmark = pytest.mark.system

AT_ONCE = 15.0
"""Seconds in which a busy machine still does what takes one second."""


@pytest.fixture(scope="module")
def workers():
    found = Workers(3)
    yield found
    found.close()


def start_and_wait(workers, count, path, timeout):
    """Start workers that read forever, and wait until they read."""
    for rank, worker in enumerate(workers.workers[:count]):
        said = str(path / f"worker-{rank}")
        worker.ask(workers.environment(rank, count), scenarios.steps_until_an_error, timeout, said)
    until = time.monotonic() + 60.0
    while len(list(path.glob("worker-*"))) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.catalogue("1.5.6")
def test_a_killed_worker_is_named_to_all_others_at_once(tmp_path):
    workers = Workers(3)
    try:
        start_and_wait(workers, 3, tmp_path, timeout=300.0)
        workers.workers[1].signal(signal.SIGKILL)
        killed = time.monotonic()
        first, second, third = workers.answers()
        assert time.monotonic() - killed < AT_ONCE
        assert second is None
        for text, _, again, _ in (first, third):
            assert f"worker 1 ({workers.addresses[1]}) is lost" in text
            assert again == text
    finally:
        workers.close()


@pytest.mark.catalogue("1.10.11")
def test_a_killed_first_worker_fails_the_others_at_once(tmp_path):
    workers = Workers(3)
    try:
        start_and_wait(workers, 3, tmp_path, timeout=300.0)
        workers.workers[0].signal(signal.SIGKILL)
        killed = time.monotonic()
        first, *others = workers.answers()
        assert time.monotonic() - killed < AT_ONCE
        assert first is None
        for text, _, again, _ in others:
            assert f"worker 0 ({workers.addresses[0]})" in text
            assert "is lost" in text
            assert again == text
    finally:
        workers.close()


def programs(program, count):
    """Run a program as each worker of a cluster; return the addresses, exit codes and outputs."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    workers = []
    for index in range(count):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CONFIG": json.dumps(task)}
        workers.append(
            subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [worker.communicate(timeout=60.0) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return addresses, [(each.returncode, *pair) for each, pair in zip(workers, said, strict=True)]


def test_a_cluster_without_tasks_is_rejected():
    with pytest.raises(InvalidArgumentError, match="'worker', but no task"):
        MultiWorkerMirroredStrategy(SimpleClusterResolver(ClusterSpec({"worker": []})))
    alone = MultiWorkerMirroredStrategy(SimpleClusterResolver(ClusterSpec({})))
    assert alone.num_replicas_in_sync == 1


def test_after_a_killed_first_worker_the_others_exit_without_other_errors():
    program = """
import os
import numpy as np
import headrace as hr

# Exit handlers run in reverse order: this one after the network library has ended.
next(iter(hr.Dataset.range(3)))
strategy = hr.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"])
context = hr.distribute.get_replica_context
try:
    strategy.run(lambda: context().all_reduce("SUM", np.ones(1)))
    if strategy.first_replica == 0:
        os._exit(7)
    strategy.run(lambda: context().all_reduce("SUM", np.ones(1)))
except hr.errors.UnavailableError as error:
    print(error)
"""
    addresses, ((killed, *_), (code, said, errors)) = programs(program, 2)
    assert (killed, code) == (7, 0), errors
    assert f"worker 0 ({addresses[0]})" in said
    assert errors == ""


def test_a_first_worker_that_exits_after_the_setup_is_lost_at_once():
    # Its replies may be in flight when it exits. The timeout for a worker that never started is far
    # above the deadline of this test.
    program = """
import os
import numpy as np
import headrace as hr

context = hr.distribute.get_replica_context
try:
    strategy = hr.distribute.MultiWorkerMirroredStrategy(timeout=600.0)
    if strategy.first_replica == 0:
        os._exit(7)
    strategy.run(lambda: context().all_reduce("SUM", np.ones(1)))
except hr.errors.UnavailableError as error:
    print(error)
"""
    addresses, ((killed, *_), *others) = programs(program, 3)
    assert killed == 7
    for code, said, errors in others:
        assert code == 0, errors
        assert f"worker 0 ({addresses[0]})" in said
        assert "is lost" in said
        assert errors == ""


@pytest.mark.parametrize("lagging", [0, 2])
def test_a_hanging_worker_is_named_after_the_timeout(workers, tmp_path, lagging):
    start_and_wait(workers, 3, tmp_path, timeout=4.0)
    still = workers.workers[lagging]
    still.signal(signal.SIGSTOP)
    others = [each for each in workers.workers if each is not still]
    found = [worker.answer() for worker in others]
    still.signal(signal.SIGCONT)
    late = still.answer()
    name = f"worker {lagging} ({workers.addresses[lagging]})"
    for text, waited, again, _ in found:
        assert name in text, text
        assert 3.5 < waited < AT_ONCE
        assert again == text
    # The session fails for the paused worker, too.
    assert isinstance(late[0], str)


def test_a_pause_shorter_than_the_timeout_has_no_effect(workers, tmp_path):
    said = str(tmp_path / "begun")
    for rank, worker in enumerate(workers.workers[:2]):
        said = str(tmp_path / f"worker-{rank}")
        environment = workers.environment(rank, 2)
        worker.ask(environment, scenarios.steps_until_an_error, 60.0, said, 60, 0.01)
    until = time.monotonic() + 60.0
    while len(list(tmp_path.glob("worker-*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    for worker in workers.workers[:2]:
        worker.signal(signal.SIGSTOP)
        time.sleep(0.7)
        worker.signal(signal.SIGCONT)
    assert [found[0] for found in workers.answers(2)] == [60, 60]


def test_a_worker_that_never_starts_is_named_after_the_timeout(workers):
    # The first worker has the shorter timeout, and fails the session for the other.
    for rank, timeout in ((2, 60.0), (0, 6.0)):
        workers.workers[rank].ask(workers.environment(rank, 3), scenarios.begins, timeout)
    for rank in (0, 2):
        error = workers.workers[rank].answer()
        assert error.kind == "UnavailableError"
        assert f"worker 1 ({workers.addresses[1]}) has not connected yet" in error.text
        assert "in the setup" in error.text


def test_a_worker_with_a_wrong_first_address_raises(workers):
    (port,) = free_ports(1)
    wrong = [f"127.0.0.1:{port}", workers.addresses[1]]
    workers.workers[1].ask(workers.environment(1, 2, wrong), scenarios.begins, 1.0)
    error = workers.workers[1].answer()
    assert error.kind == "UnavailableError"
    assert f"worker 0 (127.0.0.1:{port})" in error.text
    assert "connection refused" in error.text


def test_workers_with_different_clusters_or_replicas_are_rejected(workers):
    for rank, worker in enumerate(workers.workers[:2]):
        worker.ask(workers.environment(rank, 2), scenarios.begins, 20.0, 1 + rank)
    for error in workers.answers(2):
        assert error.kind == "InvalidArgumentError"
        assert "has replicas 1" in error.text
        assert "has replicas 2" in error.text
    workers.workers[0].ask(workers.environment(0, 2), scenarios.begins, 6.0)
    workers.workers[2].ask(workers.environment(2, 3), scenarios.begins, 6.0)
    error = workers.workers[2].answer()
    assert error.kind == "InvalidArgumentError"
    assert "a worker has rank 2" in error.text
    assert workers.workers[0].answer().kind == "UnavailableError"


def test_workers_that_run_different_operations_raise(workers):
    for error in workers.errors(scenarios.does_something_else, count=2):
        assert error.kind == "FailedPreconditionError"
        assert "is in a reduction (SUM)" in error.text
        assert "is in a gather along axis 0" in error.text


@pytest.mark.parametrize("then", ["continues", "leaves"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_run_on_one_worker_is_reported_to_the_others(workers, rank, then):
    found = workers.run(scenarios.fails_on, [rank], then, count=2)
    assert found[rank][:2] == [2, f"no data on {rank}"]
    assert found[1 - rank][0] == 2
    named = f"strategy.run failed on worker {rank} ({workers.addresses[rank]})"
    for text in [*found[1 - rank][1:], *found[rank][2:]]:
        assert named in text
        assert f"ValueError: no data on {rank}" in text
    assert (
        len(found[1 - rank]) == 2
    )  # its own step ends, and is not combined with another operation


def test_workers_continue_after_run_failed_on_all(workers):
    found = workers.run(scenarios.fails_on, [0, 1], "continues", count=2)
    assert found == [[2, f"no data on {rank}", 200] for rank in (0, 1)]


def test_workers_with_different_batch_sizes_raise(workers):
    for error in workers.errors(scenarios.reads_other_batches, count=2):
        assert error.kind == "FailedPreconditionError"
        assert "distributed dataset 1 (batches of 4)" in error.text
        assert "distributed dataset 1 (batches of 6)" in error.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_leaves_while_others_wait_is_named(workers, rank):
    texts = workers.run(scenarios.leaves_early, rank, count=2)
    assert f"worker {rank}" in texts[1 - rank]


@pytest.mark.catalogue("3.28.11-13")
def test_an_evaluator_runs_alone(workers):
    environment = workers.environment(0, 2, task={"type": "evaluator", "index": 0})
    workers.workers[2].ask(environment, scenarios.works_alone)
    first, second = workers.run(scenarios.steps, 4, 4, "AUTO", count=2)
    assert (first, second) == ([[[0, 1]]], [[[2, 3]]])
    assert workers.workers[2].answer() == (2, [[[0, 1], [2, 3]]], 3.0)


# --- in one process ------------------------------------------------------------------------------


def resolver(*addresses, rank=0, task="worker"):
    return SimpleClusterResolver(
        ClusterSpec({"worker": list(addresses)}), task_type=task, task_id=rank
    )


@pytest.mark.catalogue("1.1.14", "1.5.5", "3.14.15")
def test_a_cluster_of_one_worker_opens_no_port(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for found in (None, resolver("nowhere.invalid:1")):
        strategy = MultiWorkerMirroredStrategy(found, devices=["cpu:0", "cpu:1"])
        assert strategy.num_replicas_in_sync == 2
        assert strategy.cluster_resolver is found or found is None
        steps = strategy.distribute_dataset(hr.Dataset.range(4).batch(4))
        assert [[v.tolist() for v in step.values] for step in steps] == [[[0, 1], [2, 3]]]
    assert MultiWorkerMirroredStrategy().run(lambda: 1) == 1


@pytest.mark.catalogue("1.5.4")
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"cluster_resolver": "worker"}, TypeError, "ClusterResolver"),
        ({"framework": "numpi"}, ValueError, "numpi"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "long"}, TypeError, "timeout"),
        ({"security": "keys"}, TypeError, "security"),
        ({"cluster_resolver": resolver("a:1", "b:2")}, ValueError, "`security` is required"),
        ({"cluster_resolver": resolver("a:1", "b:2", rank=2)}, InvalidArgumentError, "task 2"),
        ({"cluster_resolver": resolver("a:1", task=None)}, InvalidArgumentError, "task_type"),
        (
            {
                "cluster_resolver": SimpleClusterResolver(
                    ClusterSpec({"ps": ["a:1"], "worker": ["b:2"]}), task_type="ps", task_id=0
                )
            },
            InvalidArgumentError,
            "ParameterServerStrategy",
        ),
    ],
)
def test_invalid_arguments_are_rejected_at_once(arguments, error, match):
    with pytest.raises(error, match=match):
        MultiWorkerMirroredStrategy(**arguments)


def test_a_long_wait_logs_the_missing_workers(monkeypatch, caplog):
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.3)
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    caplog.set_level(logging.WARNING)
    with pytest.raises(UnavailableError, match=r"worker 1 .* has not connected yet"):
        MultiWorkerMirroredStrategy(resolver(*addresses), timeout=1.0)
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith(
        f"worker 0 ({addresses[0]}) has been waiting for 0 s (timeout 1 s): worker 1"
    )


def test_workers_join_only_with_security_keys(tmp_path):
    keys = Security.load(new_keys(tmp_path / "keys"), "server")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    found = {}

    def work(rank, security):
        strategy = MultiWorkerMirroredStrategy(
            resolver(*addresses, rank=rank), timeout=20.0, security=security
        )
        found[rank] = strategy.reduce("SUM", PerReplica([rank + 1.0]))
        strategy.close()

    threads = [threading.Thread(target=work, args=(rank, keys)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 3.0, 1: 3.0}
