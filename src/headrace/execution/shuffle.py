"""The shuffle iterator: a buffer of elements, restored by reading again what it must hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.chunk import concatenate as concatenate_chunks
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.shuffle_order import Draws, drawn_from, slot_ordinals
from headrace.plan.ordering import Shuffle

__all__ = ["ShuffleIterator"]

_BLOCK = 4096
"""Indices that are drawn at once: the fixed cost of a block of NumPy calls is spread over them."""


@make_iterator.register(Shuffle)
class ShuffleIterator(ElementIterator):
    """Yields its input in random order.

    Plain integer columns (indices, before anything is gathered) are drawn in blocks with NumPy;
    other elements one by one, by the same draws.

    Its state is the number of draws that were delivered, and a state of the input from which all
    that the buffer holds can be read again.
    """

    def __init__(self, node: Shuffle, context: Context) -> None:
        self._input = make_iterator(node.input, context.below(0))
        self._draws = Draws(_entropy(node, context), node.buffer_size)
        self._size = node.buffer_size
        self._begin()

    def _begin(self) -> None:
        #: Inputs read so far; the ordinal of the next.
        self._read = 0
        #: Draws made; at most `_read - size`.
        self._drawn = 0
        self._filling: list[Chunk] = []
        self._values: NDArray[np.int64] | None = None  # what the slots hold, as a column ...
        self._rows: list[Any] = []  # ... or as rows
        self._ordinals = np.empty(0, np.int64)  # and which input that was
        self._is_full = False
        self._order: NDArray[np.int64] | None = None  # of the slots, once the input has ended
        self._left = 0  # slots emptied since
        self._ready: Chunk | None = None  # drawn in a block, not yet delivered
        self._delivered = 0  # elements of `_ready` that were
        #: Where the input can be taken up again: (ordinal, state), the oldest first. The first is
        #: at or before the oldest input that the buffer holds.
        self._marks: deque[tuple[int, State]] = deque()
        self._pruned_at = 0

    # --- reading ------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._ready is not None:
            return self._deliver(limit)
        if not self._is_full:
            self._fill()
        if self._order is None:
            chunk = self._draw(limit)
            if chunk is not None:
                return chunk
            self._order = self._draws.last_order(self._held)
        return self._empty(limit)

    @property
    def _held(self) -> int:
        return len(self._rows) if self._values is None else len(self._values)

    def _deliver(self, limit: int) -> Chunk:
        assert self._ready is not None
        start = self._delivered
        stop = min(start + limit, self._ready.size)
        chunk = self._ready.slice(start, stop)
        self._delivered = stop
        if stop == self._ready.size:
            self._ready = None
            self._delivered = 0
        return chunk

    def _pull(self, limit: int) -> Chunk | None:
        if not self._marks or self._read - self._marks[-1][0] >= max(self._size // 8, 64):
            self._marks.append((self._read, self._input.get_state()))
        chunk = self._input.next_chunk(limit)
        if chunk is not None:
            self._read += chunk.size
        return chunk

    def _fill(self) -> None:
        while self._read < self._size:
            chunk = self._pull(min(self._size - self._read, 1 << 16))
            if chunk is None:
                break
            self._filling.append(chunk)
        held = concatenate_chunks(self._filling) if self._filling else Chunk.of_rows([])
        self._hold(held, np.arange(held.size))
        self._filling = []

    def _hold(self, held: Chunk, ordinals: NDArray[np.int64]) -> None:
        if _is_index_column(held):
            self._values = np.array(held.columns())
        else:
            self._rows = list(held.rows())
        self._ordinals = ordinals
        self._is_full = True

    def _draw(self, limit: int) -> Chunk | None:
        """Draw up to `limit` elements, one for each new input; None: the input has ended."""
        incoming = self._pull(limit if self._values is None else max(limit, _BLOCK))
        if incoming is None:
            return None
        slots = self._draws.take(incoming.size)
        if self._drawn - self._pruned_at >= self._size // 4:
            self._prune()
        first = self._drawn + self._size
        self._drawn += incoming.size
        if self._values is not None and _is_index_column(incoming):
            out = drawn_from(slots, self._values, incoming.columns())
            self._ordinals[slots] = np.arange(first, first + incoming.size)
            self._ready = Chunk.of_columns(out, incoming.size)
            return self._deliver(limit)
        if self._values is not None:  # an input of mixed kinds: rows from here on
            self._rows, self._values = list(self._values), None
        yielded, held = [], self._rows
        for slot, row in zip(slots.tolist(), incoming.rows(), strict=True):
            yielded.append(held[slot])
            held[slot] = row
        self._ordinals[slots] = np.arange(first, first + incoming.size)
        return Chunk.of_rows(yielded)

    def _empty(self, limit: int) -> Chunk | None:
        assert self._order is not None
        slots = self._order[self._left : self._left + limit]
        if not len(slots):
            return None
        self._left += len(slots)
        if self._values is not None:
            return Chunk.of_columns(self._values[slots], len(slots))
        return Chunk.of_rows([self._rows[slot] for slot in slots.tolist()])

    # --- state --------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Forget the marks that lie before all that the buffer holds."""
        oldest = int(self._ordinals.min())
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.popleft()
        self._pruned_at = self._drawn

    def get_state(self) -> State:
        waiting = 0 if self._ready is None else self._ready.size - self._delivered
        drawn = self._drawn - waiting
        if not self._marks:
            return {"drawn": 0, "left": 0, "from": 0, "input": self._input.get_state()}
        ordinal, state = self._marks[0]
        return {"drawn": drawn, "left": self._left, "from": ordinal, "input": state}

    def set_state(self, state: State) -> None:
        self._begin()
        self._input.set_state(state["input"])
        self._draws.seek(state["drawn"])
        if state["from"] == state["drawn"] == state["left"] == 0:
            return
        self._marks.append((state["from"], state["input"]))
        self._drawn = self._pruned_at = state["drawn"]
        self._read = state["from"]
        ordinals = slot_ordinals(self._draws, self._drawn, self._size) if self._drawn else None
        held: list[Chunk] = []
        found: list[NDArray[np.int64]] = []
        while self._read < self._size + self._drawn:
            first = self._read
            try:
                chunk = self._pull(min(self._size + self._drawn - first, 1 << 16))
            except Exception:  # an element that failed before fails again and counts as none
                continue
            if chunk is None:
                break
            if ordinals is None:
                held.append(chunk)
                continue
            slots = np.flatnonzero((ordinals >= first) & (ordinals < self._read))
            if len(slots):
                held.append(chunk.take(ordinals[slots] - first))
                found.append(slots)
        whole = concatenate_chunks(held) if held else Chunk.of_rows([])
        if ordinals is None:
            ordinals = np.arange(whole.size)
        else:
            # `whole` lists the slots in the order in which they were found: back to slot order.
            whole = whole.take(np.argsort(np.concatenate(found)))
        self._hold(whole, ordinals)
        if state["left"]:
            self._order = self._draws.last_order(self._held)
            self._left = state["left"]

    def close(self) -> None:
        self._input.close()


def _entropy(node: Shuffle, context: Context) -> Sequence[int]:
    mask = (1 << 64) - 1
    epoch = context.epoch if node.reshuffle_each_iteration else ()
    if node.seed is not None:
        return [1, node.seed & mask, *epoch]
    return [2, context.seed & mask, len(context.path), *context.path, *epoch]


def _is_index_column(chunk: Chunk) -> bool:
    if not chunk.is_columnar:
        return False
    columns = chunk.columns()
    return isinstance(columns, np.ndarray) and columns.ndim == 1 and columns.dtype == np.int64
