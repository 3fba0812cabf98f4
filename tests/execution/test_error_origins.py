"""Where errors stand among the elements of their units."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.execution.origins import (
    ErrorOrigin,
    blame_element,
    give_origin,
    origin_of_error,
)

PLACES = np.array([(5, 0), (5, 3), (8, 1)], dtype=[("unit", "<i8"), ("ordinal", "<i8")])


def test_an_element_that_fails_above_the_root_is_counted_there() -> None:
    # Whoever goes on after the error has element 3 of unit 5 done, and begins with 4.
    error = ValueError()
    blame_element(error, PLACES, 1)
    origin = origin_of_error(error)
    assert origin == ErrorOrigin(unit=5, ordinal=4, number=0)
    assert origin.element == 3


def test_an_error_at_the_root_stands_before_an_element() -> None:
    error = ValueError()
    give_origin(error, ErrorOrigin(5, 4, 1))
    origin = origin_of_error(error)
    assert origin is not None
    assert origin.element == 4


def test_an_element_without_an_origin_is_not_blamed() -> None:
    error = ValueError()
    blame_element(error, None, 0)
    blame_element(error, np.array([(5,)], dtype=[("unit", "<i8")]), 0)
    assert origin_of_error(error) is None


@pytest.mark.parametrize(
    ("origin", "stands_for_all"),
    [
        (ErrorOrigin(5, 0, 1, is_last=True), True),
        (ErrorOrigin(5, 0, 1), False),
        (ErrorOrigin(5, 2, 1, is_last=True), False),
    ],
)
def test_an_error_stands_for_a_unit_that_has_nothing_else(
    origin: ErrorOrigin, stands_for_all: bool
) -> None:
    assert origin.stands_for_all is stands_for_all


def test_sorted_origins_are_in_the_order_in_which_the_errors_stand() -> None:
    # Element 0 of the unit failed; then two errors stand before element 1.
    failed, first, second = ErrorOrigin(5, 1, 0), ErrorOrigin(5, 1, 1), ErrorOrigin(5, 1, 2)
    assert sorted([second, ErrorOrigin(6, 0, 1), failed, first])[:3] == [failed, first, second]
