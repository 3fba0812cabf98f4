"""The order that contenders are held to, and that Headrace and plain NumPy keep to it."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.interleave import WORKLOADS, in_turn


def test_slots_give_blocks_in_turn_and_an_empty_one_is_given_the_next_dataset() -> None:
    assert list(islice(in_turn(2, 2, 4), 14)) == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_what_needs_no_framework_keeps_to_it(workload, tmp_path: Path) -> None:
    for contender in (workload.contenders[0], workload.contenders[-1]):
        with ExitStack() as stack:
            workload.check(contender.build(tmp_path, stack)())
