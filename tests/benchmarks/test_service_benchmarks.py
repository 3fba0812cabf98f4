"""Smoke tests of the service benchmarks: each workload runs one short round with a check."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import dispatcher_scale
from benchmarks.contender import Rounds
from benchmarks.dispatcher_curves import CURVES, Curve, points
from benchmarks.workload import Contender, Workload

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(240)]

BENCHMARKS = (
    "adapters_torch",
    "autotune",
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
#: Skipped: a thousand peers take seconds to connect.
_NUM_PEERS = "1,000"


def _headrace(benchmark: str) -> list[tuple[Workload, Contender]]:
    """Return the contenders of Headrace whose modules are installed, except the largest."""
    return [
        (workload, contender)
        for workload in importlib.import_module(f"benchmarks.{benchmark}").WORKLOADS
        for contender in workload.contenders
        if contender.role == "headrace"
        and all(importlib.util.find_spec(module) for module in contender.needs)
        and _NUM_PEERS not in workload.name
        and _NUM_PEERS not in contender.name
    ]


@pytest.mark.parametrize("benchmark", [name for name in BENCHMARKS if _headrace(name)])
def test_each_contender_passes_its_check_and_has_a_rate(benchmark: str, tmp_path: Path) -> None:
    chosen = _headrace(benchmark)
    if any("cv2" in contender.needs for _, contender in chosen):
        importlib.import_module(f"benchmarks.{benchmark}").write_inputs(tmp_path)
    for workload, contender in chosen:
        with ExitStack() as stack:
            rounds = Rounds(
                contender.build(tmp_path, stack),
                contender.consume or workload.consume,
                workload.reopen,
                self_timed=workload.self_timed,
            )
            stack.callback(rounds.close)
            rounds.check(contender.check or workload.check)
            assert rounds.run(0.01, ramp=0.0)["rate"] > 0, f"{workload.name}: {contender.name}"


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_targets_name_existing_contenders(benchmark: str) -> None:
    for workload in importlib.import_module(f"benchmarks.{benchmark}").WORKLOADS:
        names = {contender.name for contender in workload.contenders}
        assert len(names) == len(workload.contenders)
        for target in workload.targets:
            assert {target.by, *getattr(target, "of", ())} <= names


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_a_curve_has_a_value_per_round_and_count(curve: Curve) -> None:
    found = points(curve, (1, 2), rounds=2, seconds=0.01)
    assert list(found) == [1, 2]
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in found.values())


def test_scale_measures_every_curve_with_few_peers() -> None:
    found = dispatcher_scale.measure(3)
    assert found.keys() == dispatcher_scale.CURVES.keys()
    assert min(found.values()) > 0
