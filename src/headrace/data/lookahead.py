"""Iterators that are read ahead of what the consumer has used.

A consumer that puts the next batch on a device while the previous one is in use has read more than
was used. States refer to the used elements.
"""

from __future__ import annotations

from operator import length_hint
from typing import Any

from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.data.saved_state import IteratorPosition
from headrace.execution.context import next_iteration_number
from headrace.plan.node import Node

__all__ = ["IteratorPosition", "LookaheadIterator", "next_epoch", "open_lookahead"]


class LookaheadIterator(DatasetIterator):
    """A `DatasetIterator` whose state is that of the last consumed position (`mark_consumed`).

    Before the first call and after `set_state`, it is that of the next element, as usual.
    """

    _consumed: IteratorPosition | None = None

    @property
    def can_read_ahead(self) -> bool:
        """Whether positions can be used later; a data service discards elements already read."""
        return not self._replay_buffers and not self._restore_obstacle

    @property
    def is_ready(self) -> bool:
        """Whether the next element, its error or the end is available without waiting, if known."""
        rows, running = self._buffered, self._running
        if rows is None or not running:  # it is built first
            return False
        return length_hint(rows) > 0 or running[-1].is_ready

    @property
    def position(self) -> IteratorPosition:
        """Position of the next element, for `rewind` only: it may lack a state at the start."""
        return IteratorPosition(self._states, self._offset)

    @property
    def start_position(self) -> dict[str, Any]:
        """The position in a state of the start, with any seed."""
        steps = {"service_steps": self._service_steps} if self._service_steps else {}
        return {"stream": None, **steps}

    def mark_consumed(self, position: IteratorPosition) -> None:
        """Record that exactly the elements before a position were consumed."""
        self._consumed = position

    def rewind(self, position: IteratorPosition) -> None:
        """Return to a position, to read the elements after it again."""
        self._buffered, self._has_ended = None, False
        self._states, self._offset = position.states, position.offset

    def get_state(self) -> dict[str, Any]:
        """Return the state of the last consumed position."""
        return super().get_state() if self._consumed is None else self.state_at(self._consumed)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the position of `state`."""
        super().set_state(state)
        self._consumed = None


def open_lookahead(dataset: Dataset, plan: Node) -> LookaheadIterator:
    """Return an iterator over one epoch of a dataset, for training.

    Args:
        dataset: Dataset whose epochs are counted.
        plan: Plan to read: the dataset's own, or one derived from it.
    """
    return LookaheadIterator(
        plan, next_epoch(dataset), lambda: dataset.element_spec, for_training=True
    )


def next_epoch(dataset: Dataset, minimum: int = 0) -> int:
    """Return the number of the next epoch of a dataset, and count it as begun.

    Args:
        dataset: Dataset whose epochs are counted.
        minimum: Smallest number to return.
    """
    number = next(number for number in dataset._epochs if number >= minimum)
    return next_iteration_number(dataset.plan, number)
