"""Elements that an unordered reader has delivered, up to each recent position.

A position is the number of elements and errors delivered. The elements before it are identified by
split and ordinal (`execution.delivered_elements`), so that any client can resume there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.compact_columns import InterleavedSplits
from headrace.errors import FailedPreconditionError
from headrace.execution.delivered_elements import (
    END_ORDINAL,
    DeliveredElements,
    DeliveryLog,
    RawIdRun,
    with_split_ends,
)
from headrace.execution.element_ids import round_robin_order, to_runs
from headrace.service.element_sets import count_elements, first_elements
from headrace.service.messages import GetElementsReply

__all__ = ["DeliveryProgress", "delivered_elements"]

_MAX_PENDING = 16
"""Number of replies, without their elements, that are queued before they are processed."""


class DeliveryProgress:
    """Log of the delivered elements.

    Args:
        base: Elements delivered before this reading began.
    """

    def __init__(self, base: DeliveredElements) -> None:
        self._log = DeliveryLog(base)
        self._assignments: dict[int, _Assignments] = {}
        #: Unprocessed replies, and the position before which to discard; processing many at once is
        #: cheaper.
        self._pending: deque[tuple[int, GetElementsReply, int, int]] = deque()
        self._forget_before = 0

    def add(self, task_id: int, reply: GetElementsReply, start: int, size: int) -> None:
        """Record a reply that is delivered. The replies of a task must be added in their order.

        Args:
            task_id: Task of the reply.
            reply: The worker's reply.
            start: Number of elements and errors delivered before it.
            size: Number of elements and errors in it.
        """
        self._pending.append((task_id, reply, start, size))

    def _process_pending(self) -> None:
        while self._pending:
            # In this order, so that an interrupt may repeat a reply but not lose one.
            self._add(*self._pending[0])
            self._pending.popleft()
        self._log.discard_before(self._forget_before)

    def _add(self, task_id: int, reply: GetElementsReply, start: int, size: int) -> None:
        assignments = self._assignments.get(task_id)
        if assignments is None:
            assignments = self._assignments[task_id] = _Assignments()
        assignments.update(reply)
        locate = partial(_locate, assignments.runs)
        self._log.add(start, size, lambda count: locate(delivered_elements(reply, count, size)))

    def forget(self, before: int) -> None:
        """Discard positions before this one, which no caller will request."""
        self._forget_before = max(self._forget_before, before)
        if len(self._pending) >= _MAX_PENDING:
            self._process_pending()

    def delivered_before(self, position: int) -> DeliveredElements:
        """Return the elements delivered before a position."""
        self._process_pending()
        return self._log.delivered_before(position)


class _Assignments:
    """Maps the assignment order of one task to splits of the stream."""

    def __init__(self) -> None:
        #: Runs of (number in assignment order, length, split), ascending. The tuple is replaced
        #: when it changes, because replies hold references to it.
        self.runs: tuple[tuple[int, int, int], ...] = ()
        self._num_done = 0

    def update(self, reply: GetElementsReply) -> None:
        """Record the assignments reported in a reply."""
        # Later replies do not mention splits finished before the previous reply; ends may be
        # reported one reply late.
        done, self._num_done = self._num_done, reply.num_done
        if self.runs and self.runs[0][0] + self.runs[0][1] <= done:
            self.runs = tuple(run for run in self.runs if run[0] + run[1] > done)
        known_end = self.runs[-1][0] + self.runs[-1][1] if self.runs else 0
        assigned = reply.element_ids.assigned
        if assigned and assigned[-1][0] >= known_end:
            new_runs = [run[:3] for run in assigned if run[0] >= known_end]
            self.runs = (*self.runs, *new_runs)


def _locate(
    assignments: tuple[tuple[int, int, int], ...], runs: Iterable[RawIdRun]
) -> list[RawIdRun]:
    """Return element ids by split of the stream, without those of finished splits."""
    found: list[RawIdRun] = []
    for number, num_splits, first, count in runs:
        for start, length, split in assignments:
            if start <= number and number + num_splits <= start + length:  # usual case
                found.append((split + number - start, num_splits, first, count))
                break
            low, high = max(number, start), min(number + num_splits, start + length)
            if low < high:
                found.append((split + low - start, high - low, first, count))
    return found


def delivered_elements(reply: GetElementsReply, count: int, size: int) -> Iterable[RawIdRun]:
    """Return the ids, in assignment order, of the first `count` elements of a reply.

    Args:
        reply: The worker's reply.
        count: Number of elements from its start.
        size: Number of elements in the reply; for all of them, known split ends are included.

    Raises:
        FailedPreconditionError: If the reply does not tell which elements came first.
    """
    if count >= size:
        return reply.element_ids.runs
    if not count:
        return ()
    num_ids = count_elements(reply.element_ids.runs)
    first_ids = (
        sum(reply.element_ids.ids_per_element[:count])
        if reply.element_ids.ids_per_element
        else count * (num_ids // size)
    )
    ends = [run for run in reply.element_ids.runs if run[2] + run[3] >= END_ORDINAL]
    if not reply.element_ids.is_permuted:
        return with_split_ends(
            first_elements(_without_ends(reply.element_ids.runs), first_ids), ends
        )
    order = _order_of(reply)
    if len(order) != num_ids:
        raise FailedPreconditionError(
            "the worker's reply lacks the order of the elements in a result batch; does the worker "
            "run another version of Headrace?"
        )
    splits, ordinals = _expand(_without_ends(reply.element_ids.runs))
    is_included = order < first_ids
    return with_split_ends(to_runs(splits[is_included], ordinals[is_included]), ends)


def _order_of(reply: GetElementsReply) -> NDArray[Any]:
    if reply.element_ids.interleaving is not None:
        return round_robin_order(InterleavedSplits(*reply.element_ids.interleaving))
    return np.frombuffer(reply.element_ids.permutation, "<u4")


def _without_ends(runs: Iterable[RawIdRun]) -> list[RawIdRun]:
    return [run for run in runs if run[2] + run[3] < END_ORDINAL]


def _expand(runs: list[RawIdRun]) -> tuple[Any, Any]:
    splits, ordinals = [], []
    for split, num_splits, first, count in runs:
        splits.append(np.repeat(np.arange(split, split + num_splits), count))
        ordinals.append(np.tile(np.arange(first, first + count), num_splits))
    return np.concatenate(splits), np.concatenate(ordinals)
