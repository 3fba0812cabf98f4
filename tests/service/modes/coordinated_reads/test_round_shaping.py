"""Round shaping: rows of a round's batches are shared among consumers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.errors import InvalidArgumentError, UserFunctionError
from headrace.execution.iterator import ElementIterator
from headrace.plan.user_function import UserFunction
from headrace.service.modes.coordinated_reads.round_shaping import RoundShaper


class Given(ElementIterator):
    """Yields the given elements and raises the given errors; its state is the index."""

    def __init__(self, *elements: Any) -> None:
        self._elements = elements
        self._next = 0

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._next == len(self._elements):
            return None
        element = self._elements[self._next]
        self._next += 1
        if isinstance(element, Exception):
            raise element
        before = self._next - 1
        return Chunk.of_rows([element], lambda index: before + index)

    def get_state(self) -> Any:
        return self._next

    def set_state(self, state: Any) -> None:
        self._next = state


def rows(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)


def read(iterator: ElementIterator) -> list[Any]:
    found: list[Any] = []
    while True:
        try:
            chunk = iterator.next_chunk(10)
        except Exception as error:
            found.append(error)
            continue
        if chunk is None:
            return found
        found += [each.tolist() for each in chunk.rows()]


def cost_of(fn: Any) -> UserFunction:
    return UserFunction(fn, "cost_fn", contain_exits=True)


def test_padding_fills_the_last_round_with_empty_batches() -> None:
    shaped = RoundShaper(Given(rows(1), rows(2), rows(3)), 2, remainder="pad")
    assert read(shaped) == [[1], [2], [3], []]


def test_end_together_divides_the_rows_of_the_last_round() -> None:
    shaped = RoundShaper(Given(rows(1, 2, 3), rows(4, 5)), 4, remainder="end_together")
    assert read(shaped) == [[1, 2], [3], [4], [5]]


def test_complete_rounds_are_unchanged_without_a_cost_function() -> None:
    shaped = RoundShaper(Given(rows(1, 2), rows(3)), 2, remainder="end_together")
    assert read(shaped) == [[1, 2], [3]]


def test_costs_are_balanced_within_a_round() -> None:
    shaped = RoundShaper(Given(rows(10, 9), rows(1, 2)), 2, cost_fn=cost_of(lambda row: row))
    assert read(shaped) == [[10, 1], [9, 2]]


def test_the_components_of_a_row_stay_together() -> None:
    batches = [{"a": rows(10, 9), "b": rows(0, 1)}, {"a": rows(1, 2), "b": rows(2, 3)}]
    shaped = RoundShaper(Given(*batches), 2, cost_fn=cost_of(lambda row: row["a"]))
    found = [shaped.next_chunk(1) for _ in range(2)]
    assert [chunk.rows()[0]["b"].tolist() for chunk in found if chunk] == [[0, 2], [1, 3]]


def test_a_round_with_an_error_is_unchanged() -> None:
    error = ValueError("bad")
    shaped = RoundShaper(
        Given(rows(5, 1), error, rows(2, 2), rows(7, 1)), 2, cost_fn=cost_of(lambda row: row)
    )
    assert read(shaped) == [[5, 1], error, [7, 1], [2, 2]]


def test_an_error_of_the_cost_function_is_raised_once_per_consumer() -> None:
    shaped = RoundShaper(Given(rows(1), rows(2)), 2, cost_fn=cost_of(lambda row: 1 / 0))
    found = read(shaped)
    assert [type(each) for each in found] == [UserFunctionError] * 2
    assert "ZeroDivisionError" in str(found[0])


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_negative_cost_is_rejected(cost: float) -> None:
    shaped = RoundShaper(Given(rows(1), rows(2)), 2, cost_fn=cost_of(lambda row: cost))
    assert "must return a finite number of at least 0" in str(read(shaped)[0])


def test_rows_of_different_shapes_are_rejected_with_the_fix() -> None:
    batches = [np.zeros((2, 3)), np.zeros((2, 4))]
    shaped = RoundShaper(Given(*batches), 2, cost_fn=cost_of(lambda row: 1.0))
    (first, second) = read(shaped)
    assert isinstance(first, InvalidArgumentError)
    assert isinstance(second, InvalidArgumentError)
    assert "pad_to_bucket_boundary=True" in str(first)


@pytest.mark.parametrize("element", [5, np.int64(5), {}])
def test_elements_without_rows_are_rejected(element: Any) -> None:
    shaped = RoundShaper(Given(element), 2, remainder="end_together")
    (first, second) = read(shaped)
    assert isinstance(first, InvalidArgumentError)
    assert isinstance(second, InvalidArgumentError)


def test_splits_count_with_the_last_element_of_a_round() -> None:
    shaped = RoundShaper(Given(rows(1), rows(2), rows(3), rows(4)), 2, remainder="pad")
    states = []
    while (chunk := shaped.next_chunk(1)) is not None:
        states.append(chunk.state_at(1))
    assert states == [0, 2, 2, 4]
