"""Calls of sources, and rejection of objects that are not sources."""

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
def test_indices_out_of_range_are_rejected(start: int, stop: int, size: int) -> None:
    kind = "of infinite size" if size == INFINITE else "with 4 indices"
    with pytest.raises(ValueError, match=f"indices {start} to {stop} of a source {kind}"):
        check_range(start, stop, size)


@pytest.mark.parametrize(
    ("start", "stop", "size"), [(0, 4, 4), (4, 4, 4), (7, INFINITE, INFINITE), (7, 9, INFINITE)]
)
def test_indices_in_range_are_accepted(start: int, stop: int, size: int) -> None:
    check_range(start, stop, size)


def test_a_reader_requires_a_positive_limit() -> None:
    check_limit(1)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        check_limit(0)


def test_a_row_reader_continues_at_its_position_and_ends_with_its_range() -> None:
    source = Tens()
    reader = source.open(1, 4)
    assert [int(row) for row in reader.read(2).rows()] == [10, 20]
    assert reader.get_position() == 3
    assert rows(reader) == [30]
    assert rows(source.open(1, 4, 3)) == [30]
    assert rows(source.open(1, 4, 4)) == []
    assert rows(source.open(2, 2)) == []


@pytest.mark.parametrize("position", [0, 5, "2", 2.0, True])
def test_a_position_out_of_range_is_rejected(position: Any) -> None:
    with pytest.raises(ValueError, match="must be an index from 1 to 4"):
        Tens().open(1, 4, position)


def test_an_infinite_source_is_read_forever() -> None:
    reader = Tens(INFINITE).open(5, INFINITE, 1 << 40)
    assert [int(row) for row in reader.read(2).rows()] == [10 << 40, (10 << 40) + 10]


def test_a_closed_reader_raises_an_error() -> None:
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
def test_an_object_that_is_not_a_source_is_rejected_with_a_fix(found: Any, cure: str) -> None:
    with pytest.raises(TypeError, match=cure):
        validate_source(found)


def test_a_valid_source_is_returned_unchanged() -> None:
    source = Tens()
    assert validate_source(source) is source
