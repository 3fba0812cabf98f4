"""Functions that hold the interpreter's lock, and functions that never return."""

from __future__ import annotations

import ctypes
from collections import Counter
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
