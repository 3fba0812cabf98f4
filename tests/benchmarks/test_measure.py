"""Tests of contenders in their processes: measurements, failures and restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import small_rows
from benchmarks.measure import Effort, measure

pytestmark = pytest.mark.heavy

EFFORT = Effort(seconds=0.02, ramp=0.0, rounds=2)
WORKLOAD = small_rows.WORKLOADS[0]
LIMIT = WORKLOAD.contenders[-1]


def test_each_round_has_a_rate_a_first_element_and_processor_time(
    tmp_path: Path,
) -> None:
    workload = replace(WORKLOAD, contenders=(LIMIT,))
    (measured,) = measure("small_rows", workload, EFFORT, tmp_path)
    assert measured.problem is None
    assert len(measured.rates) == len(measured.firsts) == len(measured.cpus) == 2
    assert min(measured.rates) > 0


def test_a_failed_contender_is_reported_and_the_others_run(tmp_path: Path) -> None:
    unknown = replace(LIMIT, name="unknown contender")
    workload = replace(WORKLOAD, contenders=(unknown, LIMIT))
    failed, other = measure("small_rows", workload, EFFORT, tmp_path)
    assert failed.problem is not None
    assert failed.problem.startswith("failed: exit status 1")
    assert failed.rate is None
    assert other.problem is None


@pytest.mark.parametrize(("restart_every", "times"), [(0, 1), (1, 3), (2, 2), (5, 1)])
def test_processes_restart_after_the_given_number_of_rounds(
    tmp_path: Path, restart_every: int, times: int
) -> None:
    workload = replace(WORKLOAD, contenders=(LIMIT,), restart_every=restart_every)
    logged: list[str] = []
    effort = replace(EFFORT, rounds=3)
    (measured,) = measure("small_rows", workload, effort, tmp_path, log=logged.append)
    assert measured.problem is None
    assert len(measured.rates) == 3
    assert sum(line.endswith("ready") for line in logged) == times
