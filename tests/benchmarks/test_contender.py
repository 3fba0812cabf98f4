"""The timed part: every element is counted once, epochs follow one another, wrong data is told."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest

from benchmarks.contender import Rounds, drain, drain_measured
from benchmarks.workload import expect


def test_items_are_what_consume_saw_in_all_epochs() -> None:
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


def test_an_empty_epoch_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(ValueError, match="no elements"):
        drain(lambda: iter(()), iter(()), None, 10.0)


def test_a_reopened_round_starts_at_the_first_element_again() -> None:
    opened: list[Iterator[int]] = []

    def pipeline() -> Iterator[int]:
        opened.append(count())
        return opened[-1]

    rounds = Rounds(pipeline, None, reopen=True)
    rounds.run(0.002, ramp=0.0)
    rounds.run(0.002, ramp=0.001)
    assert len(opened) == 2


def test_a_kept_iterator_goes_on_where_its_check_ended() -> None:
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


def test_wrong_data_is_an_error_that_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="wrong data: the order"):
        expect(False, "the order")


def test_elements_that_say_what_they_took_are_summed_and_nothing_else_is_timed() -> None:
    def epoch() -> Iterator[tuple[int, float]]:
        yield from ((2, 0.5), (1, 0.25))

    items, took, _ = drain_measured(epoch, epoch(), 0.0)
    assert (items, took) == (2, 0.5), "at least one"
    items, took, _ = drain_measured(epoch, epoch(), 0.01)
    assert items >= 3
    assert took >= 0.75


def test_an_empty_epoch_of_measured_elements_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(ValueError, match="no elements"):
        drain_measured(lambda: iter(()), iter(()), 10.0)


def test_a_round_of_measured_elements_has_a_rate_by_their_own_clock() -> None:
    rounds = Rounds(lambda: iter([(10, 2.0)] * 1000), None, reopen=True, own_clock=True)
    assert rounds.run(0.0, ramp=1.0)["rate"] == 5.0
