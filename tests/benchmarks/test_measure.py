"""Tests of contenders in their processes: measurements, failures and restarts."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import small_rows
from benchmarks.measure import Effort, measure

pytestmark = pytest.mark.heavy

EFFORT = Effort(seconds=0.02, ramp=0.0, rounds=2, repeats=2)
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


@pytest.mark.parametrize("repeated", [False, True])
def test_repeated_rounds_run_again_in_new_processes(tmp_path: Path, repeated: bool) -> None:
    workload = replace(WORKLOAD, contenders=(LIMIT,), repeated=repeated)
    logged: list[str] = []
    (measured,) = measure("small_rows", workload, EFFORT, tmp_path, log=logged.append)
    assert measured.problem is None
    times = 1 + repeated
    assert len(measured.rates) == EFFORT.rounds * times
    assert logged.count(f"starting {LIMIT.name}") == times


@pytest.mark.parametrize("in_turns", [True, False])
def test_contenders_take_turns_unless_they_would_disturb_each_other(
    tmp_path: Path, in_turns: bool
) -> None:
    names = ("headrace", LIMIT.name)
    contenders = (WORKLOAD.contenders[0], LIMIT)
    workload = replace(WORKLOAD, contenders=contenders, in_turns=in_turns)
    logged: list[str] = []
    measure("small_rows", workload, EFFORT, tmp_path, log=logged.append)
    if in_turns:
        rounds = [line for line in logged if line.startswith("round ")]
        assert rounds == [f"round {number} of 2, {name}" for number in (1, 2) for name in names]
    else:
        steps = ("starting", "round 1 of 2,", "round 2 of 2,")
        assert logged == [f"{step} {name}" for name in names for step in steps]


@pytest.mark.parametrize("activity", ["starting", "round 2 of 2"])
def test_an_interrupt_stops_the_processes(tmp_path: Path, activity: str) -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text().split()
    workload = replace(WORKLOAD, contenders=(WORKLOAD.contenders[0], LIMIT))

    def interrupt(text: str) -> None:
        if text.startswith(activity):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure("small_rows", workload, EFFORT, tmp_path, log=interrupt)
    assert children.read_text().split() == before
