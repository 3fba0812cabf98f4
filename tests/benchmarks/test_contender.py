"""Tests of the timed rounds of a contender: counting, epochs, checks and errors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest

from benchmarks.contender import Rounds, drain, drain_measured
from benchmarks.workload import expect


def test_items_of_all_epochs_are_counted() -> None:
    seen: list[int] = []

    def epoch() -> Iterator[int]:
        yield from (3, 4, 5)

    def consume(element: int) -> int:
        seen.append(element)
        return element

    items, took, _ = drain(epoch, epoch(), consume, 0.01)
    assert items == sum(seen)
    assert len(seen) > 3, "a second epoch was read"
    assert took >= 0.01


def test_without_consume_elements_are_counted() -> None:
    numbers = count()
    items, _, elements = drain(lambda: numbers, numbers, None, 0.005)
    assert next(elements) == items


def test_an_empty_epoch_is_an_error() -> None:
    with pytest.raises(ValueError, match="no elements"):
        drain(lambda: iter(()), iter(()), None, 10.0)


def test_a_reopened_round_starts_at_the_first_element() -> None:
    opened: list[Iterator[int]] = []

    def pipeline() -> Iterator[int]:
        opened.append(count())
        return opened[-1]

    rounds = Rounds(pipeline, None, reopen=True)
    rounds.run(0.002, ramp=0.0)
    rounds.run(0.002, ramp=0.001)
    assert len(opened) == 2


def test_rounds_of_one_iterator_continue_after_its_check() -> None:
    opened: list[Iterator[int]] = []
    checked: list[int] = []

    def pipeline() -> Iterator[int]:
        opened.append(count())
        return opened[-1]

    consumed: list[int] = []

    def consume(element: int) -> int:
        consumed.append(element)
        return 1

    rounds = Rounds(pipeline, consume, reopen=False)
    rounds.check(lambda elements: checked.extend(islice(elements, 3)))
    rounds.run(0.002, ramp=0.0)
    rounds.run(0.002, ramp=0.0)
    assert checked == [0, 1, 2]
    assert consumed == list(range(3, 3 + len(consumed)))
    assert len(opened) == 1


def test_wrong_data_is_an_error_with_the_message_of_the_check() -> None:
    with pytest.raises(ValueError, match="wrong data: the order"):
        expect(False, "the order")


def test_measurements_of_contenders_are_summed() -> None:
    def epoch() -> Iterator[tuple[int, float]]:
        yield from ((2, 0.5), (1, 0.25))

    items, took, _ = drain_measured(epoch, epoch(), 0.0)
    assert (items, took) == (2, 0.5), "at least one"
    items, took, _ = drain_measured(epoch, epoch(), 0.01)
    assert items >= 3
    assert took >= 0.75


def test_an_empty_epoch_of_measurements_is_an_error() -> None:
    with pytest.raises(ValueError, match="no elements"):
        drain_measured(lambda: iter(()), iter(()), 10.0)


def test_the_rate_of_self_timed_contenders_uses_their_seconds() -> None:
    rounds = Rounds(lambda: iter([(10, 2.0)] * 1000), None, reopen=True, self_timed=True)
    assert rounds.run(0.0, ramp=1.0)["rate"] == 5.0
