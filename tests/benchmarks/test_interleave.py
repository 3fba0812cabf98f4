"""Tests of the interleave benchmark: the specified order, and Headrace and NumPy against it."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.interleave import WORKLOADS, expected_order


def test_blocks_alternate_and_exhausted_datasets_are_replaced() -> None:
    assert list(islice(expected_order(2, 2, 4), 14)) == [
        0,
        1,
        4,
        5,
        2,
        3,
        6,
        7,
        8,
        9,
        12,
        13,
        10,
        11,
    ]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_headrace_and_numpy_follow_the_specified_order(workload, tmp_path: Path) -> None:
    for contender in (workload.contenders[0], workload.contenders[-1]):
        with ExitStack() as stack:
            workload.check(contender.build(tmp_path, stack)())
