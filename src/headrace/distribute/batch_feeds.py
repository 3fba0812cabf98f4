"""Feeds of global batches, of which each replica gets a piece.

Split       each batch is cut into pieces (`rebatch.ceil_steps`)
Balanced    the same, cut where the pieces' turns say (`rebatch.size_of_piece`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.data.iterator import DatasetIterator
from headrace.distribute.feeds import Feed, Step, inputs_of, rows_of
from headrace.distribute.rebatch import Piece, ceil_steps, size_of_piece
from headrace.element.structure import Structure, flatten

__all__ = ["Balanced", "Split"]


class _Batches:
    """Reads batches, and knows where each came from.

    Args:
        elements: What reads them.
        remembers: Whether a part of a batch may be left after a step, so that its place is needed.
    """

    def __init__(self, elements: DatasetIterator, remembers: bool) -> None:
        self._elements = elements
        self._remembers = remembers
        #: The place of the last batch, where it is remembered.
        self.place: dict[str, Any] | None = None

    def next(self) -> tuple[list[Any], Structure, int] | None:
        """Return a batch's leaves, its structure, and how many rows it has.

        Raises:
            InvalidArgumentError: It is no batch.
        """
        if self._remembers:
            self.place = self._elements.get_state()
        for element in self._elements:
            leaves, structure = flatten(element)
            return leaves, structure, rows_of(leaves, structure)
        return None

    def get_state(self) -> dict[str, Any]:
        return self._elements.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._elements.set_state(state)

    def close(self) -> None:
        self._elements.close()


class Split(Feed):
    """Cuts each batch into pieces of ceil(rows / replicas).

    Args:
        elements: Reads the batches.
        replicas: Of all workers.
        here: Of this worker.
        every: So many workers read the same batches, and this one gets every so-manieth piece,
            from piece `first` on. 1: it has them for itself.
        first: See `every`.
    """

    def __init__(
        self,
        elements: DatasetIterator,
        replicas: int,
        here: int,
        every: int = 1,
        first: int = 0,
    ) -> None:
        #: Whether a batch may be more than one step.
        self._has_rest = every * here < replicas
        self._batches = _Batches(elements, self._has_rest)
        self._replicas, self._here = replicas, here
        self._every, self._first = every, first
        self._leaves: list[Any] = []
        self._structure: Structure | None = None
        #: Steps that are left of the batch: the pieces for all who read it.
        self._steps: list[list[Piece]] = []
        #: Rows of the batch that were used, as the state says it.
        self._done = 0
        self._skip = 0

    def next_step(self) -> Step | None:
        if not self._steps and not self._read():
            return None
        pieces = self._steps.pop(0)
        self._done = pieces[-1][1] if self._steps else 0
        mine = pieces[self._first :: self._every]
        assert self._structure is not None
        return self._structure, [[leaf[a:b] for a, b in mine] for leaf in self._leaves]

    def _read(self) -> bool:
        while True:
            batch = self._batches.next()
            if batch is None:
                return False
            self._leaves, self._structure, rows = batch
            at_once = self._here * self._every
            self._steps = ceil_steps(rows, self._replicas, at_once, self._skip)
            self._skip = 0
            if self._steps:
                return True

    def get_state(self) -> dict[str, Any]:
        if self._done:
            return {"inputs": [self._batches.place], "rows": self._done}
        return {"inputs": [self._batches.get_state()], "rows": self._skip}

    def set_state(self, state: dict[str, Any]) -> None:
        (place,) = inputs_of(state, 1)
        self._batches.set_state(place)
        self._steps, self._done = [], 0
        self._skip = state["rows"]

    def close(self) -> None:
        self._batches.close()


class Balanced(Feed):
    """Cuts the stream of all rows into pieces whose sizes take turns.

    Args:
        elements: Reads the batches.
        sizes: Returns the sizes of the pieces that take turns, for a global batch of so many rows.
        here: Pieces to a step of this worker.
        every: 1: the worker has its batches for itself. Else all workers read the same ones, and
            this one gets every so-manieth piece, from piece `first` on.
        first: See `every`.
        size: Rows of a global batch; None: as many as the first has.
    """

    def __init__(
        self,
        elements: DatasetIterator,
        sizes: Callable[[int], list[int]],
        here: int,
        every: int = 1,
        first: int = 0,
        size: int | None = None,
    ) -> None:
        self._batches = _Batches(elements, remembers=True)
        self._sizes_of, self._size = sizes, size
        self._sizes: list[int] = [] if size is None else sizes(size)
        self._count, self._every, self._first = here * every, every, first
        #: Batches that are not used up: the place, the leaves, the rows from start to stop.
        self._held: deque[tuple[dict[str, Any] | None, list[Any], int, int]] = deque()
        self._structure: Structure | None = None
        #: Pieces that were cut.
        self._pieces = 0
        self._skip = 0

    def next_step(self) -> Step | None:
        if not self._held and not self._hold():
            return None
        if not self._sizes:
            self._size = self._held[0][3]
            self._sizes = self._sizes_of(self._size)
        numbers = range(self._pieces, self._pieces + self._count)
        wanted = [size_of_piece(self._sizes, number) for number in numbers]
        # All that is needed first: where that fails, nothing is taken.
        while sum(stop - start for _, _, start, stop in self._held) < sum(wanted):
            if not self._hold():
                break
        empty = [leaf[:0] for leaf in self._held[0][1]]
        parts = [self._take(rows, empty) for rows in wanted]
        self._pieces += self._count
        assert self._structure is not None
        mine = parts[self._first :: self._every]
        return self._structure, [list(column) for column in zip(*mine, strict=True)]

    def _take(self, wanted: int, empty: list[Any]) -> list[Any]:
        """Return the leaves of the next rows, of one batch or of several."""
        found: list[list[Any]] = []
        while wanted and self._held:
            place, leaves, start, stop = self._held.popleft()
            end = min(stop, start + wanted)
            found.append([leaf[start:end] for leaf in leaves])
            wanted -= end - start
            if end < stop:
                self._held.appendleft((place, leaves, end, stop))
        if len(found) > 1:
            return [np.concatenate(parts) for parts in zip(*found, strict=True)]
        return found[0] if found else empty

    def _hold(self) -> bool:
        """Hold one batch more that has rows."""
        while True:
            batch = self._batches.next()
            if batch is None:
                return False
            leaves, self._structure, rows = batch
            start, self._skip = min(self._skip, rows), 0
            if start < rows:
                self._held.append((self._batches.place, leaves, start, rows))
                return True

    def get_state(self) -> dict[str, Any]:
        state = {"size": self._size, "sizes": self._sizes, "pieces": self._pieces}
        if self._held:
            place, _, start, _ = self._held[0]
            return {"inputs": [place], "rows": start, **state}
        return {"inputs": [self._batches.get_state()], "rows": self._skip, **state}

    def set_state(self, state: dict[str, Any]) -> None:
        (place,) = inputs_of(state, 1)
        self._batches.set_state(place)
        self._held.clear()
        self._skip = state["rows"]
        if state.get("size") is not None:
            self._size = int(state["size"])
            self._sizes = self._sizes_of(self._size)
        # Other replicas begin their turns at the first.
        self._pieces = state["pieces"] if state.get("sizes") == self._sizes else 0

    def close(self) -> None:
        self._batches.close()
