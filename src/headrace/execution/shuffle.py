"""Shuffles: of an index plan, by arithmetic, and of values, by reading again after a restore.

Both fill a buffer with the first elements; then each draw yields the content of a slot and stores
the next element there; when the input has ended, the remaining elements are yielded in random
order. Both make the same draws, so a plan has the same order with either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk, States
from headrace.errors import DataLossError
from headrace.execution.context import Context
from headrace.execution.input_buffer import LazyRowStream
from headrace.execution.iterator import ElementIterator, LazyRows, State, make_iterator
from headrace.execution.replayable_input import ReplayableInput
from headrace.execution.shuffle_buffer import (
    OWN_MEMORY,
    SlotContents,
    SlotDraws,
    slot_ordinals,
    unpinned,
    unpinned_rows,
)
from headrace.plan.ordering import Shuffle
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality, is_index_plan
from headrace.plan.user_function import step_name

__all__ = ["IndexShuffleIterator", "ShuffleIterator"]

_BLOCK = 4096
"""Number of positions drawn at once, to amortize the fixed cost of NumPy calls."""
_FILL_AT_ONCE = 1 << 16
_BLOCK_BYTES = 1 << 20
_DRAWN_AHEAD = 1024
_LAZY_ROWS_AT_ONCE = range(1, _DRAWN_AHEAD + 1)
"""Numbers of draws for lazy rows between marks (`ReplayableInput`)."""


@make_iterator.register(Shuffle)
def _make_shuffle(node: Shuffle, context: Context) -> ElementIterator:
    if is_index_plan(node):
        return IndexShuffleIterator(node, context)
    return ShuffleIterator(node, context)


def _make_slot_draws(node: Shuffle, context: Context) -> SlotDraws:
    mask = (1 << 64) - 1
    if node.seed is None:
        if node.reshuffle_each_iteration:
            return SlotDraws(context.entropy(node.number), node.buffer_size)
        return SlotDraws(context.fixed_entropy(node.number, node.default_seed), node.buffer_size)
    epochs = context.epochs if node.reshuffle_each_iteration else ()
    return SlotDraws([1, node.seed & mask, *epochs], node.buffer_size)


class IndexShuffleIterator(ElementIterator):
    """Shuffle within an index plan; its state is the number of elements yielded.

    The contents of the slots at any position follow from the draws, so `seek` computes the ordinals
    and reads the input from the oldest one on.
    """

    def __init__(self, node: Shuffle, context: Context) -> None:
        self._input = make_iterator(node.input, context)
        self._slot_draws = _make_slot_draws(node, context)
        size = cardinality(node.input)
        self._size = None if size == INFINITE else size
        self._num_slots = node.buffer_size if size == INFINITE else min(node.buffer_size, size)
        #: Elements yielded.
        self._position = 0
        #: None if the slots were not read yet for the position.
        self._slots: SlotContents | None = None
        self._block_size = _BLOCK
        self._drawn_block: Chunk | None = None  # block that is being yielded
        self._offset = 0  # index of the next element in it

    def next_chunk(self, limit: int) -> Chunk | None:
        block = self._drawn_block
        if block is None:
            if self._size is not None and self._position >= self._size:
                return None
            if self._slots is None:
                self._read_slots()
            block = self._draw_block()
            self._offset = 0
        start, first = self._offset, self._position
        stop = min(start + limit, block.size)
        self._drawn_block = block if stop < block.size else None
        self._offset = stop
        self._position = first + stop - start
        return block.slice(start, stop).with_states(lambda index: first + index)

    @property
    def _num_drawn(self) -> int:
        """Number of draws made before the position."""
        if self._size is None:
            return self._position
        return min(self._position, self._size - self._num_slots)

    def _draw_block(self) -> Chunk:
        """Return a block of elements from the position on."""
        assert self._slots is not None
        num_drawn = self._num_drawn
        if num_drawn == self._position and (
            self._size is None or num_drawn < self._size - self._num_slots
        ):
            incoming = self._input.next_chunk(self._block_size)
            if incoming is None:
                raise DataLossError("an index stream is shorter than its plan says")
            return self._slots.exchange(self._slot_draws.take(incoming.size), incoming)
        order = self._slot_draws.last_order(self._num_slots)
        return self._slots.get(order[self._position - num_drawn :])

    def _read_slots(self) -> None:
        """Compute the contents of the slots at the position, and read them."""
        num_drawn = self._num_drawn
        ordinals = slot_ordinals(self._slot_draws, num_drawn, self._num_slots)
        self._slot_draws.seek(num_drawn)
        by_age = np.argsort(ordinals, kind="stable")
        ages = ordinals[by_age]
        next_ordinal, stop = int(ages[0]), num_drawn + self._num_slots
        self._input.seek(next_ordinal)
        chunks: list[Chunk] = []
        while next_ordinal < stop:
            chunk = self._input.next_chunk(min(stop - next_ordinal, _FILL_AT_ONCE))
            if chunk is None:
                raise DataLossError("an index stream is shorter than its plan says")
            low, high = np.searchsorted(ages, (next_ordinal, next_ordinal + chunk.size))
            if high - low == chunk.size:
                chunks.append(chunk)
            elif high > low:
                chunks.append(chunk.take(ages[low:high] - next_ordinal))
            next_ordinal += chunk.size
        in_order = num_drawn == 0
        self._slots = SlotContents(chunks, None if in_order else np.argsort(by_age, kind="stable"))
        self._block_size = max(1, min(_BLOCK, _BLOCK_BYTES // (self._slots.bytes_each or 1)))

    def skip(self, count: int) -> int:
        if self._size is not None:
            count = min(count, self._size - self._position)
        self.seek(self._position + count)
        return count

    def seek(self, position: int) -> None:
        distance = position - self._position
        if distance == 0:
            return
        if self._slots is not None and 0 < distance <= 2 * self._num_slots + _BLOCK:
            # Closer than the elements that would have to be read again.
            while self._position < position:
                if self.next_chunk(position - self._position) is None:
                    break
        if self._position != position:
            self._slots = self._drawn_block = None
            self._position = position

    def get_state(self) -> State:
        return self._position

    def set_state(self, state: State) -> None:
        self.seek(state)

    def close(self) -> None:
        self._slots = self._drawn_block = None
        self._input.close()


class ShuffleIterator(ElementIterator):
    """Shuffle of values.

    Its state is the number of draws, and a mark for reading the elements in the buffer again.
    """

    def __init__(self, node: Shuffle, context: Context) -> None:
        self._buffer_size = node.buffer_size
        self._mark_interval = max(self._buffer_size // 8, 64)
        self._input = ReplayableInput(
            make_iterator(node.input, context), step_name(node), self._mark_interval
        )
        self._slot_draws = _make_slot_draws(node, context)
        self._reset()

    @property
    def can_read_ahead(self) -> bool:
        order = self._order
        if order is not None and self._num_emptied < len(order):
            return True  # all remaining elements are in the buffer
        return self._input.input.can_read_ahead

    def _reset(self) -> None:
        self.has_lazy_rows = False  # until the buffer is full, and only if it holds rows
        #: Number of draws made, at most that of elements read after the buffer was full.
        self._num_drawn = 0
        self._fill_chunks: list[Chunk] = []
        self._slots: SlotContents | None = None  # None until the buffer is full
        self._ordinals = np.empty(0, np.int64)  # of the slots' contents
        self._upcoming = np.empty(0, np.int64)  # slots of the next draws
        self._order: NDArray[np.int64] | None = None  # of the slots, once the input has ended
        self._num_emptied = 0  # number of slots emptied since then
        self._last_prune = 0

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._slots is None:
            self._fill()
        assert self._slots is not None
        if self._order is None:
            incoming = self._input.read_chunk(limit)
            if incoming is not None:
                return self._draw(self._slots, incoming)
            self._order = self._slot_draws.last_order(self._slots.size)
            self.has_lazy_rows = False
        slots = self._order[self._num_emptied : self._num_emptied + limit]
        if not len(slots):
            return None
        chunk = self._slots.get(slots).with_states(self._states(self._num_drawn, self._num_emptied))
        self._num_emptied += len(slots)
        return chunk

    def _fill(self) -> None:
        while self._input.num_read < self._buffer_size:
            chunk = self._input.read_chunk(
                min(self._buffer_size - self._input.num_read, _DRAWN_AHEAD)
            )
            if chunk is None:
                break
            self._fill_chunks.append(unpinned_rows(chunk))
        self._slots, self._fill_chunks = SlotContents(self._fill_chunks), []
        self._ordinals = np.arange(self._slots.size)
        self.has_lazy_rows = self._slots.are_rows and not self._input.input.can_read_ahead

    def lazy_rows(self) -> LazyRows | None:
        slots = self._slots
        if slots is None or not slots.are_rows or self._order is not None:
            return super().lazy_rows()
        stream = self._input.lazy_rows()
        if stream is None:
            return super().lazy_rows()
        self._prune()
        return self._draw_rows(slots.rows, stream), self._states(self._num_drawn, 0)

    def _draw_rows(self, slot_rows: list[Any], lazy_rows: LazyRowStream) -> Iterator[Any]:
        """Draw once for each new row."""
        upcoming, count = self._upcoming.tolist(), 0
        if len(upcoming) < _LAZY_ROWS_AT_ONCE[-1]:
            upcoming += self._slot_draws.take(_DRAWN_AHEAD).tolist()
        # The rows are last: if another iterator ends first, no row is lost.
        draws = zip(_LAZY_ROWS_AT_ONCE, upcoming, lazy_rows.rows, strict=False)
        try:
            for count, slot, row in draws:  # noqa: B007 - read after it
                drawn_row = slot_rows[slot]
                slot_rows[slot] = row if type(row) in OWN_MEMORY else unpinned(row)
                yield drawn_row
        except Exception:
            self._record_consumed(lazy_rows, upcoming, count)
            self._input.end_lazy_rows(failed=True)
            raise
        self._record_consumed(lazy_rows, upcoming, count)
        if count < _LAZY_ROWS_AT_ONCE[-1]:
            self._input.end_lazy_rows(failed=False)

    def _record_consumed(self, lazy_rows: LazyRowStream, upcoming: list[int], count: int) -> None:
        """Record that `count` draws were made for lazy rows."""
        self._input.record_taken(lazy_rows, count)
        drawn_slots, self._upcoming = np.split(np.array(upcoming, np.int64), [count])
        first = self._num_drawn + self._buffer_size
        # A slot drawn several times gets the last of its ordinals.
        self._ordinals[drawn_slots] = np.arange(first, first + count)
        self._num_drawn += count

    def _prune(self) -> None:
        if self._num_drawn - self._last_prune >= self._mark_interval:
            self._input.discard_marks_before(int(self._ordinals.min()))
            self._last_prune = self._num_drawn

    def _draw(self, slots: SlotContents, incoming: Chunk) -> Chunk:
        """Draw once for each new element."""
        self._prune()
        states, count = self._states(self._num_drawn, 0), incoming.size
        if len(self._upcoming) < count:
            more = self._slot_draws.take(max(count, _DRAWN_AHEAD))
            self._upcoming = np.concatenate([self._upcoming, more])
        drawn_slots, self._upcoming = self._upcoming[:count], self._upcoming[count:]
        first = self._num_drawn + self._buffer_size
        self._num_drawn += count
        self._ordinals[drawn_slots] = np.arange(first, first + count)
        return slots.exchange(drawn_slots, incoming).with_states(states)

    # --- state ----------------------------------------------------------------------------------

    def _states(self, num_drawn: int, num_emptied: int) -> States:
        """Return the states of elements after `num_drawn` draws and `num_emptied` emptied slots."""
        mark, num_failed = self._input.oldest_mark, self._input.num_failed
        buffer_size = self._buffer_size
        has_input_ended, num_read = self._order is not None, self._input.num_read

        def states(index: int) -> State:
            if has_input_ended:
                return _state(num_drawn, num_emptied + index, mark.to_json(num_read, num_failed))
            return _state(
                num_drawn + index, 0, mark.to_json(buffer_size + num_drawn + index, num_failed)
            )

        return states

    def get_state(self) -> State:
        mark = self._input.oldest_mark.to_json(self._input.num_read, self._input.num_failed)
        return _state(self._num_drawn, self._num_emptied, mark)

    def set_state(self, state: State) -> None:
        self._reset()
        num_drawn, num_emptied = state["drawn"], state["emptied"]
        self._num_drawn, self._last_prune, self._num_emptied = num_drawn, num_drawn, num_emptied
        num_read = state["first_ordinal"] + state["num_read"]
        ordinals = slot_ordinals(self._slot_draws, num_drawn, min(num_read, self._buffer_size))
        self._slot_draws.seek(num_drawn)
        needed = ordinals
        if num_emptied:
            # Elements already yielded are not read again; the rest is held in the order of its
            # output.
            needed = ordinals[self._slot_draws.last_order(len(ordinals))[num_emptied:]]
            self._order = np.arange(-num_emptied, len(needed))
        by_age = np.argsort(needed, kind="stable")
        chunks = self._input.restore(state, needed[by_age])
        if num_read < self._buffer_size and not num_emptied:
            self._fill_chunks = chunks  # the buffer was not full
            return
        in_order = not num_drawn and not num_emptied
        self._slots = SlotContents(chunks, None if in_order else np.argsort(by_age, kind="stable"))
        self._ordinals = needed.copy()

    def close(self) -> None:
        self._slots = None
        self._fill_chunks = []
        self._input.close()


def _state(num_drawn: int, num_emptied: int, mark: dict[str, Any]) -> dict[str, Any]:
    return {"drawn": num_drawn, "emptied": num_emptied, **mark}
