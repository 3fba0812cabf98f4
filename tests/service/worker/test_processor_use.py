"""Cores and processor time of a worker process."""

from __future__ import annotations

import os

import pytest

from headrace.service.worker.processor_use import count_cores, measure_processor_use


@pytest.mark.parametrize(
    ("limit", "cores"), [("50000 100000", 0.5), ("max 100000", None), ("?", None)]
)
def test_cores_are_limited_by_the_quota_of_the_container(tmp_path, limit, cores):
    file = tmp_path / "cpu.max"
    file.write_text(limit)
    assert count_cores(file) == (cores or len(os.sched_getaffinity(0)))


def test_processor_time_of_the_process_grows_with_work():
    before = measure_processor_use()
    sum(range(100_000))
    after = measure_processor_use()
    assert after.cores == before.cores > 0
    assert after.cpu_seconds > before.cpu_seconds
