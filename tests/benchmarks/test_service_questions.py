"""Smoke tests of the service benchmarks: each small workload returns correct data."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.contender import Rounds
from benchmarks.dispatcher_curves import CURVES, Curve, points
from benchmarks.workload import Contender, Workload

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(240)]

QUESTIONS = (
    "adapters_torch",
    "dispatcher",
    "exactly_once",
    "exactly_once_bytes",
    "worker_kills",
    "latencies",
    "ordered",
    "ordered_shuffled",
    "python_bound",
    "service_elements",
    "service_jpeg",
    "service_limits",
    "trainers",
)
#: Numbers of peers that would take seconds to connect.
_CROWD = "1,000"


def _headrace(question: str) -> list[tuple[Workload, Contender]]:
    """Return the workloads that can run here, without other frameworks."""
    return [
        (workload, contender)
        for workload in importlib.import_module(f"benchmarks.{question}").WORKLOADS
        for contender in workload.contenders
        if contender.role == "headrace"
        and all(importlib.util.find_spec(module) for module in contender.needs)
        and _CROWD not in workload.name
        and _CROWD not in contender.name
    ]


@pytest.mark.parametrize("question", [name for name in QUESTIONS if _headrace(name)])
def test_each_reading_mode_gives_correct_data_and_a_rate(question: str, tmp_path: Path) -> None:
    chosen = _headrace(question)
    if any("cv2" in contender.needs for _, contender in chosen):
        importlib.import_module(f"benchmarks.{question}").write_inputs(tmp_path)
    for workload, contender in chosen:
        with ExitStack() as stack:
            rounds = Rounds(
                contender.build(tmp_path, stack),
                contender.consume or workload.consume,
                workload.reopen,
                own_clock=workload.own_clock,
            )
            stack.callback(rounds.close)
            rounds.check(contender.check or workload.check)
            assert rounds.run(0.01, ramp=0.0)["rate"] > 0, f"{workload.name}: {contender.name}"


@pytest.mark.parametrize("question", QUESTIONS)
def test_targets_refer_to_existing_contenders(question: str) -> None:
    for workload in importlib.import_module(f"benchmarks.{question}").WORKLOADS:
        names = {contender.name for contender in workload.contenders}
        assert len(names) == len(workload.contenders)
        for target in workload.targets:
            assert {target.by, *getattr(target, "of", ())} <= names


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_curve_has_one_point_per_round_and_count(curve: Curve) -> None:
    found = points(curve, (1, 2), rounds=2, seconds=0.01)
    assert list(found) == [1, 2]
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in found.values())
