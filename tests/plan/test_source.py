"""What a source is asked for, and how what is no source is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import FailedPreconditionError
from headrace.plan.source import (
    INFINITE,
    IndexedSource,
    check_limit,
    check_range,
    validate_source,
)


class Tens(IndexedSource):
    def __init__(self, size: int = 4) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def gather(self, indices: Any) -> Any:
        return indices * 10


def rows(reader: Any, limit: int = 3) -> list[int]:
    found: list[int] = []
    while (chunk := reader.read(limit)) is not None:
        found += [int(row) for row in chunk.rows()]
    return found


@pytest.mark.parametrize(
    ("start", "stop", "size"),
    [(-1, 2, 4), (3, 2, 4), (0, 5, 4), (0, INFINITE, 4), (2, 1, INFINITE), (-1, 5, INFINITE)],
)
def test_indices_that_a_source_does_not_have_are_refused(start: int, stop: int, size: int) -> None:
    kind = "without end" if size == INFINITE else "of 4 indices"
    with pytest.raises(ValueError, match=f"indices {start} to {stop} of a source {kind}"):
        check_range(start, stop, size)


@pytest.mark.parametrize(
    ("start", "stop", "size"), [(0, 4, 4), (4, 4, 4), (7, INFINITE, INFINITE), (7, 9, INFINITE)]
)
def test_indices_that_it_has_are_not(start: int, stop: int, size: int) -> None:
    check_range(start, stop, size)


def test_a_reader_is_asked_for_something() -> None:
    check_limit(1)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        check_limit(0)


def test_a_reader_of_rows_goes_on_at_its_position_and_ends_with_its_range() -> None:
    source = Tens()
    reader = source.open(1, 4)
    assert [int(row) for row in reader.read(2).rows()] == [10, 20]
    assert reader.get_position() == 3
    assert rows(reader) == [30]
    assert rows(source.open(1, 4, 3)) == [30]
    assert rows(source.open(1, 4, 4)) == []
    assert rows(source.open(2, 2)) == []


@pytest.mark.parametrize("position", [0, 5, "2", 2.0, True])
def test_a_position_outside_of_its_range_is_refused(position: Any) -> None:
    with pytest.raises(ValueError, match="must be an index from 1 to 4"):
        Tens().open(1, 4, position)


def test_a_source_without_end_is_read_for_ever() -> None:
    reader = Tens(INFINITE).open(5, INFINITE, 1 << 40)
    assert [int(row) for row in reader.read(2).rows()] == [10 << 40, (10 << 40) + 10]


def test_a_closed_reader_says_so() -> None:
    reader = Tens().open(0, 4)
    reader.close()
    reader.close()
    with pytest.raises(FailedPreconditionError, match="open another one"):
        reader.read(1)


class Lookalike:
    size = 3

    def open(self, start: int, stop: int) -> None: ...


@pytest.mark.parametrize(
    ("found", "cure"),
    [
        (Tens, r"pass an instance: Tens\(\.\.\.\)"),
        (Lookalike(), r"class Lookalike\(headrace\.Source\)"),
        ([1, 2], r"Dataset\.from_tensor_slices"),
        (np.arange(3), r"Dataset\.from_tensor_slices"),
        (lambda: iter([1]), r"Dataset\.from_generator"),
        (3, r"derive a class from it"),
    ],
    ids=["class", "lookalike", "list", "array", "function", "number"],
)
def test_what_is_no_source_is_refused_with_what_would_do(found: Any, cure: str) -> None:
    with pytest.raises(TypeError, match=cure):
        validate_source(found)


def test_a_source_is_itself() -> None:
    source = Tens()
    assert validate_source(source) is source
