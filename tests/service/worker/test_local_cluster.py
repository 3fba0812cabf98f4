"""Workers of a local cluster: crashes, replacement and environment."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, UnavailableError
from headrace.service import LocalCluster, distribute
from tests.service.reading import numbers, wait_until
from tests.stopwatch import Stopwatch


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if pair)


def ticks(pid: int) -> int:
    """Return the processor time that a process has used, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.system
def test_a_crashed_worker_is_reported_with_its_signal_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), LocalCluster(num_workers=1) as cluster:
        first = cluster.workers[0]
        os.kill(first.pid, signal.SIGSEGV)
        wait_until(lambda: len(cluster.workers) == 2)
        assert first.exit_reason == "ended by SIGSEGV"
        assert cluster.workers[1].is_running
    assert f"worker process {first.pid} ({first.address}) ended by SIGSEGV" in caplog.text
    assert "replacement starts in 0.5 s" in caplog.text


@pytest.mark.system
def test_a_deliberately_killed_or_stopped_worker_is_not_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=3) as cluster:
        cluster.kill_worker(0)
        cluster.stop_worker(1)
        os.kill(cluster.workers[2].pid, signal.SIGSEGV)
        wait_until(lambda: len(cluster.workers) > 3)
        assert len(cluster.workers) == 4
        deaths = [worker.exit_reason for worker in cluster.workers]
        assert deaths == [None, None, "ended by SIGSEGV", None]
    assert caplog.text.count("worker process") == 1


@pytest.mark.system
def test_a_worker_index_out_of_range_is_rejected() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        with pytest.raises(ValueError, match="`index` must be at most 0, but got 7"):
            cluster.stop_worker(7)
        with pytest.raises(FailedPreconditionError, match="runs in this process"):
            cluster.kill_worker(0)


@pytest.mark.system
def test_a_missing_preload_module_is_reported_in_one_line() -> None:
    with pytest.raises(UnavailableError) as caught:
        LocalCluster(num_workers=1, preload=("no_such_module",))
    first, second = str(caught.value).splitlines()
    assert first.endswith("ended with code 1. Its output:")
    assert second.startswith("preload='no_such_module': No module named 'no_such_module'; is its")


@pytest.mark.system
def test_a_cluster_without_restarts_still_reports_a_crash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=1, restart=False) as cluster:
        os.kill(cluster.workers[0].pid, signal.SIGKILL)
        wait_until(lambda: cluster.workers[0].exit_reason is not None)
        wait_until(lambda: "remaining workers: 0" in caplog.text)
    assert len(cluster.workers) == 1


@pytest.mark.system
def test_workers_see_no_accelerators_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with LocalCluster(num_workers=1, environment={"JAX_PLATFORMS": "cuda"}) as cluster:
        seen = environment_of(cluster.workers[0].pid)
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["JAX_PLATFORMS"] == "cuda"


@pytest.mark.system
def test_a_worker_that_exits_on_sigterm_is_not_replaced() -> None:
    with LocalCluster(num_workers=1) as cluster:
        os.kill(cluster.workers[0].pid, signal.SIGTERM)
        wait_until(lambda: not cluster.workers[0].is_running)
        assert cluster.workers[0].exit_reason is None
        assert len(cluster.workers) == 1


@pytest.mark.system
@pytest.mark.parametrize("code", [0, 128 + signal.SIGTERM])
def test_a_worker_ended_by_its_function_is_replaced_for_any_exit_code(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, code: int
) -> None:
    def ends_once(path: Path) -> Callable[[Any], Any]:
        def step(x: Any) -> Any:
            if x == 50 and not path.exists():
                path.touch()
                os._exit(code)
            return x

        return step

    with LocalCluster(num_workers=1) as cluster:
        dataset = hr.Dataset.range(100).map(ends_once(tmp_path / "ended"))
        got = numbers(dataset.apply(distribute("distributed_epoch", cluster.target)))
        assert len(got) == len(set(got))
        wait_until(lambda: len(cluster.workers) == 2)
        assert cluster.workers[0].exit_reason == f"ended with code {code}"
    assert f"ended with code {code}; remaining workers: 0" in caplog.text


@pytest.mark.system
def test_workers_blocked_by_the_interpreter_lock_are_closed_in_seconds() -> None:
    def holds_the_lock(x: Any) -> Any:
        # A regular expression that backtracks forever does not release the interpreter lock.
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
            with Stopwatch() as watch:
                cluster.stop()
            assert watch.seconds < 8.0
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
def test_a_forked_child_that_outlives_its_parent_keeps_no_worker_alive() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKED], stdout=subprocess.PIPE, process_group=0
    )
    try:
        out, _ = parent.communicate(timeout=30)
        worker = int(out)
        wait_until(lambda: not Path(f"/proc/{worker}").exists())
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


NOT_CLOSED = """
import os, sys
import headrace as hr
cluster = hr.service.LocalCluster(num_workers=2)
dataset = hr.Dataset.range(10**9).apply(hr.service.distribute("distributed_epoch", cluster.target))
iterator = iter(dataset)
next(iterator)
if "fork" in sys.argv and (child := os.fork()):
    os.waitpid(child, 0)
    assert all(worker.is_running for worker in cluster.workers)
    next(iterator)
"""


@pytest.mark.system
@pytest.mark.parametrize("how", ["alone", "fork"])
def test_an_unclosed_cluster_ends_with_the_program_silently(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NOT_CLOSED, how],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
