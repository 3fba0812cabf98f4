"""Cores and processor time of a worker process and its machine."""

from __future__ import annotations

import os

import pytest

from headrace.service.worker.processor_use import (
    count_cores,
    machine_cpu_seconds,
    measure_processor_use,
)


@pytest.mark.parametrize(
    ("limit", "cores"), [("50000 100000", 0.5), ("max 100000", None), ("?", None)]
)
def test_cores_are_limited_by_the_quota_of_the_container(tmp_path, limit, cores):
    (tmp_path / "cpu.max").write_text(limit)
    assert count_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_processor_time_of_the_process_grows_with_work():
    before = measure_processor_use()
    sum(range(100_000))
    after = measure_processor_use()
    assert after.cores == before.cores > 0
    assert after.cpu_seconds > before.cpu_seconds
    assert after.machine_cpu_seconds >= before.machine_cpu_seconds > 0


def test_processor_time_of_the_machine_is_that_of_the_own_cores_without_idle_time(tmp_path):
    own, other = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0)) + 1
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu 9 9 9 9 9 9 9 9 9 9\ncpu{own} 100 20 30 7000 500 0 40 10 99 0\n"
        f"cpu{other} 9 9 9 9 9 9 9 9 9 9\nintr 1 2\n"
    )
    ticks = os.sysconf("SC_CLK_TCK")
    assert machine_cpu_seconds(tmp_path, stat) == 200 / ticks


def test_processor_time_under_a_quota_is_that_of_the_container(tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert machine_cpu_seconds(tmp_path, tmp_path / "missing") == 2.5


def test_processor_time_of_the_machine_is_unknown_without_the_files(tmp_path):
    assert machine_cpu_seconds(tmp_path, tmp_path / "missing") == 0.0
