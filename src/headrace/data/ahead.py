"""An iterator that is read further than counts as read, for whoever holds elements back.

Whoever puts the next batch on a device while the one before is in use has read more than was used.
States say what was used.
"""

from __future__ import annotations

from operator import length_hint
from typing import Any

from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.data.saved_state import Mark
from headrace.execution.context import next_iteration
from headrace.plan.node import Node

__all__ = ["AheadIterator", "Mark", "next_pass", "read_ahead"]


class AheadIterator(DatasetIterator):
    """A `DatasetIterator` whose states are those of the mark that `use` was called with last.

    Until then, and after `set_state`, they are those of the next element, as usual.
    """

    _used: Mark | None = None

    @property
    def may_run_ahead(self) -> bool:
        """Whether marks can be used later. A data service forgets what was read before."""
        return not self._keepers and not self._cannot_restore

    @property
    def is_ready(self) -> bool:
        """Whether the next element, its error or the end is there without a wait, if known."""
        rows, running = self._rows, self._running
        if rows is None or not running:  # it is built first
            return False
        return length_hint(rows) > 0 or running[-1].is_ready

    @property
    def here(self) -> Mark:
        """The place of the next element, for `go_back` alone: the beginning has no name yet."""
        return Mark(self._states, self._offset)

    def use(self, mark: Mark) -> None:
        """Take note that what is before a mark was used, and no more."""
        self._used = mark

    def go_back(self, mark: Mark) -> None:
        """Have the elements after a mark come again, which were read and not used."""
        self._rows, self._has_ended = None, False
        self._states, self._offset = mark.states, mark.offset

    def get_state(self) -> dict[str, Any]:
        """Return the state of the mark that was used last."""
        return super().get_state() if self._used is None else self.state_at(self._used)

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken."""
        super().set_state(state)
        self._used = None


def read_ahead(dataset: Dataset, plan: Node) -> AheadIterator:
    """Return an iterator over one pass of a dataset, for training.

    Args:
        dataset: Whose passes are counted.
        plan: What to read: the dataset's own, or one made of it.
    """
    return AheadIterator(plan, next_pass(dataset), lambda: dataset.element_spec, for_training=True)


def next_pass(dataset: Dataset, least: int = 0) -> int:
    """Return the number of the next pass over a dataset, which counts as begun.

    Args:
        dataset: Whose passes are counted.
        least: Numbers below it are left out.
    """
    number = next(number for number in dataset._passes if number >= least)
    return next_iteration(dataset.plan, number)
