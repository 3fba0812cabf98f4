"""The input of a stage: what is in hand, and how many elements are asked for at once."""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.execution.input_buffer import ChunkSizer, InputBuffer

from .contract import ListIterator

# --- What an intake has in hand, and what was put back into it ------------------------------------


@pytest.mark.parametrize("gives_rows", [False, True])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_an_element_that_is_put_back_keeps_its_place(taken: int, gives_rows: bool) -> None:
    """The first, one in the middle, the last."""
    input_ = ListIterator([np.int64(number) for number in range(10, 13)])
    input_.has_lazy_rows = gives_rows
    intake = InputBuffer(input_)
    if not gives_rows:
        intake.peek(3)
    live = intake.lazy_rows()
    for number in range(taken):
        while (row := next(live.rows, None)) is None:
            intake.end_lazy_rows()
            live = intake.lazy_rows()
        live.num_taken += number < taken - 1

    live.put_back(row)

    assert intake.get_state() == taken - 1
    chunk = intake.take(1)
    assert (chunk.rows(), chunk.state_at(0), chunk.state_at(1)) == ([row], taken - 1, taken)
    assert intake.get_state() == taken
    rest = []
    while (chunk := intake.take(3)) is not None:
        rest += chunk.rows()
    assert rest == list(range(10 + taken, 13))


class OneByOne(ListIterator):
    """Makes single elements when they are asked for."""

    has_lazy_rows = True

    def __init__(self, entries) -> None:
        super().__init__(entries)
        self.made = []

    def lazy_rows(self):
        start = self.at
        return self._rows(), lambda index: start + index

    def _rows(self):
        while self.at < len(self.entries):
            entry = self.entries[self.at]
            self.at += 1
            if isinstance(entry, Exception):
                raise entry
            self.made.append(entry)
            yield entry

    def skip(self, count):
        self.at += count
        return count


def test_single_elements_that_are_passed_over_are_not_made() -> None:
    input_ = OneByOne([np.int64(number) for number in range(10)])
    intake = InputBuffer(input_)
    live = intake.lazy_rows()
    next(live.rows)
    live.num_taken += 1

    assert intake.skip(4) == 4

    assert intake.get_state() == 5
    assert intake.take(1).rows() == [5]
    assert input_.made == [0]


def test_an_error_among_single_elements_is_passed_when_a_chunk_is_asked_for() -> None:
    intake = InputBuffer(OneByOne([np.int64(7), ValueError("eight"), np.int64(9)]))
    live = intake.lazy_rows()
    next(live.rows)
    live.num_taken += 1

    with pytest.raises(ValueError, match="eight"):
        intake.take(1)

    assert intake.get_state() == 2
    assert intake.take(1).rows() == [9]


def test_one_of_single_elements_that_is_looked_at_comes_before_the_rest_of_them() -> None:
    intake = InputBuffer(ListIterator([np.int64(number) for number in range(10, 14)]))
    intake.peek(4)
    live = intake.lazy_rows()
    live.put_back(next(live.rows))

    assert intake.peek(1).rows() == [10]
    assert intake.get_state() == 0
    live = intake.lazy_rows()
    assert live.states(0) == 0
    assert list(live.rows) == [10, 11, 12, 13]


# --- How many elements are asked for at once, and what memory they take ---------------------------

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

    pace = ChunkSizer(max_bytes=1 << 14)
    sizes = [pace.next_chunk(Rows([])).size for _ in range(20)]

    assert max(sizes) == (1 << 14) // (1 << 10) - 1


def test_what_has_arrived_is_taken_at_once_however_large_it_is_by_who_uses_it_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Arrived(ListIterator):
        available_elements = 0

        def next_chunk(self, limit: int) -> Chunk:
            return Chunk.of_columns(np.zeros((limit, 1 << 7)), limit)

    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    pace, rows = ChunkSizer(max_bytes=1 << 14), Arrived([])
    sizes = []
    for rows.available_elements in (100, 100, 37, 5000, 0):
        sizes.append(pace.next_chunk(rows).size)
        pace.limit = 1
    assert sizes == [1, 100, 37, 1024, 1]
    rows.available_elements = 2
    assert pace.next_chunk(rows, 5).size == 5
    rows.available_elements, pace.limit, now = 100, 1, 1.0
    assert pace.next_chunk(rows).size == 1, "whoever takes a second for a chunk is given few"
