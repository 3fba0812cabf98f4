"""The workers of a local cluster: who dies is reported and replaced; what they see."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.service import LocalCluster, distribute
from headrace.service.local_worker import restart_delay
from tests.service.reading import numbers, wait_until


def test_the_delay_before_a_restart_doubles_up_to_half_a_minute() -> None:
    assert [restart_delay(n) for n in (0, 1, 2, 3, 4, 20, 5000)] == [0.5, 0.5, 1, 2, 4, 30, 30]


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if pair)


def ticks(pid: int) -> int:
    """Return the processor time that a process has used, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.system
def test_a_worker_that_dies_by_itself_is_reported_with_its_signal_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), LocalCluster(num_workers=1) as cluster:
        first = cluster.workers[0]
        os.kill(first.pid, signal.SIGSEGV)
        wait_until(lambda: len(cluster.workers) == 2)
        assert first.death == "ended by SIGSEGV"
        assert cluster.workers[1].is_running
    assert f"worker process {first.pid} at {first.address} ended by SIGSEGV" in caplog.text
    assert "another starts in 0.5 s" in caplog.text


@pytest.mark.system
def test_a_worker_that_was_killed_or_stopped_on_purpose_is_not_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=3) as cluster:
        cluster.kill_worker(0)
        cluster.stop_worker(1)
        os.kill(cluster.workers[2].pid, signal.SIGSEGV)
        wait_until(lambda: len(cluster.workers) > 3)
        assert len(cluster.workers) == 4
        deaths = [worker.death for worker in cluster.workers]
        assert deaths == [None, None, "ended by SIGSEGV", None]
    assert caplog.text.count("worker process") == 1


@pytest.mark.system
def test_a_cluster_that_restarts_nobody_reports_a_death_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=1, restart=False) as cluster:
        os.kill(cluster.workers[0].pid, signal.SIGKILL)
        wait_until(lambda: cluster.workers[0].death is not None)
        wait_until(lambda: "0 of the cluster's workers are left" in caplog.text)
    assert len(cluster.workers) == 1


@pytest.mark.system
def test_workers_see_no_accelerators_unless_they_are_given_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with LocalCluster(num_workers=1, environment={"JAX_PLATFORMS": "cuda"}) as cluster:
        seen = environment_of(cluster.workers[0].pid)
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["JAX_PLATFORMS"] == "cuda"


@pytest.mark.system
def test_a_worker_that_gets_sigterm_leaves_by_itself_and_is_not_replaced() -> None:
    with LocalCluster(num_workers=1) as cluster:
        os.kill(cluster.workers[0].pid, signal.SIGTERM)
        wait_until(lambda: not cluster.workers[0].is_running)
        assert cluster.workers[0].death is None
        assert len(cluster.workers) == 1


@pytest.mark.system
def test_a_worker_whose_function_ends_the_process_with_code_0_is_replaced(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def ends_once(path: Path) -> Callable[[Any], Any]:
        def step(x: Any) -> Any:
            if x == 50 and not path.exists():
                path.touch()
                os._exit(0)
            return x

        return step

    with LocalCluster(num_workers=1) as cluster:
        dataset = hr.Dataset.range(100).map(ends_once(tmp_path / "ended"))
        got = numbers(dataset.apply(distribute("distributed_epoch", cluster.target)))
        assert len(got) == len(set(got))
        wait_until(lambda: len(cluster.workers) == 2)
        assert cluster.workers[0].death == "ended with code 0"
    assert "ended with code 0; 0 of the cluster's workers are left" in caplog.text


@pytest.mark.system
def test_workers_whose_functions_hold_the_interpreter_are_closed_in_seconds_together() -> None:
    def holds_the_lock(x: Any) -> Any:
        # A regular expression that backtracks for ever does not let other threads run.
        return re.match(r"(a+)+$", "a" * 64 + "b")

    with LocalCluster(num_workers=3) as cluster:
        dataset = hr.Dataset.range(100).map(holds_the_lock)
        with iter(dataset.apply(distribute("parallel_epochs", cluster.target))) as reader:
            threading.Thread(target=next, args=(reader, None), daemon=True).start()
            workers = cluster.workers
            before = [ticks(worker.pid) for worker in workers]
            wait_until(
                lambda: all(
                    ticks(worker.pid) > ticks_before + 30
                    for worker, ticks_before in zip(workers, before, strict=True)
                )
            )
            since = time.monotonic()
            cluster.close()
            assert time.monotonic() - since < 8.0
        assert not any(worker.is_running for worker in workers)


FORKED = """
import os, sys, time
from headrace.service import LocalCluster
cluster = LocalCluster(num_workers=1)
if os.fork() == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(cluster.workers[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.system
def test_a_forked_child_that_outlives_its_parent_keeps_no_worker() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKED], stdout=subprocess.PIPE, process_group=0
    )
    try:
        out, _ = parent.communicate(timeout=30)
        worker = int(out)
        wait_until(lambda: not Path(f"/proc/{worker}").exists())
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
