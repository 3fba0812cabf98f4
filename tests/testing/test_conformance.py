"""Tests of the conformance check for sources, with valid and invalid ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.plan.source import (
    IndexedSource,
    IndexKind,
    Position,
    Reader,
    Source,
    check_limit,
    check_range,
    validate_source,
)
from headrace.testing import check_source

EXPECTED = [np.arange(index, index + 2) for index in range(9)]


class Threes(Source):
    """Nine arrays: three indices of three elements."""

    def __init__(self) -> None:
        self.table = np.stack(EXPECTED)

    @property
    def size(self) -> int:
        return 3

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, self.size)
        return ThreesReader(self, 3 * start if position is None else position, 3 * stop)

    def take(self, start: int, stop: int) -> Chunk:
        return Chunk.of_columns(self.table[start:stop].copy(), stop - start)


class ThreesReader:
    def __init__(self, source: Threes, at: int, stop: int) -> None:
        self.source = source
        self.at = at
        self.stop = stop

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self.at == self.stop:
            return None
        start, self.at = self.at, min(self.at + limit, self.stop)
        return self.source.take(start, self.at)

    def get_position(self) -> Position:
        return self.at

    def close(self) -> None:
        pass


class Squares(IndexedSource):
    """A minimal source with one element per index."""

    size = 12  # type: ignore[assignment]

    def gather(self, indices: NDArray[np.int64]) -> Any:
        return {"root": indices.copy(), "square": indices**2}


def test_a_source_of_size_and_open_passes() -> None:
    check_source(Threes(), EXPECTED)


def test_a_source_of_size_and_gather_passes() -> None:
    check_source(Squares(), [{"root": np.int64(i), "square": np.int64(i * i)} for i in range(12)])


class Views(Threes):
    def take(self, start: int, stop: int) -> Chunk:
        return Chunk.of_columns(self.table[start:stop], stop - start)


class ReadOnly(Threes):
    def take(self, start: int, stop: int) -> Chunk:
        chunk = super().take(start, stop)
        chunk.columns().flags.writeable = False
        return chunk


class Short(Threes):
    def take(self, start: int, stop: int) -> Chunk:
        return Chunk.of_columns(self.table[start:stop].astype(np.int32), stop - start)


class Forgetful(Threes):
    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        return super().open(start, stop)


class Counts(Threes):
    elements_per_index = 2  # type: ignore[assignment]


class Miscounts(Threes):
    element_count = 8  # type: ignore[assignment]


class Files(Threes):
    index_kind: IndexKind = "file"  # type: ignore[assignment]


class Elements(Threes):
    index_kind: IndexKind = "element"  # type: ignore[assignment]


class SameMemory(Squares):
    def gather(self, indices: NDArray[np.int64]) -> Any:
        return {"root": indices, "square": indices**2}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Views(), "but expected array"),
        (Miscounts(), "element_count is 8, but expected 9"),
        (ReadOnly(), "an array of element 0 is read-only"),
        (Short(), "element 0 is"),
        (Forgetful(), "opening at a position changed the position"),
        (Counts(), "3 indices of 2 elements each do not give 9"),
        (Files(), 'index_kind is "file" with 3 indices, but paths is'),
        (Elements(), 'index_kind is "element"'),
    ],
)
def test_violations_of_the_contract_are_detected(source: Source, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_source(source, EXPECTED)


def test_gather_that_returns_its_argument_is_detected() -> None:
    with pytest.raises(AssertionError, match="gather returned its argument"):
        check_source(
            SameMemory(), [{"root": np.int64(i), "square": np.int64(i * i)} for i in range(12)]
        )


def test_reordered_and_missing_elements_are_detected() -> None:
    with pytest.raises(AssertionError, match="element 0 is"):
        check_source(Threes(), EXPECTED[::-1])
    with pytest.raises(AssertionError, match="found 9 elements, but expected 8"):
        check_source(Threes(), EXPECTED[:-1])


class LooksLikeOne:
    size = 3

    def open(self, start: int, stop: int, position: Position = None) -> Any: ...


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (LooksLikeOne(), r"class LooksLikeOne\(headrace\.Source\)"),
        (Threes, r"pass an instance: Threes\(\.\.\.\)"),
        ([1, 2], "Dataset.from_tensor_slices"),
        (lambda: iter(()), "Dataset.from_generator"),
        (3, "derive a class from it with `size` and `open`"),
    ],
)
def test_other_objects_are_refused_with_a_hint(thing: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        validate_source(thing)
    with pytest.raises(AssertionError, match="does not derive from Source"):
        check_source(thing, [])


def test_source_has_a_short_repr() -> None:
    source = validate_source(Threes())

    assert source.element_spec is None
    assert source.elements_per_index is None
    assert source.splittable
    assert not source.runs_user_code
    assert source.index_kind == "part"
    assert source.paths == ()
    assert Squares().index_kind == "element"
