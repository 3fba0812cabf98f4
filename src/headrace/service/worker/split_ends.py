"""Timing of the reports that splits have ended."""

from __future__ import annotations

from headrace.service.element_sets import ElementIdRun

__all__ = ["SplitEnds"]


class SplitEnds:
    """Ends of splits that were not reported yet.

    In ordered reading, an end is reported after the last element or error of its split: a client
    that has all elements of an ended split expects nothing more of it.

    Args:
        is_ordered: Whether elements are read in order.
    """

    def __init__(self, *, is_ordered: bool) -> None:
        self._is_ordered = is_ordered
        self._waiting: list[ElementIdRun] = []

    def take_due(self, ended: tuple[ElementIdRun, ...], done: int) -> tuple[ElementIdRun, ...]:
        """Return the ends that may be reported now.

        Args:
            ended: Splits that ended since the last call.
            done: End of the splits, in assignment order, that are completely reported with this
                call.
        """
        if not self._is_ordered:
            return ended
        due: list[ElementIdRun] = []
        waiting, self._waiting = [*self._waiting, *ended], []
        for split, num_splits, first, count in waiting:
            num_due = max(0, min(num_splits, done - split))
            if num_due:
                due.append((split, num_due, first, count))
            if num_due < num_splits:
                self._waiting.append((split + num_due, num_splits - num_due, first, count))
        return tuple(due)
