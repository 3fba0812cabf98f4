"""An intake: the input of a stage, read in exact amounts, with the place of each element.

A stage that takes an exact number of elements, or is interrupted by an error, leaves some that its
input has given. The intake holds those. It needs nothing else to know its place: the chunk in hand
knows the state of the stream before each of its elements.
"""

from __future__ import annotations

from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.execution.iterator import END, ElementIterator, State
from headrace.execution.pace import Pace
from headrace.execution.places import Places

__all__ = ["Intake"]


class Intake:
    """Reads an input iterator in exact amounts.

    There are two ways to read: `take` returns elements. `look` leaves them in hand, for a stage
    that does not know beforehand how many it will use; it calls `use` when it does.
    """

    __slots__ = ("_last_place", "_pace", "chunk", "input", "offset")

    _pace: Pace | None
    _last_place: Places | None
    """Of the last element of a chunk that was used up, if its chunk knew it."""

    chunk: Chunk | None
    """What is in hand: its elements before `offset` were used, and at least one was not."""
    offset: int

    def __init__(self, input_: ElementIterator) -> None:
        self.input = input_
        self.chunk = None
        self.offset = 0
        self._pace = None
        self._last_place = None

    @property
    def in_hand(self) -> int:
        """Elements that can be taken without asking the input."""
        return 0 if self.chunk is None else self.chunk.size - self.offset

    def take(self, count: int) -> Chunk | None:
        """Return 1 to `count` elements, or None at the end; asks for no more than `count`."""
        chunk, offset = self.chunk, self.offset
        if chunk is None:
            chunk = self.input.next_chunk(count)
            if chunk is None or chunk.size <= count:
                return chunk
            offset = 0
        end = offset + count
        if end >= chunk.size:
            self.chunk = None
            return chunk.slice(offset, chunk.size)
        self.chunk, self.offset = chunk, end
        return chunk.slice(offset, end)

    def look(self, count: int) -> Chunk | None:
        """Return the chunk in hand; if there is none, that of the next 1 to `count` elements."""
        if self.chunk is None:
            self.chunk = self.input.next_chunk(count)
            self.offset = 0
        return self.chunk

    def look_ahead(self, count: int) -> Chunk | None:
        """Return the same, but ask for more than `count` elements where that is free."""
        if self.chunk is not None:
            return self.chunk
        if not self.input.reads_ahead_freely:
            return self.look(max(count, self.input.at_hand))
        if self._pace is None:
            self._pace = Pace()
        self.chunk = self._pace.ask(self.input, count)
        self.offset = 0
        return self.chunk

    def next_row(self) -> Any:
        """Return the next element, or END."""
        chunk = self.chunk
        if chunk is None:
            if self.input.gives_rows:
                return self.input.next_row()
            chunk = self.look_ahead(1)
            if chunk is None:
                return END
        row = chunk.rows()[self.offset]
        self.use(1)
        return row

    def later_state(self) -> tuple[States, int]:
        """Return what `get_state` is computed from: `states(index)`, now or later."""
        return self.input.later_state() if self.chunk is None else (self.chunk.states, self.offset)

    def put_back(self, row: Any, place: tuple[States, int]) -> None:
        """Have in hand again what `next_row` returned, and what comes after it.

        Args:
            row: The element.
            place: The place before it.
        """
        if self.chunk is not None:
            self.offset -= 1  # it was taken from this chunk
            return
        (before, number), (after, index) = place, self.input.later_state()
        self.chunk = Chunk.of_rows(
            [row], lambda at: after(index) if at else before(number), self._last_place
        )
        self.offset = 0

    def use(self, count: int) -> None:
        """Pass on over `count` of the elements in hand."""
        assert self.chunk is not None
        end = self.offset + count
        if end == self.chunk.size:
            places = self.chunk.places
            self._last_place = None if places is None else places[-1:].copy()
            self.chunk = None
        else:
            self.offset = end

    def skip(self, count: int) -> int:
        """Pass over up to `count` elements, calling as little as possible; return how many."""
        held = min(count, self.in_hand)
        if held:
            self.use(held)
        return held + self.input.skip(count - held) if held < count else held

    def get_state(self) -> State:
        """Return the place of the next element."""
        if self.chunk is None:
            return self.input.get_state()
        return self.chunk.state_at(self.offset)

    def set_state(self, state: State) -> None:
        """Go to a place that `get_state` returned."""
        self.chunk = None
        self.input.set_state(state)

    def seek(self, position: int) -> None:
        """Make the input's element number `position` the next one (`ElementIterator.seek`)."""
        self.chunk = None
        self.input.seek(position)

    def close(self) -> None:
        """Close the input."""
        self.chunk = None
        self.input.close()
