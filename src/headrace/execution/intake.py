"""The input of a stage: read in exact amounts, and how many elements are asked for at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.element.wire import frame_bytes
from headrace.execution.iterator import ElementIterator, State
from headrace.kept_memory import keep_freed_memory

__all__ = [
    "Intake",
    "Live",
    "Pace",
]

# --- Pace: how many elements to ask for at once, learnt from how long they take -------------------
#
# Asking for many spreads the cost of asking; asking for few brings the first soon and holds little
# in memory. So a stage that reads ahead asks for one, and for twice as many each time that the
# answer came within `_SOON` seconds.
#
# An input that does not read ahead freely gives all that it was asked for, however long its user's
# function takes: ask such a one for few (`most`).

_SOON = 0.0005
_LATE = 0.005
_LONG = 0.1

# Chunks come and go, and so do batches: twice this is kept for them.
keep_freed_memory(16 << 20)


class Pace:
    """Reads chunks from an iterator, as many elements at once as come in about a millisecond.

    Args:
        most: The most elements to ask for.
        most_bytes: The most memory that a chunk should take; larger ones spoil the processor's
            cache and gain nothing.
        least: The number to begin with.
    """

    __slots__ = ("_gave_at", "_least", "_most", "_most_bytes", "limit")

    def __init__(self, most: int = 1024, most_bytes: int = 1 << 19, least: int = 1) -> None:
        self._least = least
        self._most = max(most, least)
        self._most_bytes = most_bytes
        self._gave_at = -math.inf
        self.limit = least

    def next_chunk(self, iterator: ElementIterator, least: int = 1) -> Chunk | None:
        """Return the iterator's next chunk, with all that have arrived if they are not many.

        Who takes long over a chunk is given few: before each, a reader looks whether its lease of
        what arrived has lasted.
        """
        if time.perf_counter() - self._gave_at < _LONG:
            least = max(least, min(iterator.arrived, self._most))
        return self.ask(iterator, least)

    def ask(self, iterator: ElementIterator, least: int) -> Chunk | None:
        """Return the iterator's next chunk, asking for at least `least` elements."""
        limit = self.limit
        if limit < least:
            limit = least
        start = time.perf_counter()
        chunk = iterator.next_chunk(limit)
        self._gave_at = time.perf_counter()
        seconds = self._gave_at - start
        if chunk is None:
            return None
        if seconds > _LATE:
            self.limit = max(self._least, min(limit, self._most) // 2)
        elif seconds < _SOON and self.limit < self._most:
            # By time alone: a filter gives fewer than it was asked for, however many that are.
            affordable = self._most_bytes * chunk.size // (frame_bytes(chunk) + 1)
            self.limit = max(self._least, min(self.limit * 2, self._most, affordable))
        return chunk


# --- An intake: the input of a stage, read in exact amounts, with the place of each element -------
#
# A stage that takes an exact number of elements, or is interrupted by an error, leaves some that
# its input has given. The intake holds those. It needs nothing else to know its place: the chunk in
# hand knows the state of the stream before each of its elements.


class Live:
    """Single elements of an input: each is made when it is taken from `rows`.

    Whoever takes them says how many those were (`taken`) before anybody else looks.
    """

    __slots__ = ("_states", "_whole", "rows", "taken")

    def __init__(self, rows: Iterator[Any], states: States, taken: int = 0) -> None:
        self.rows = self._whole = rows
        self._states = states
        self.taken = taken

    def put_back(self, row: Any) -> None:
        """Have an element come again that was taken last."""
        self.rows = chain((row,), self._whole)

    @property
    def states(self) -> States:
        """The states before the elements that come next."""
        states, taken = self._states, self.taken
        return (lambda index: states(taken + index)) if taken else states


class Intake:
    """Reads an input iterator in exact amounts.

    There are three ways to read: `take` returns elements. `look` leaves them in hand, for a stage
    that does not know beforehand how many it will use; it calls `use` when it does. `singles`
    are elements that are not made yet; whoever takes the last of them, or meets an error in them,
    calls `drop_singles`.
    """

    __slots__ = ("_live", "_pace", "chunk", "input", "offset")

    _pace: Pace | None
    _live: Live | None

    chunk: Chunk | None
    """What is in hand: its elements before `offset` were used, and at least one was not."""
    offset: int

    def __init__(self, input_: ElementIterator) -> None:
        self.input = input_
        self.chunk = None
        self.offset = 0
        self._pace = None
        self._live = None

    @property
    def in_hand(self) -> int:
        """Elements that can be taken without asking the input."""
        return 0 if self.chunk is None else self.chunk.size - self.offset

    @property
    def states(self) -> States | None:
        """Those before what is in hand, or of single elements; None: the input stands there."""
        chunk, offset = self.chunk, self.offset
        if chunk is not None:
            states = chunk.states
            return (lambda index: states(offset + index)) if offset else states
        return None if self._live is None else self._live.states

    def take(self, count: int) -> Chunk | None:
        """Return 1 to `count` elements, or None at the end; asks for no more than `count`."""
        chunk, offset = self.chunk, self.offset
        if chunk is None:
            chunk = self._next_chunk(count)
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
            self.chunk = self._next_chunk(count)
            self.offset = 0
        return self.chunk

    def look_ahead(self, count: int) -> Chunk | None:
        """Return the same, but ask for more than `count` elements where that is free."""
        if self.chunk is not None:
            return self.chunk
        if self._live is not None or not self.input.reads_ahead_freely:
            return self.look(max(count, self.input.at_hand))
        if self._pace is None:
            self._pace = Pace()
        self.chunk = self._pace.next_chunk(self.input, count)
        self.offset = 0
        return self.chunk

    def _next_chunk(self, count: int) -> Chunk | None:
        live = self._live
        if live is not None:
            states = live.states
            try:
                for row in live.rows:
                    live.taken += 1
                    return Chunk.of_rows([row], states)
            except Exception:
                self._live = None
                raise
            self._live = None
        return self.input.next_chunk(count)

    def singles(self) -> Live | None:
        """Return the next elements, to be taken one by one; None at the end."""
        live, chunk = self._live, self.chunk
        if live is None and chunk is None and self.input.gives_rows:
            got = self.input.singles()
            if got is None:
                return None
            live = Live(*got)
        elif live is None or chunk is not None:
            chunk = self.look_ahead(1)
            if chunk is None:
                return None
            rows = iter(chunk.rows()[self.offset :])
            # One that was among single elements comes before the rest of those.
            live = Live(rows if live is None else chain(rows, live.rows), chunk.states, self.offset)
            self.chunk = None
        self._live = live
        return live

    def drop_singles(self) -> None:
        """Take note that `singles` have ended: with their last element or an error."""
        self._live = None

    def use(self, count: int) -> None:
        """Pass on over `count` of the elements in hand."""
        assert self.chunk is not None
        end = self.offset + count
        if end == self.chunk.size:
            self.chunk = None
        else:
            self.offset = end

    def skip(self, count: int) -> int:
        """Pass over up to `count` elements, calling as little as possible; return how many."""
        if self._live is not None:
            self.set_state(self.get_state())  # to make them may cost calls
        held = min(count, self.in_hand)
        if held:
            self.use(held)
        return held + self.input.skip(count - held) if held < count else held

    def get_state(self) -> State:
        """Return the place of the next element."""
        if self.chunk is not None:
            return self.chunk.state_at(self.offset)
        if self._live is not None:
            return self._live.states(0)
        return self.input.get_state()

    def set_state(self, state: State) -> None:
        """Go to a place that `get_state` returned."""
        self.chunk = self._live = None
        self.input.set_state(state)

    def seek(self, position: int) -> None:
        """Make the input's element number `position` the next one (`ElementIterator.seek`)."""
        self.chunk = self._live = None
        self.input.seek(position)

    def close(self) -> None:
        """Close the input."""
        self.chunk = self._live = None
        self.input.close()
