"""Receipts: which units of a task came whole to this client, and of which anything came.

A unit may have several elements, in answers to several clients. It is whole here only if all
answers with something of it came here, one after another; or, where elements have origins, if each
of them did.
"""

from __future__ import annotations

from collections import deque

from headrace.service.messages import GetElementsReply
from headrace.service.ranges import united
from headrace.service.rows import Parts, Rows, count_rows, first_rows

__all__ = ["Receipt"]

_MANY = 16
"""Answers, without what came with them, that are kept until they are gone through."""


class Receipt:
    """What came of one task, in units in dealt order."""

    def __init__(self) -> None:
        self._whole: list[list[int]] = []
        self._touched: list[list[int]] = []
        #: Elements by their origins; only where a task's elements have some.
        self._rows = Rows()
        self._has_origins = False
        #: The task's number of the first element after the last answer.
        self._next = 0
        #: Of units from this one on, nothing came to anybody else since the task began.
        self._since = 0
        #: Answers that were added and not gone through: many at once cost less.
        self._answers: deque[GetElementsReply] = deque()

    @property
    def whole(self) -> tuple[tuple[int, int], ...]:
        """Ranges of units of which all elements came."""
        self._go_through()
        whole = tuple((start, stop) for start, stop in self._whole)
        rows = self._rows.whole
        return united((*whole, *rows)) if rows else whole

    @property
    def touched(self) -> tuple[tuple[int, int], ...]:
        """Ranges of units of which something may have come."""
        self._go_through()
        return tuple((start, stop) for start, stop in self._touched)

    @property
    def parts(self) -> Parts:
        """Units of which some elements came, and perhaps not all."""
        self._go_through()
        return self._rows.parts

    def __bool__(self) -> bool:
        self._go_through()
        return bool(self._touched or self._rows)

    def add(self, answer: GetElementsReply) -> None:
        """Take note of an answer; those of one task are added in the order of their numbers."""
        self._answers.append(answer)
        if len(self._answers) >= _MANY:
            self._go_through()

    def _go_through(self) -> None:
        while self._answers:
            # In this order: an interruption in between may repeat one, and not leave it out.
            self._add(self._answers[0])
            self._answers.popleft()

    def _add(self, answer: GetElementsReply) -> None:
        if answer.first_element != self._next:
            # What was in between went to others.
            self._since = answer.earlier_delivered_end
        self._next = answer.first_element + answer.num_elements
        start = max(answer.done_from, self._since)
        _add_run(self._whole, start, answer.done_to)
        if answer.element_ids.runs:
            self._has_origins = True
        if self._has_origins:
            self._rows.add_with_whole(answer.element_ids.runs, start, answer.done_to)
            self._rows.forget(answer.num_done)
        self._touch(answer)

    def begin(self, answer: GetElementsReply, number: int) -> None:
        """Take note that the first `number` elements of an answer were used.

        Where nobody knows which origins those have, the answer counts as not used: it comes to
        somebody again.
        """
        self._go_through()
        self._touch(answer)
        if number >= answer.num_elements:
            self._rows.add(answer.element_ids.runs)
        elif (
            count_rows(answer.element_ids.runs) == answer.num_elements
            and not answer.element_ids.is_permuted
        ):
            self._rows.add(first_rows(answer.element_ids.runs, number))

    def _touch(self, answer: GetElementsReply) -> None:
        """Take note that something came of an answer."""
        _add_run(self._touched, answer.done_from, max(answer.delivered_end, answer.done_to))


def _add_run(runs: list[list[int]], start: int, stop: int) -> None:
    """Add `start` to `stop` - 1 to ascending runs, which are joined where they meet."""
    if start >= stop:
        return
    if runs and runs[-1][0] <= start <= runs[-1][1]:
        runs[-1][1] = max(runs[-1][1], stop)
    else:
        runs.append([start, stop])
