"""Tests of `LocalCluster`: crashed tasks return at their address, killed ones do not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import LocalCluster
from headrace.errors import FailedPreconditionError
from tests.deploy.test_server import goes_quiet, listens, wait_until


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def addresses_of(cluster):
    spec = cluster.cluster_resolver.cluster_spec()
    return {
        (name, index): spec.task_address(name, index)
        for name in spec.jobs
        for index in spec.task_indices(name)
    }


def test_in_process_cluster_runs_all_tasks_and_has_no_own_task():
    with LocalCluster(num_workers=2, num_ps=1, processes=False) as cluster:
        tasks = addresses_of(cluster)
        assert sorted(tasks) == [("ps", 0), ("worker", 0), ("worker", 1)]
        assert len(set(tasks.values())) == 3
        assert all(map(listens, tasks.values()))
        resolver = cluster.cluster_resolver
        assert (resolver.task_type, resolver.task_id, resolver.environment) == (None, None, "local")
        assert cluster.pid("ps", 0) == os.getpid()
    assert all(map(goes_quiet, tasks.values()))
    cluster.stop()
    with pytest.raises(FailedPreconditionError, match="the cluster is closed"):
        cluster.restart("ps", 0)


def test_killed_in_process_task_is_unreachable_until_restarted():
    with LocalCluster(1, 1, processes=False) as cluster:
        address = addresses_of(cluster)["ps", 0]
        cluster.kill("ps", 0)
        cluster.kill("ps", 0)
        assert not cluster.is_running("ps", 0)
        assert cluster.pid("ps", 0) is None
        assert goes_quiet(address)
        cluster.restart("ps", 0)
        assert cluster.is_running("ps", 0)
        assert listens(address)
        cluster.restart("ps", 0)
        assert listens(address)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: LocalCluster(-1, 1), "`num_workers` must be at least 0"),
        (lambda: LocalCluster(1, 1.5), "`num_ps` must be an integer"),
        (lambda: LocalCluster(1, 1, "yes"), "`processes` must be a bool"),
        (lambda: LocalCluster(1, 1, restart=None), "`restart` must be a bool"),
    ],
)
def test_invalid_arguments_are_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_missing_task_is_named():
    with LocalCluster(0, 1, processes=False) as cluster:
        for call in (cluster.kill, cluster.restart, cluster.is_running, cluster.pid):
            with pytest.raises(ValueError, match="the cluster has no 'worker' task 0"):
                call("worker", 0)
            with pytest.raises(TypeError, match="`task_index` must be an integer"):
                call("ps", "0")


@pytest.mark.catalogue("3.2.1", "3.2.2")
def test_every_step_is_done_once_despite_a_worker_restart():
    with LocalCluster(2, 2, processes=False) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            total = hr.Variable(np.zeros(4), name="total")
        coordinator = hr.coordinator.ClusterCoordinator(strategy)

        def step(number):
            total.assign_add(np.full(4, number))
            return number

        values = [coordinator.schedule(step, args=(number,)) for number in range(100)]
        cluster.kill("worker", 1)
        values += [coordinator.schedule(step, args=(number,)) for number in range(100, 150)]
        cluster.restart("worker", 1)
        coordinator.join(timeout=60.0)
        assert [value.fetch() for value in values] == list(range(150))
        assert total.numpy().tolist() == [sum(range(150))] * 4
        coordinator.close()
        strategy.close()


@pytest.mark.system
def test_crashed_processes_are_restarted_but_not_stopped_ones(caplog):
    with (
        caplog.at_level(logging.WARNING),
        LocalCluster(1, 2, environment={"WHO": "us"}) as cluster,
    ):
        tasks = addresses_of(cluster)
        pids = {task: cluster.pid(*task) for task in tasks}
        assert len(set(pids.values()) - {None, os.getpid()}) == 3
        assert all(map(listens, tasks.values()))
        for pid in pids.values():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert {b"WHO=us", b"CUDA_VISIBLE_DEVICES=", b"JAX_PLATFORMS=cpu"} <= set(variables)

        os.kill(pids["ps", 1], signal.SIGKILL)
        cluster.kill("worker", 0)
        os.kill(pids["ps", 0], signal.SIGTERM)

        wait_until(lambda: cluster.pid("ps", 1) not in (pids["ps", 1], None))
        wait_until(lambda: listens(tasks["ps", 1]))
        assert not is_alive(pids["worker", 0])
        wait_until(lambda: not cluster.is_running("ps", 0))
        # The restarted task was missing for longer than a restart of these two would take.
        for task in (("worker", 0), ("ps", 0)):
            assert cluster.pid(*task) is None
            assert not listens(tasks[task])
        cluster.restart("worker", 0)
        assert cluster.pid("worker", 0) not in (pids["worker", 0], None)
        assert listens(tasks["worker", 0])
    [words] = [record.getMessage() for record in caplog.records]
    assert words == (
        f"ps 1 at {tasks['ps', 1]}: process {pids['ps', 1]} ended by SIGKILL; restarting it "
        "in 0.5 s"
    )


_SCRIPT = """
import time
import headrace as hr
cluster = hr.distribute.LocalCluster(0, 1)
print(cluster.pid("ps", 0), flush=True)
time.sleep(600)
"""


@pytest.mark.system
def test_processes_end_with_their_program_even_if_it_is_killed():
    program = subprocess.Popen([sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, text=True)
    with program:
        pid = int(program.stdout.readline())
        assert is_alive(pid)
        program.kill()
    wait_until(lambda: not is_alive(pid))
