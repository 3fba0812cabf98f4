"""The input buffer of a step: buffered elements, and the sizes of requests."""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.execution.input_buffer import ChunkSizer, InputBuffer

from .contract import ListIterator

# --- Buffered elements, and elements that were put back -------------------------------------------


@pytest.mark.parametrize("gives_rows", [False, True])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_an_element_put_back_keeps_its_position(taken: int, gives_rows: bool) -> None:
    """The first, one in the middle, the last."""
    input_ = ListIterator([np.int64(number) for number in range(10, 13)])
    input_.has_lazy_rows = gives_rows
    input_buffer = InputBuffer(input_)
    if not gives_rows:
        input_buffer.peek(3)
    stream = input_buffer.lazy_rows()
    for number in range(taken):
        while (row := next(stream.rows, None)) is None:
            input_buffer.end_lazy_rows()
            stream = input_buffer.lazy_rows()
        stream.num_taken += number < taken - 1

    stream.put_back(row)

    assert input_buffer.get_state() == taken - 1
    chunk = input_buffer.take(1)
    assert (chunk.rows(), chunk.state_at(0), chunk.state_at(1)) == ([row], taken - 1, taken)
    assert input_buffer.get_state() == taken
    rest = []
    while (chunk := input_buffer.take(3)) is not None:
        rest += chunk.rows()
    assert rest == list(range(10 + taken, 13))


class OneByOne(ListIterator):
    """Computes lazy rows on request."""

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


def test_skipped_lazy_rows_are_not_computed() -> None:
    input_ = OneByOne([np.int64(number) for number in range(10)])
    input_buffer = InputBuffer(input_)
    stream = input_buffer.lazy_rows()
    next(stream.rows)
    stream.num_taken += 1

    assert input_buffer.skip(4) == 4

    assert input_buffer.get_state() == 5
    assert input_buffer.take(1).rows() == [5]
    assert input_.made == [0]


def test_an_error_in_lazy_rows_is_skipped_when_a_chunk_is_requested() -> None:
    input_buffer = InputBuffer(OneByOne([np.int64(7), ValueError("eight"), np.int64(9)]))
    stream = input_buffer.lazy_rows()
    next(stream.rows)
    stream.num_taken += 1

    with pytest.raises(ValueError, match="eight"):
        input_buffer.take(1)

    assert input_buffer.get_state() == 2
    assert input_buffer.take(1).rows() == [9]


def test_a_peeked_lazy_row_precedes_the_remaining_rows() -> None:
    input_buffer = InputBuffer(ListIterator([np.int64(number) for number in range(10, 14)]))
    input_buffer.peek(4)
    stream = input_buffer.lazy_rows()
    stream.put_back(next(stream.rows))

    assert input_buffer.peek(1).rows() == [10]
    assert input_buffer.get_state() == 0
    stream = input_buffer.lazy_rows()
    assert stream.states(0) == 0
    assert list(stream.rows) == [10, 11, 12, 13]


# --- Sizes of requests, and the memory of chunks --------------------------------------------------

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


def test_freed_chunks_reuse_the_same_memory() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True
    )
    pages = (1 << 21) * 8 // 4096
    # A C library that gives all back at once brings in each page again, several times.
    assert int(ran.stdout) < pages // 4 or platform.libc_ver()[0] != "glibc"


def test_a_chunk_uses_a_bounded_amount_of_memory() -> None:
    class Rows(ListIterator):
        def next_chunk(self, limit: int) -> Chunk:
            return Chunk.of_columns(np.zeros((limit, 1 << 7)), limit)

    pace = ChunkSizer(max_bytes=1 << 14)
    sizes = [pace.next_chunk(Rows([])).size for _ in range(20)]

    assert max(sizes) == (1 << 14) // (1 << 10) - 1


def test_a_fast_consumer_takes_all_available_elements_at_once(
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
    assert pace.next_chunk(rows).size == 1, (
        "a consumer that takes a second per chunk gets few elements"
    )
