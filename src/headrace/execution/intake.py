"""An intake: the input of a stage, read in exact amounts, with a place that can be saved.

Stages that take an exact number of elements, or read ahead, keep some that they have not used.
The intake holds those, and remembers where the input stood before it gave them: its place is
"the input in this state, then skip so many", which is small and needs nothing from memory.
"""

from __future__ import annotations

from headrace.element.chunk import Chunk
from headrace.execution.iterator import ElementIterator, State

__all__ = ["Intake", "skip"]

_MOST_FAILURES = 1000
"""Failures in a row of skips after which an input is taken to fail for ever."""


class Intake:
    """Reads an input iterator in exact amounts."""

    __slots__ = ("_before", "_chunk", "_offset", "input")

    def __init__(self, input_: ElementIterator) -> None:
        self.input = input_
        self._before: State = None
        #: The chunk in hand; its elements before `_offset` were taken. Taken whole: offset == size.
        self._chunk: Chunk | None = None
        self._offset = 0

    @property
    def in_hand(self) -> int:
        """Elements that can be taken without asking the input."""
        return 0 if self._chunk is None else self._chunk.size - self._offset

    def take(self, count: int, pull: int = 0) -> Chunk | None:
        """Return 1 to `count` elements, or None at the end of the input.

        Args:
            count: The most to return.
            pull: Elements to ask the input for when none are in hand; `count` if that is more.
        """
        chunk, offset = self._chunk, self._offset
        if chunk is None or offset >= chunk.size:
            self._before = self.input.get_state()
            # Forgotten first: if the input raises, nothing is in hand and the place is behind.
            self._chunk = None
            chunk = self.input.next_chunk(max(count, pull))
            if chunk is None:
                return None
            self._chunk = chunk
            self._offset = offset = 0
        if offset == 0 and chunk.size <= count:
            self._offset = chunk.size
            return chunk
        end = min(offset + count, chunk.size)
        self._offset = end
        return chunk.slice(offset, end)

    def put_back(self, count: int) -> None:
        """Undo the last `count` elements of the last `take`."""
        assert self._chunk is not None
        assert count <= self._offset
        self._offset -= count

    def get_state(self) -> State:
        """Return the place of the next element to be taken."""
        if self._chunk is None or self._offset >= self._chunk.size:
            return self.input.get_state()
        if self._offset == 0:
            return self._before
        return {"skip": self._offset, "at": self._before}

    def set_state(self, state: State) -> None:
        """Go to a place that `get_state` returned."""
        self._chunk = None
        self._offset = 0
        if isinstance(state, dict) and "skip" in state:
            self.input.set_state(state["at"])
            skip(self.input, state["skip"])
        else:
            self.input.set_state(state)

    def close(self) -> None:
        """Close the input."""
        self._chunk = None
        self.input.close()


def skip(iterator: ElementIterator, count: int) -> int:
    """Read past up to `count` elements; return how many there were.

    Elements that fail count as none, as they did when they were first passed.
    """
    passed = failed = 0
    while passed < count:
        try:
            chunk = iterator.next_chunk(count - passed)
        except Exception:
            failed += 1
            if failed > _MOST_FAILURES + count:
                raise
            continue
        if chunk is None:
            break
        passed += chunk.size
    return passed
