"""Tests of contenders in child processes: failures are reported, and nothing leaks."""

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


def test_contender_has_a_rate_and_first_element_time_per_round(
    tmp_path: Path,
) -> None:
    workload = replace(WORKLOAD, contenders=(LIMIT,))
    (measured,) = measure("small_rows", workload, EFFORT, tmp_path)
    assert measured.problem is None
    assert len(measured.rates) == len(measured.firsts) == len(measured.cpus) == 2
    assert min(measured.rates) > 0


def test_failed_contender_is_reported_and_the_others_run(tmp_path: Path) -> None:
    unknown = replace(LIMIT, name="nobody by this name")
    workload = replace(WORKLOAD, contenders=(unknown, LIMIT))
    broken, fine = measure("small_rows", workload, EFFORT, tmp_path)
    assert broken.problem is not None
    assert broken.problem.startswith("failed: ended with status 1")
    assert broken.rate is None
    assert fine.problem is None


@pytest.mark.parametrize(("renew_after", "times"), [(0, 1), (1, 3), (2, 2), (5, 1)])
def test_contenders_continue_in_new_processes_if_results_differ(
    tmp_path: Path, renew_after: int, times: int
) -> None:
    workload = replace(WORKLOAD, contenders=(LIMIT,), renew_after=renew_after)
    said: list[str] = []
    effort = replace(EFFORT, rounds=3)
    (measured,) = measure("small_rows", workload, effort, tmp_path, say=said.append)
    assert measured.problem is None
    assert len(measured.rates) == 3
    assert sum(words.endswith("ready") for words in said) == times
