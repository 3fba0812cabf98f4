"""Tests that Headrace and plain NumPy produce the required interleave order."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.interleave import WORKLOADS, in_turn


def test_slots_yield_blocks_in_turn_and_are_refilled() -> None:
    assert list(islice(in_turn(2, 2, 4), 14)) == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_baseline_matches_without_a_framework(workload, tmp_path: Path) -> None:
    for contender in (workload.contenders[0], workload.contenders[-1]):
        with ExitStack() as stack:
            workload.check(contender.build(tmp_path, stack)())
