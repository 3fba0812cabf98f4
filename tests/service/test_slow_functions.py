"""Functions that hold the interpreter's lock, and functions that never return."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    WorkerConfig,
    WorkerServer,
    distribute,
)
from tests.service.reading import numbers

pytestmark = pytest.mark.system


def hold_the_lock(x: Any) -> Any:
    """Hold the interpreter's lock for three seconds at two of the elements."""
    if int(x) in (30, 60):
        ctypes.PyDLL(None).usleep(3_000_000)
    return x


def test_worker_whose_function_holds_the_interpreter_lock_keeps_its_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=2, worker_timeout_ms=800) as cluster:
        dataset = hr.Dataset.range(100).map(hold_the_lock)
        got = numbers(dataset.apply(distribute("distributed_epoch", cluster.target)))
    assert Counter(got) == Counter(range(100))
    assert "lost: " not in caplog.text


@pytest.mark.parametrize("holds_the_lock", [True, False])
def test_worker_process_with_a_blocked_function_is_replaced(
    holds_the_lock: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    been_here = str(tmp_path / "been here")

    def hang_once(x: Any) -> Any:
        if int(x) == 30 and not os.path.exists(been_here):
            os.mkdir(been_here)
            if holds_the_lock:
                ctypes.PyDLL(None).sleep(3600)
            while True:
                threading.Event().wait(0.2)
        return x

    with LocalCluster(num_workers=2, hang_timeout_ms=1500) as cluster:
        dataset = hr.Dataset.range(100).prefetch(2).map(hang_once)
        got = numbers(dataset.apply(distribute("distributed_epoch", cluster.target)))
        assert [worker.is_running for worker in cluster.workers].count(False) == 1
    assert sorted(got) == list(range(100))
    said = capfd.readouterr().err
    named = re.search(r"task \d+ \(last assigned splits: \d+ to \d+\) has made no", said)
    assert named or holds_the_lock
    assert "in hang_once" in said


@pytest.mark.parametrize("hangs", [True, False], ids=["one call", "many calls"])
def test_worker_server_logs_a_call_that_does_not_return(
    hangs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    released = str(tmp_path / "released")

    def slow(x: Any) -> Any:
        # Many short calls fill the buffer of the shuffle, without any element to send for seconds.
        while hangs and not os.path.exists(released):
            time.sleep(0.01)
        time.sleep(0.0 if hangs else 0.04)
        return x

    def reports() -> list[str]:
        said = [each.getMessage() for each in caplog.records]
        return [each for each in said if "has made no progress for" in each]

    dispatcher = DispatchServer(DispatcherConfig())
    with (
        dispatcher,
        WorkerServer(WorkerConfig(dispatcher.target.split("://")[1], hang_timeout_ms=700)),
    ):
        service = distribute("parallel_epochs", dispatcher.target)
        elements = iter(hr.Dataset.range(60).map(slow).shuffle(60, seed=1).apply(service))
        reader = threading.Thread(target=next, args=(elements,))
        reader.start()
        deadline = time.monotonic() + 30
        while hangs and not reports() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.mkdir(released)
        reader.join(30)
        assert len(numbers(elements)) == 59
    assert len(reports()) == hangs


def test_worker_process_that_never_returns_the_interpreter_lock_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    been_here = str(tmp_path / "been here")

    def hang_once(x: Any) -> Any:
        if int(x) == 30 and not os.path.exists(been_here):
            os.mkdir(been_here)
            ctypes.PyDLL(None).sleep(3600)
        return x

    with LocalCluster(num_workers=1, hang_timeout_ms=1500) as cluster:
        dataset = hr.Dataset.range(100).map(hang_once)
        got = numbers(dataset.apply(distribute("distributed_epoch", cluster.target)))
        assert [worker.is_running for worker in cluster.workers] == [False, True]
    assert sorted(got) == list(range(100))
    assert "in hang_once" in capfd.readouterr().err
