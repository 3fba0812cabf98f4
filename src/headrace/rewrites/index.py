"""Gather late: steps that do not look at elements work on indices instead.

    Shuffle(FromSource(s))  ->  Shuffle(Gather(s, indices))  ->  Gather(s, Shuffle(indices))

The elements of an in-memory source are then touched once, when a whole batch of them is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec, Spec
from headrace.plan.batching import Batch
from headrace.plan.elements import FromSource, Gather
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat, Shard, Shuffle, Skip, Take
from headrace.plan.source import INFINITE, IndexedSource, Position

__all__ = ["Indices", "gather_late"]


def gather_late(node: Node) -> Node:
    """Read an indexed source by index, and move the gather above a step that does not look."""
    match node:
        case FromSource(source=IndexedSource() as source) if source.size != INFINITE:
            indices = FromSource(source=Indices(source.size), location=node.location)
            return Gather(source=source, input=indices, location=node.location)
        case Shuffle() | Repeat() | Take() | Skip() | Shard() | Batch():
            if isinstance(node.input, Gather):
                gather = node.input
                return gather.with_inputs([node.with_inputs(gather.inputs)])
    return node


@dataclass(frozen=True)
class Indices:
    """The integers 0 to `size` - 1, as a source."""

    size: int

    @property
    def element_spec(self) -> Spec:
        """An int64 scalar."""
        return ArraySpec((), np.int64)

    @property
    def elements_per_index(self) -> int:
        """One."""
        return 1

    @property
    def splittable(self) -> bool:
        """Always."""
        return True

    def open(self, start: int, stop: int, position: Position = None) -> _IndexReader:
        """Return a reader of `start` to `stop` - 1."""
        return _IndexReader(start if position is None else position, stop)


class _IndexReader:
    def __init__(self, next_: int, stop: int) -> None:
        self._next = next_
        self._stop = stop

    def read(self, limit: int) -> Chunk | None:
        start = self._next
        if start >= self._stop:
            return None
        self._next = min(start + limit, self._stop)
        return Chunk.of_columns(np.arange(start, self._next), self._next - start)

    def get_position(self) -> Position:
        return self._next

    def close(self) -> None:
        return
