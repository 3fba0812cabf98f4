"""Chunks: rows and columns of the same elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.element.chunk import Chunk, concatenate
from headrace.element.stack import stack
from headrace.errors import InvalidElementError
from tests.element.strategies import elements, same


def numbers(columnar: bool, *values: int) -> Chunk:
    rows = [{"x": np.int64(value)} for value in values]
    return Chunk.of_columns(stack(rows), len(rows)) if columnar else Chunk.of_rows(rows)


def values(chunk: Chunk) -> list[int]:
    return [int(row["x"]) for row in chunk.rows()]


both = pytest.mark.parametrize("columnar", [False, True])


@given(elements, st.integers(1, 4))
def test_rows_and_columns_are_equivalent(element: Any, size: int) -> None:
    rows = Chunk.of_rows([element] * size)
    columns = Chunk.of_columns(stack([element] * size), size)
    assert same(rows.columns(), columns.columns())
    assert same(tuple(rows.rows()), tuple(columns.rows()))
    assert len(rows) == len(columns) == size


@both
def test_slices_and_picks(columnar: bool) -> None:
    chunk = numbers(columnar, 0, 1, 2, 3)
    assert values(chunk.slice(1, 3)) == [1, 2]
    assert values(chunk.slice(2, 9)) == [2, 3]
    assert values(chunk.slice(4, 9)) == []
    assert values(chunk.slice(3, 1)) == []
    assert chunk.slice(0, 4) is chunk
    assert values(chunk.take(np.array([3, 0, 3]))) == [3, 0, 3]
    assert values(chunk.take([1])) == [1]
    assert chunk.slice(1, 3).is_columnar == chunk.take([1]).is_columnar == columnar


def test_the_other_form_is_computed_once() -> None:
    rows, columns = numbers(False, 1, 2), numbers(True, 1, 2)
    assert rows.columns() is rows.columns()
    assert columns.rows() is columns.rows()
    assert rows.is_columnar


def test_slices_of_columns_are_views() -> None:
    chunk = numbers(True, 1, 2, 3)
    assert np.shares_memory(chunk.slice(1, 2).columns()["x"], chunk.columns()["x"])


@pytest.mark.parametrize("forms", [(True, True), (False, True), (False, False)])
def test_chunks_are_joined_in_order(forms: tuple[bool, bool]) -> None:
    joined = concatenate([numbers(forms[0], 1, 2), numbers(forms[1], 3)])
    assert values(joined) == [1, 2, 3]
    assert joined.is_columnar == all(forms)


def test_concatenating_one_chunk_returns_it() -> None:
    chunk = numbers(True, 1)
    assert concatenate([chunk]) is chunk
    with pytest.raises(ValueError, match="chunks is empty"):
        concatenate([])


def test_columns_of_different_shape_are_joined_as_rows() -> None:
    joined = concatenate([Chunk.of_columns(np.zeros((1, n)), 1) for n in (2, 3)])
    assert [row.shape for row in joined.rows()] == [(2,), (3,)]


def test_ragged_and_empty_chunks_have_no_columns() -> None:
    ragged = Chunk.of_rows([np.zeros(2), np.zeros(3)])
    with pytest.raises(InvalidElementError, match="pad or truncate"):
        ragged.columns()
    assert len(ragged.rows()) == 2
    with pytest.raises(InvalidElementError, match="empty chunk"):
        Chunk.of_rows([]).columns()


def test_a_chunk_of_empty_structures_can_be_columnar() -> None:
    chunk = Chunk.of_columns(None, 3)
    assert chunk.is_columnar
    assert chunk.rows() == [None, None, None]
    assert repr(chunk) == "Chunk(3 columnar)"
