"""How many units a task asks for, and how it waits for them."""

from __future__ import annotations

import math

import pytest

from headrace.service.messages import SplitGranted
from headrace.service.worker.unit_asking import UnitAsking, next_want


@pytest.mark.parametrize(
    ("want", "seconds", "expected"),
    [(1, 0.001, 2), (8, 0.02, 16), (8, 0.05, 8), (8, 2.0, 4), (1, 2.0, 1), (1 << 24, 0.0, 1 << 24)],
)
def test_a_range_used_up_soon_is_followed_by_a_longer_one(
    want: int, seconds: float, expected: int
) -> None:
    assert next_want(want, seconds) == expected


def test_what_is_granted_is_counted_and_ends_the_waiting() -> None:
    asking = UnitAsking()
    asking.need(1.0)
    assert asking.ask_at == 1.0
    asking.ask_at = math.inf
    assert asking.is_asked
    assert asking.take(SplitGranted(start=3, stop=5), 1.0) == (3, 5)
    assert (asking.number, asking.dealt, asking.is_wanted) == (1, 2, False)


def test_an_answer_without_units_does_not_count() -> None:
    asking = UnitAsking()
    asking.need(1.0)
    assert asking.take(SplitGranted(start=0, stop=0, wait=True), 1.0) is None
    assert (asking.number, asking.ask_at, asking.is_over) == (0, 1.02, False)
    assert asking.take(SplitGranted(start=0, stop=0), 1.02) is None
    assert (asking.number, asking.is_over) == (0, True)


def test_a_range_that_was_waited_for_lasts_from_its_grant() -> None:
    asking = UnitAsking()
    asking.need(0.0)
    asking.take(SplitGranted(start=0, stop=0, wait=True), 1.0)
    asking.take(SplitGranted(start=0, stop=1), 9.0)
    asking.need(9.001)
    assert asking.want == 2
