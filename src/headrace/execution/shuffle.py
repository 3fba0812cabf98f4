"""The shuffles: of an index part, which is arithmetic, and of values, which reads again.

Both fill a buffer with the first elements; then each draw yields what a slot holds and puts in the
next element; when the input has ended, what is left comes in random order. They draw alike, so a
plan has the same order whichever of them runs it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk, States
from headrace.errors import DataLossError
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.shuffle_order import Draws, slot_ordinals
from headrace.execution.slots import Slots
from headrace.plan.index_part import index_part
from headrace.plan.ordering import Shuffle
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality
from headrace.plan.user_function import step_name

__all__ = ["IndexShuffleIterator", "ShuffleIterator"]

_BLOCK = 4096
"""Positions drawn at once: the fixed cost of a block of NumPy calls is spread over them."""
_FILL = 1 << 16
_BLOCK_BYTES = 1 << 20
_DRAWN_AHEAD = 1024


@make_iterator.register(Shuffle)
def _make_shuffle(node: Shuffle, context: Context) -> ElementIterator:
    if index_part(node):
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


class _Mark(NamedTuple):
    """A place from which the input can be read again."""

    ordinal: int
    """Elements of the input before it."""
    failures: int
    """Elements before it that failed."""
    state: State


class ShuffleIterator(ElementIterator):
    """A shuffle of values.

    Its state is the number of draws, and a place in the input at or before the oldest element in
    the buffer. From there what the slots hold is read again, and all else is passed over.
    """

    def __init__(self, node: Shuffle, context: Context) -> None:
        self._node = node
        self._input = make_iterator(node.input, context)
        self._draws = _draws(node, context)
        self._size = node.buffer_size
        self._every = max(self._size // 8, 64)  # elements from one mark to the next
        self._begin()

    @property
    def reads_ahead_freely(self) -> bool:
        return self._input.reads_ahead_freely

    def _begin(self) -> None:
        #: Elements of the input that were read, and that failed.
        self._read = self._failures = 0
        #: Draws made: at most `_read` - `_size`.
        self._drawn = 0
        self._filling: list[Chunk] = []
        self._slots: Slots | None = None  # None: the buffer is not full yet
        self._ordinals = np.empty(0, np.int64)  # of what the slots hold
        self._upcoming = np.empty(0, np.int64)  # slots to be drawn next
        self._order: NDArray[np.int64] | None = None  # of the slots, once the input has ended
        self._left = 0  # slots emptied since
        #: Oldest first. The first is at or before the oldest element in the buffer.
        self._marks: deque[_Mark] = deque()
        self._pruned_at = 0
        self._early: Chunk | None = None  # read while failures were expected

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._slots is None:
            self._fill()
        assert self._slots is not None
        if self._order is None:
            incoming = self._pull(limit)
            if incoming is not None:
                return self._draw(self._slots, incoming)
            self._order = self._draws.last_order(self._slots.size)
        slots = self._order[self._left : self._left + limit]
        if not len(slots):
            return None
        chunk = self._slots.at(slots).with_states(self._states(self._drawn, self._left))
        self._left += len(slots)
        return chunk

    def _pull(self, limit: int) -> Chunk | None:
        self._mark()
        chunk, self._early = self._early, None
        if chunk is None:
            try:
                chunk = self._input.next_chunk(limit)
            except Exception:
                self._failures += 1
                raise
        if chunk is not None:
            self._read += chunk.size
        return chunk

    def _mark(self) -> None:
        if not self._marks or self._read - self._marks[-1].ordinal >= self._every:
            self._marks.append(_Mark(self._read, self._failures, self._input.get_state()))

    def _fill(self) -> None:
        while self._read < self._size:
            chunk = self._pull(min(self._size - self._read, _DRAWN_AHEAD))
            if chunk is None:
                break
            self._filling.append(chunk)
        self._slots, self._filling = Slots(self._filling), []
        self._ordinals = np.arange(self._slots.size)

    def _draw(self, slots: Slots, incoming: Chunk) -> Chunk:
        """Draw once for each new element."""
        if self._drawn - self._pruned_at >= self._every:
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

    def _prune(self) -> None:
        """Forget the marks that lie before all that the buffer holds."""
        oldest = int(self._ordinals.min())
        while len(self._marks) > 1 and self._marks[1].ordinal <= oldest:
            self._marks.popleft()
        self._pruned_at = self._drawn

    # --- state ----------------------------------------------------------------------------------

    def _states(self, drawn: int, left: int) -> States:
        """Return the places of elements that come after so many."""
        mark, failures = self._marks[0], self._failures
        size = self._size
        is_over, read = self._order is not None, self._read

        def states(index: int) -> State:
            if is_over:
                return _state(mark, drawn, left + index, read, failures)
            return _state(mark, drawn + index, 0, size + drawn + index, failures)

        return states

    def get_state(self) -> State:
        mark = self._marks[0] if self._marks else _Mark(0, 0, self._input.get_state())
        return _state(mark, self._drawn, self._left, self._read, self._failures)

    def set_state(self, state: State) -> None:
        self._input.set_state(state["input"])
        self._begin()
        first, read, drawn, left = state["from"], state["read"], state["drawn"], state["left"]
        self._marks.append(_Mark(first, 0, state["input"]))
        self._read, self._drawn, self._pruned_at, self._left = first, drawn, drawn, left
        stop = first + read
        ordinals = slot_ordinals(self._draws, drawn, min(stop, self._size))
        self._draws.seek(drawn)
        needed = ordinals
        if left:
            # What has come is not read again: the rest is held in the order in which it comes.
            needed = ordinals[self._draws.last_order(len(ordinals))[left:]]
            self._order = np.arange(-left, len(needed))
        by_age = np.argsort(needed, kind="stable")
        if state["failed"]:
            chunks = self._read_all(needed[by_age], stop, state["failed"])
        else:
            chunks = self._read_needed(needed[by_age])
        self._read, self._failures = stop, state["failed"]
        if stop < self._size and not left:
            self._filling = chunks  # the buffer was not full
            return
        self._slots = Slots(chunks, np.argsort(by_age, kind="stable") if drawn or left else None)
        self._ordinals = needed.copy()

    def _read_needed(self, needed: NDArray[np.int64]) -> list[Chunk]:
        """Return the elements of these ordinals, in order; pass over all others."""
        chunks: list[Chunk] = []
        # Where reading costs no call, what lies between two that are near is read as well.
        gap = 64 if self._input.reads_ahead_freely else 1
        for run in np.split(needed, np.flatnonzero(np.diff(needed) > gap) + 1):
            if not len(run):
                break
            between = int(run[0]) - self._read
            if between and self._input.skip(between) < between:
                raise self._too_short()
            self._read += between
            done = 0
            while done < len(run):
                self._mark()
                chunk = self._input.next_chunk(int(run[-1]) + 1 - self._read)
                if chunk is None:
                    raise self._too_short()
                end = int(np.searchsorted(run, self._read + chunk.size))
                if end > done:
                    chunks.append(chunk.take(run[done:end] - self._read))
                done = end
                self._read += chunk.size
        return chunks

    def _read_all(self, needed: NDArray[np.int64], stop: int, failures: int) -> list[Chunk]:
        """Return the elements of these ordinals, in order, of a stream with failures in it.

        An element that failed fails again, and counts as none as it did; which ones these are
        shows only when all are read.
        """
        chunks: list[Chunk] = []
        done = 0
        while self._read < stop or self._failures < failures:
            self._mark()
            try:
                chunk = self._input.next_chunk(max(1, min(stop - self._read, _DRAWN_AHEAD)))
            except Exception:
                self._failures += 1
                if self._failures > failures:
                    raise
                continue
            if chunk is None:
                raise self._too_short()
            if self._read >= stop:  # it did not fail this time: the next element
                self._early = chunk
                break
            end = int(np.searchsorted(needed, self._read + chunk.size))
            if end > done:
                chunks.append(chunk.take(needed[done:end] - self._read))
            done = end
            self._read += chunk.size
        return chunks

    def _too_short(self) -> DataLossError:
        return DataLossError(
            f"the input of {step_name(self._node)} is shorter than when the state was saved; "
            "restore it with the same data"
        )

    def close(self) -> None:
        self._slots = None
        self._filling = []
        self._input.close()


def _state(mark: _Mark, drawn: int, left: int, read: int, failures: int) -> dict[str, Any]:
    return {
        "drawn": drawn,
        "left": left,
        "from": mark.ordinal,
        "read": read - mark.ordinal,
        "failed": failures - mark.failures,
        "input": mark.state,
    }
