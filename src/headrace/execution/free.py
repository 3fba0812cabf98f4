"""What a step whose order is free has still to do, where it works in order."""

from __future__ import annotations

from headrace.element.chunk import Chunk, States
from headrace.execution.iterator import ElementIterator, Singles, State
from headrace.execution.runs import mask_of, runs_of

__all__ = ["Missing"]


class Missing(ElementIterator):
    """The input of a free step, without the elements of which the results were delivered.

    So a step that holds nothing has the states of a free one: a place before all elements that are
    missing, and which of those after it are not. Another saved them, with threads.
    """

    def __init__(self, input_: ElementIterator) -> None:
        self._input = input_
        self.gives_rows = input_.gives_rows
        self._gone = 0  # bit i: element i from here on was delivered

    @property
    def reads_ahead_freely(self) -> bool:
        return self._input.reads_ahead_freely

    @property
    def at_hand(self) -> int:
        return self._input.at_hand

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._gone & 1:
            self._pass_over()
        gone = self._gone
        if gone:
            limit = min(limit, (gone & -gone).bit_length() - 1)
        try:
            chunk = self._input.next_chunk(limit)
        except Exception:
            self._gone >>= 1  # it has a number, too
            raise
        if chunk is None:
            return None
        self._gone >>= chunk.size
        return chunk.with_states(_states(gone, chunk.states))

    def _pass_over(self) -> None:
        """Read past elements that were delivered; those that fail were, as errors."""
        gone = self._gone
        count = (~gone & (gone + 1)).bit_length() - 1
        try:
            chunk = self._input.next_chunk(count)
        except Exception:
            count = 1
        else:
            count = count if chunk is None else chunk.size
        self._gone >>= count

    def singles(self) -> Singles | None:
        if self._gone:
            return super().singles()
        got = self._input.singles()
        return None if got is None else (got[0], _states(0, got[1]))

    def get_state(self) -> State:
        return {"done": runs_of(self._gone), "input": self._input.get_state()}

    def set_state(self, state: State) -> None:
        self._gone = mask_of(state["done"])
        self._input.set_state(state["input"])

    def skip(self, count: int) -> int:
        return super().skip(count) if self._gone else self._input.skip(count)

    def close(self) -> None:
        self._input.close()


def _states(gone: int, states: States) -> States:
    return lambda index: {"done": runs_of(gone >> index), "input": states(index)}
