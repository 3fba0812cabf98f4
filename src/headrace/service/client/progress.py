"""Progress: which elements a reader that reads in no order has given, at each place of late.

A place is how many elements and errors were given. What came before it is said by units of the
stream and ordinals (`execution.delivered`), so that anybody can go on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.brief import InTurns
from headrace.errors import FailedPreconditionError
from headrace.execution.delivered import END, Delivered, DeliveryLog, OriginRun, with_ends
from headrace.execution.origins import order_in_turns, runs_of
from headrace.service.messages import GetElementsReply
from headrace.service.rows import count_rows, first_rows

__all__ = ["Progress", "rows_given"]

_MANY = 16
"""Answers, without what came with them, that are kept until they are gone through."""


class Progress:
    """What was given.

    Args:
        base: What was delivered before this reading began.
    """

    def __init__(self, base: Delivered) -> None:
        self._log = DeliveryLog(base)
        self._numbers: dict[int, _Numbers] = {}
        #: What was added and not gone through, and what to forget then: many at once cost less.
        self._added: deque[tuple[int, GetElementsReply, int, int]] = deque()
        self._before = 0

    def add(self, task_id: int, answer: GetElementsReply, start: int, size: int) -> None:
        """Take note of an answer that is given; those of a task come in their order.

        Args:
            task_id: Whose.
            answer: What its worker said.
            start: How many elements and errors were given before it.
            size: How many came with it.
        """
        self._added.append((task_id, answer, start, size))

    def _go_through(self) -> None:
        while self._added:
            # In this order: an interruption in between may repeat one, and not leave it out.
            self._add(*self._added[0])
            self._added.popleft()
        self._log.forget(self._before)

    def _add(self, task_id: int, answer: GetElementsReply, start: int, size: int) -> None:
        numbers = self._numbers.get(task_id)
        if numbers is None:
            numbers = self._numbers[task_id] = _Numbers()
        numbers.hear(answer)
        located = partial(_located, numbers.runs)
        self._log.add(start, size, lambda count: located(rows_given(answer, count, size)))

    def forget(self, before: int) -> None:
        """Take note that nobody asks for a place before this one any more."""
        self._before = max(self._before, before)
        if len(self._added) >= _MANY:
            self._go_through()

    def until(self, place: int) -> Delivered:
        """Return what was delivered before a place."""
        self._go_through()
        return self._log.until(place)


class _Numbers:
    """Which units of the stream the numbers of a task mean, in dealt order."""

    def __init__(self) -> None:
        #: (number, units, unit), ascending. Replaced when it changes, for answers keep it.
        self.runs: tuple[tuple[int, int, int], ...] = ()
        self._done = 0

    def hear(self, answer: GetElementsReply) -> None:
        """Take note of what was dealt."""
        # What was done at the answer before is in no answer any more: ends may be said late.
        done, self._done = self._done, answer.num_done
        if self.runs and self.runs[0][0] + self.runs[0][1] <= done:
            self.runs = tuple(run for run in self.runs if run[0] + run[1] > done)
        known = self.runs[-1][0] + self.runs[-1][1] if self.runs else 0
        if answer.element_ids.assigned and answer.element_ids.assigned[-1][0] >= known:
            new = [each[:3] for each in answer.element_ids.assigned if each[0] >= known]
            self.runs = (*self.runs, *new)


def _located(
    runs: tuple[tuple[int, int, int], ...], origins: Iterable[OriginRun]
) -> list[OriginRun]:
    """Return origins by units of the stream; those of units that are done are left out."""
    found: list[OriginRun] = []
    for number, units, first, count in origins:
        for start, many, unit in runs:
            if start <= number and number + units <= start + many:  # most often
                found.append((unit + number - start, units, first, count))
                break
            low, high = max(number, start), min(number + units, start + many)
            if low < high:
                found.append((unit + low - start, high - low, first, count))
    return found


def rows_given(answer: GetElementsReply, count: int, size: int) -> Iterable[OriginRun]:
    """Return the origins, in dealt order, of the first so many elements of an answer.

    Args:
        answer: What the worker said.
        count: Which.
        size: How many it has; of all of them, also what is known of ends.

    Raises:
        FailedPreconditionError: Whence those are nobody knows.
    """
    if count >= size:
        return answer.element_ids.runs
    if not count:
        return ()
    rows = count_rows(answer.element_ids.runs)
    number = (
        sum(answer.element_ids.ids_per_element[:count])
        if answer.element_ids.ids_per_element
        else count * (rows // size)
    )
    ends = [run for run in answer.element_ids.runs if run[2] + run[3] >= END]
    if not answer.element_ids.is_permuted:
        return with_ends(first_rows(_elements_in(answer.element_ids.runs), number), ends)
    order = _order_of(answer)
    if len(order) != rows:
        raise FailedPreconditionError(
            "the worker does not say which elements of a portion came first: is it of another "
            "version of Headrace?"
        )
    units, ordinals = _expanded(_elements_in(answer.element_ids.runs))
    chosen = order < number
    return with_ends(runs_of(units[chosen], ordinals[chosen]), ends)


def _order_of(answer: GetElementsReply) -> NDArray[Any]:
    if answer.element_ids.interleaving is not None:
        return order_in_turns(InTurns(*answer.element_ids.interleaving))
    return np.frombuffer(answer.element_ids.permutation, "<u4")


def _elements_in(origins: Iterable[OriginRun]) -> list[OriginRun]:
    return [run for run in origins if run[2] + run[3] < END]


def _expanded(origins: list[OriginRun]) -> tuple[Any, Any]:
    units, ordinals = [], []
    for unit, many, first, each in origins:
        units.append(np.repeat(np.arange(unit, unit + many), each))
        ordinals.append(np.tile(np.arange(first, first + each), many))
    return np.concatenate(units), np.concatenate(ordinals)
