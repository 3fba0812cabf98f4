"""The shuffles: of an index part, which is arithmetic, and of values, which reads again.

Both fill a buffer with the first elements; then each draw yields what a slot holds and puts in the
next element; when the input has ended, what is left comes in random order. They draw alike, so a
plan has the same order whichever of them runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk, States
from headrace.errors import DataLossError
from headrace.execution.context import Context
from headrace.execution.intake import Live
from headrace.execution.iterator import ElementIterator, Singles, State, make_iterator
from headrace.execution.reread import Reread
from headrace.execution.shuffle_buffer import (
    OWN_MEMORY,
    Draws,
    Slots,
    slot_ordinals,
    unpinned,
    unpinned_rows,
)
from headrace.plan.ordering import Shuffle
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality, is_index_part
from headrace.plan.user_function import step_name

__all__ = ["IndexShuffleIterator", "ShuffleIterator"]

_BLOCK = 4096
"""Positions drawn at once: the fixed cost of a block of NumPy calls is spread over them."""
_FILL = 1 << 16
_BLOCK_BYTES = 1 << 20
_DRAWN_AHEAD = 1024
_SINGLES = range(1, _DRAWN_AHEAD + 1)
"""Draws for single elements, from one mark to the next (`Reread`)."""


@make_iterator.register(Shuffle)
def _make_shuffle(node: Shuffle, context: Context) -> ElementIterator:
    if is_index_part(node):
        return IndexShuffleIterator(node, context)
    return ShuffleIterator(node, context)


def _draws(node: Shuffle, context: Context) -> Draws:
    mask = (1 << 64) - 1
    if node.seed is None:
        if node.reshuffle_each_iteration:
            return Draws(context.entropy(node.number), node.buffer_size)
        return Draws(context.fixed_entropy(node.number, node.drawn_seed), node.buffer_size)
    passes_too = context.passes if node.reshuffle_each_iteration else ()
    return Draws([1, node.seed & mask, *passes_too], node.buffer_size)


class IndexShuffleIterator(ElementIterator):
    """A shuffle within an index part: its state is the number of elements that were yielded.

    What the slots hold at any position follows from the draws, so `seek` finds the ordinals and
    reads the input from the oldest one on.
    """

    def __init__(self, node: Shuffle, context: Context) -> None:
        self._input = make_iterator(node.input, context)
        self._draws = _draws(node, context)
        size = cardinality(node.input)
        self._size = None if size == INFINITE else size
        self._filled = node.buffer_size if size == INFINITE else min(node.buffer_size, size)
        #: Elements yielded.
        self._position = 0
        #: None: not read yet, at this position.
        self._slots: Slots | None = None
        self._block = _BLOCK
        self._ready: Chunk | None = None  # drawn in a block, not yet yielded ...
        self._offset = 0  # ... from here on

    def next_chunk(self, limit: int) -> Chunk | None:
        ready = self._ready
        if ready is None:
            if self._size is not None and self._position >= self._size:
                return None
            if self._slots is None:
                self._read_slots()
            ready = self._draw()
            self._offset = 0
        start, first = self._offset, self._position
        stop = min(start + limit, ready.size)
        self._ready = ready if stop < ready.size else None
        self._offset = stop
        self._position = first + stop - start
        return ready.slice(start, stop).with_states(lambda index: first + index)

    @property
    def _drawn(self) -> int:
        """Draws made before the position."""
        if self._size is None:
            return self._position
        return min(self._position, self._size - self._filled)

    def _draw(self) -> Chunk:
        """Return what comes at the position, a block of it."""
        assert self._slots is not None
        drawn = self._drawn
        if drawn == self._position and (self._size is None or drawn < self._size - self._filled):
            incoming = self._input.next_chunk(self._block)
            if incoming is None:
                raise DataLossError("an index stream is shorter than its plan says")
            return self._slots.exchange(self._draws.take(incoming.size), incoming)
        order = self._draws.last_order(self._filled)
        return self._slots.at(order[self._position - drawn :])

    def _read_slots(self) -> None:
        """Find what the slots hold at the position, and read it."""
        drawn = self._drawn
        ordinals = slot_ordinals(self._draws, drawn, self._filled)
        self._draws.seek(drawn)
        by_age = np.argsort(ordinals, kind="stable")
        ages = ordinals[by_age]
        at, stop = int(ages[0]), drawn + self._filled
        self._input.seek(at)
        chunks: list[Chunk] = []
        while at < stop:
            chunk = self._input.next_chunk(min(stop - at, _FILL))
            if chunk is None:
                raise DataLossError("an index stream is shorter than its plan says")
            low, high = np.searchsorted(ages, (at, at + chunk.size))
            if high - low == chunk.size:
                chunks.append(chunk)
            elif high > low:
                chunks.append(chunk.take(ages[low:high] - at))
            at += chunk.size
        in_order = drawn == 0
        self._slots = Slots(chunks, None if in_order else np.argsort(by_age, kind="stable"))
        self._block = max(1, min(_BLOCK, _BLOCK_BYTES // (self._slots.bytes_each or 1)))

    def skip(self, count: int) -> int:
        if self._size is not None:
            count = min(count, self._size - self._position)
        self.seek(self._position + count)
        return count

    def seek(self, position: int) -> None:
        ahead = position - self._position
        if ahead == 0:
            return
        if self._slots is not None and 0 < ahead <= 2 * self._filled + _BLOCK:
            # Nearer than what would have to be read again.
            while self._position < position:
                if self.next_chunk(position - self._position) is None:
                    break
        if self._position != position:
            self._slots = self._ready = None
            self._position = position

    def get_state(self) -> State:
        return self._position

    def set_state(self, state: State) -> None:
        self.seek(state)

    def close(self) -> None:
        self._slots = self._ready = None
        self._input.close()


class ShuffleIterator(ElementIterator):
    """A shuffle of values.

    Its state is the number of draws, and from where the elements in the buffer can be read again.
    """

    def __init__(self, node: Shuffle, context: Context) -> None:
        self._size = node.buffer_size
        self._every = max(self._size // 8, 64)
        self._input = Reread(make_iterator(node.input, context), step_name(node), self._every)
        self._draws = _draws(node, context)
        self._begin()

    @property
    def reads_ahead_freely(self) -> bool:
        order = self._order
        if order is not None and self._emptied < len(order):
            return True  # all that comes is in the buffer
        return self._input.input.reads_ahead_freely

    def _begin(self) -> None:
        self.gives_rows = False  # until the buffer is full, and if it holds rows
        #: Draws made: at most as many as elements were read beyond the first `_size`.
        self._drawn = 0
        self._filling: list[Chunk] = []
        self._slots: Slots | None = None  # None: the buffer is not full yet
        self._ordinals = np.empty(0, np.int64)  # of what the slots hold
        self._upcoming = np.empty(0, np.int64)  # slots to be drawn next
        self._order: NDArray[np.int64] | None = None  # of the slots, once the input has ended
        self._emptied = 0  # slots, since then
        self._pruned_at = 0

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._slots is None:
            self._fill()
        assert self._slots is not None
        if self._order is None:
            incoming = self._input.pull(limit)
            if incoming is not None:
                return self._draw(self._slots, incoming)
            self._order = self._draws.last_order(self._slots.size)
            self.gives_rows = False
        slots = self._order[self._emptied : self._emptied + limit]
        if not len(slots):
            return None
        chunk = self._slots.at(slots).with_states(self._states(self._drawn, self._emptied))
        self._emptied += len(slots)
        return chunk

    def _fill(self) -> None:
        while self._input.read < self._size:
            chunk = self._input.pull(min(self._size - self._input.read, _DRAWN_AHEAD))
            if chunk is None:
                break
            self._filling.append(unpinned_rows(chunk))
        self._slots, self._filling = Slots(self._filling), []
        self._ordinals = np.arange(self._slots.size)
        self.gives_rows = self._slots.are_rows and not self._input.input.reads_ahead_freely

    def singles(self) -> Singles | None:
        slots = self._slots
        if slots is None or not slots.are_rows or self._order is not None:
            return super().singles()
        live = self._input.singles()
        if live is None:
            return super().singles()
        self._prune()
        return self._drawn_singly(slots.rows, live), self._states(self._drawn, 0)

    def _drawn_singly(self, held: list[Any], live: Live) -> Iterator[Any]:
        """Draw once for each new element."""
        upcoming, count = self._upcoming.tolist(), 0
        if len(upcoming) < _SINGLES[-1]:
            upcoming += self._draws.take(_DRAWN_AHEAD).tolist()
        # The elements last: where another of these ends first, none was taken and left out.
        draws = zip(_SINGLES, upcoming, live.rows, strict=False)
        try:
            for count, slot, row in draws:  # noqa: B007 - read after it
                out, held[slot] = held[slot], row if type(row) in OWN_MEMORY else unpinned(row)
                yield out
        except Exception:
            self._leave_singles(live, upcoming, count)
            self._input.drop_singles(failed=True)
            raise
        self._leave_singles(live, upcoming, count)
        if count < _SINGLES[-1]:
            self._input.drop_singles(failed=False)

    def _leave_singles(self, live: Live, upcoming: list[int], count: int) -> None:
        """Note that so many elements were drawn for single elements."""
        self._input.took(live, count)
        drawn, self._upcoming = np.split(np.array(upcoming, np.int64), [count])
        first = self._drawn + self._size
        self._ordinals[drawn] = np.arange(first, first + count)  # the last of equals stays
        self._drawn += count

    def _prune(self) -> None:
        if self._drawn - self._pruned_at >= self._every:
            self._input.forget_before(int(self._ordinals.min()))
            self._pruned_at = self._drawn

    def _draw(self, slots: Slots, incoming: Chunk) -> Chunk:
        """Draw once for each new element."""
        self._prune()
        states, count = self._states(self._drawn, 0), incoming.size
        if len(self._upcoming) < count:
            more = self._draws.take(max(count, _DRAWN_AHEAD))
            self._upcoming = np.concatenate([self._upcoming, more])
        drawn, self._upcoming = self._upcoming[:count], self._upcoming[count:]
        first = self._drawn + self._size
        self._drawn += count
        self._ordinals[drawn] = np.arange(first, first + count)
        return slots.exchange(drawn, incoming).with_states(states)

    # --- state ----------------------------------------------------------------------------------

    def _states(self, drawn: int, emptied: int) -> States:
        """Return the states before elements that come after so many draws."""
        mark, failures = self._input.oldest_mark, self._input.failures
        size = self._size
        is_over, read = self._order is not None, self._input.read

        def states(index: int) -> State:
            if is_over:
                return _state(drawn, emptied + index, mark.saved(read, failures))
            return _state(drawn + index, 0, mark.saved(size + drawn + index, failures))

        return states

    def get_state(self) -> State:
        held = self._input.oldest_mark.saved(self._input.read, self._input.failures)
        return _state(self._drawn, self._emptied, held)

    def set_state(self, state: State) -> None:
        self._begin()
        drawn, emptied = state["drawn"], state["left"]
        self._drawn, self._pruned_at, self._emptied = drawn, drawn, emptied
        read = state["from"] + state["read"]
        ordinals = slot_ordinals(self._draws, drawn, min(read, self._size))
        self._draws.seek(drawn)
        needed = ordinals
        if emptied:
            # What has come is not read again: the rest is held in the order in which it comes.
            needed = ordinals[self._draws.last_order(len(ordinals))[emptied:]]
            self._order = np.arange(-emptied, len(needed))
        by_age = np.argsort(needed, kind="stable")
        chunks = self._input.restore(state, needed[by_age])
        if read < self._size and not emptied:
            self._filling = chunks  # the buffer was not full
            return
        in_order = not drawn and not emptied
        self._slots = Slots(chunks, None if in_order else np.argsort(by_age, kind="stable"))
        self._ordinals = needed.copy()

    def close(self) -> None:
        self._slots = None
        self._filling = []
        self._input.close()


def _state(drawn: int, emptied: int, held: dict[str, Any]) -> dict[str, Any]:
    # "left" is the number of slots that were emptied: the name was saved, and is kept.
    return {"drawn": drawn, "left": emptied, **held}
