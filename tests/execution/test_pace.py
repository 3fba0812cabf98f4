"""How many elements are asked for at once, and what memory they take."""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.execution.pace import Pace

from .contract import ListIterator

COUNT_FAULTS = """
import resource
import headrace as hr

dataset = hr.Dataset.range(1 << 21).map(lambda x: x * x + 1).batch(1024)
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in dataset:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_chunks_that_come_and_go_use_the_same_memory() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True
    )
    pages = (1 << 21) * 8 // 4096
    # A C library that gives all back at once brings in each page again, several times.
    assert int(ran.stdout) < pages // 4 or platform.libc_ver()[0] != "glibc"


def test_a_chunk_takes_so_much_memory_and_no_more() -> None:
    class Rows(ListIterator):
        def next_chunk(self, limit: int) -> Chunk:
            return Chunk.of_columns(np.zeros((limit, 1 << 7)), limit)

    pace = Pace(most_bytes=1 << 14)
    sizes = [pace.next_chunk(Rows([])).size for _ in range(20)]

    assert max(sizes) == (1 << 14) // (1 << 10) - 1


def test_what_has_arrived_is_taken_at_once_however_large_it_is_by_who_uses_it_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Arrived(ListIterator):
        arrived = 0

        def next_chunk(self, limit: int) -> Chunk:
            return Chunk.of_columns(np.zeros((limit, 1 << 7)), limit)

    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    pace, rows = Pace(most_bytes=1 << 14), Arrived([])
    sizes = []
    for rows.arrived in (100, 100, 37, 5000, 0):
        sizes.append(pace.next_chunk(rows).size)
        pace.limit = 1
    assert sizes == [1, 100, 37, 1024, 1]
    rows.arrived = 2
    assert pace.next_chunk(rows, 5).size == 5
    rows.arrived, pace.limit, now = 100, 1, 1.0
    assert pace.next_chunk(rows).size == 1, "whoever takes a second for a chunk is given few"
