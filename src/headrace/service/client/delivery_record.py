"""Splits of a task that this client received, completely or in part.

The elements of a split may be in several replies, to several clients. This client received the
split completely if all of these replies arrived here or, if elements have ids, if each of its
elements did.
"""

from __future__ import annotations

from collections import deque

from headrace.service.element_sets import ElementSet, PartialSplits, count_elements, first_elements
from headrace.service.messages import GetElementsReply
from headrace.service.ranges import union

__all__ = ["DeliveryRecord"]

_MAX_PENDING = 16
"""Number of replies, without their elements, that are queued before they are processed."""


class DeliveryRecord:
    """Received splits of one task, by assignment order."""

    def __init__(self) -> None:
        self._complete: list[list[int]] = []
        self._started: list[list[int]] = []
        #: Elements by id; only for tasks whose elements have ids.
        self._elements = ElementSet()
        self._has_element_ids = False
        #: The task's number of the first element after the last reply.
        self._next_element = 0
        #: From this split on, no other client has received elements since the task began.
        self._exclusive_from = 0
        #: Unprocessed replies; processing many at once is cheaper.
        self._pending_replies: deque[GetElementsReply] = deque()

    @property
    def delivered(self) -> tuple[tuple[int, int], ...]:
        """Ranges of completely received splits."""
        self._process_pending()
        complete = tuple((start, stop) for start, stop in self._complete)
        with_ids = self._elements.complete_splits
        return union((*complete, *with_ids)) if with_ids else complete

    @property
    def partially_delivered(self) -> tuple[tuple[int, int], ...]:
        """Ranges of splits with elements that may have been received."""
        self._process_pending()
        return tuple((start, stop) for start, stop in self._started)

    @property
    def partial_splits(self) -> PartialSplits:
        """Splits with some, but maybe not all, elements received."""
        self._process_pending()
        return self._elements.partial_splits

    def __bool__(self) -> bool:
        self._process_pending()
        return bool(self._started or self._elements)

    def add_reply(self, reply: GetElementsReply) -> None:
        """Record a reply. The replies of a task must be added in the order of their numbers."""
        self._pending_replies.append(reply)
        if len(self._pending_replies) >= _MAX_PENDING:
            self._process_pending()

    def _process_pending(self) -> None:
        while self._pending_replies:
            # In this order, so that an interrupt may repeat a reply but not lose one.
            self._add(self._pending_replies[0])
            self._pending_replies.popleft()

    def _add(self, reply: GetElementsReply) -> None:
        if reply.first_element != self._next_element:
            # The elements in between went to other clients.
            self._exclusive_from = reply.earlier_delivered_end
        self._next_element = reply.first_element + reply.num_elements
        start = max(reply.done_from, self._exclusive_from)
        _add_run(self._complete, start, reply.done_to)
        if reply.element_ids.runs:
            self._has_element_ids = True
        if self._has_element_ids:
            self._elements.add_with_complete(reply.element_ids.runs, start, reply.done_to)
            self._elements.forget(reply.num_done)
        self._mark_started(reply)

    def add_partial_reply(self, reply: GetElementsReply, number: int) -> None:
        """Record that the first `number` elements of a reply were consumed.

        If the ids of those elements are unknown, the reply counts as not consumed and is
        redelivered.
        """
        self._process_pending()
        self._mark_started(reply)
        if number >= reply.num_elements:
            self._elements.add(reply.element_ids.runs)
        elif (
            count_elements(reply.element_ids.runs) == reply.num_elements
            and not reply.element_ids.is_permuted
        ):
            self._elements.add(first_elements(reply.element_ids.runs, number))

    def _mark_started(self, reply: GetElementsReply) -> None:
        """Record that elements of a reply's splits were received."""
        _add_run(self._started, reply.done_from, max(reply.delivered_end, reply.done_to))


def _add_run(runs: list[list[int]], start: int, stop: int) -> None:
    """Add `start` to `stop` - 1 to ascending runs; adjacent runs are merged."""
    if start >= stop:
        return
    if runs and runs[-1][0] <= start <= runs[-1][1]:
        runs[-1][1] = max(runs[-1][1], stop)
    else:
        runs.append([start, stop])
