"""Functions that hold the interpreter's lock, and functions that never return."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.service import LocalCluster, distribute
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
    assert "counts as lost" not in caplog.text


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
