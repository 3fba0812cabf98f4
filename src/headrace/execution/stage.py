"""What steps over one input have in common: what is in hand, the states, errors in their turn.

    class TakeWhileIterator(RowStage):
        '''Ends before the first element for which the predicate is false.'''

        def step(self, row):
            return row if self.call(row) else END

is a whole step. It keeps the rules of `iterator` without a word of its own: an error is raised when
the failing element's turn has come, the function is called once for an element and only for those
that were asked for, and every element has a place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.execution.intake import Intake, Live
from headrace.execution.iterator import END, ElementIterator, Singles, State, position_of
from headrace.execution.origins import blame_element
from headrace.execution.places import within
from headrace.plan.user_function import UserFunction

__all__ = [
    "BLOCK",
    "NOTHING",
    "Missing",
    "RowStage",
    "Stage",
    "chosen_states",
    "in_part",
    "mask_of",
    "runs_of",
    "states_in",
]

NOTHING: Any = type("Nothing", (), {"__doc__": "What `step` returns for no element."})()

BLOCK = 64
"""Rows that are cut out of a chunk at once when only a few elements are asked for."""


class Stage(ElementIterator):
    """A step over one input whose state is its input's.

    Subclasses write `_work`. Those that work on whole chunks do so again one by one where that
    fails (`_one_by_one`), to find the element whose fault it is.
    """

    def __init__(self, input_: ElementIterator) -> None:
        self._intake = Intake(input_)
        #: That of the next element of the intake, to be raised when its turn comes.
        self._failure: Exception | None = None
        #: A chunk that could not be worked on as a whole.
        self._one_by_one: Chunk | None = None

    @property
    def reads_ahead_freely(self) -> bool:
        return self._intake.input.reads_ahead_freely

    @abstractmethod
    def _work(self, limit: int) -> Chunk | None:
        """Return 1 to `limit` elements, or None at the end.

        An element that fails is left in hand as the next one, and its error in `_failure`.
        """

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._failure is None:
            chunk = self._work(limit)
            if chunk is not None or self._failure is None:
                return chunk
        failure, self._failure = self._failure, None
        self._use(1)
        raise failure

    def _use(self, count: int) -> None:
        """Pass on over `count` of the elements in hand."""
        if count:
            self._intake.use(count)

    def get_state(self) -> State:
        return self._intake.get_state()

    def set_state(self, state: State) -> None:
        self._failure = self._one_by_one = None
        self._intake.set_state(state)

    def close(self) -> None:
        self._failure = self._one_by_one = None
        self._intake.close()


class RowStage(Stage):
    """A step that calls a user's function for its input's elements, one by one."""

    @property
    def reads_ahead_freely(self) -> bool:
        return False

    def __init__(self, input_: ElementIterator, call: UserFunction) -> None:
        super().__init__(input_)
        self.call = call
        self._has_ended = False
        self._looked_at = 0  # elements of the input, since this iterator began

    @abstractmethod
    def step(self, row: Any) -> Any:
        """Return the element that takes the place of `row`, or NOTHING, or END."""

    def _work(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            chunk = self._intake.look_ahead(limit)
            if chunk is None:
                return None
            made = self._go_through(chunk, limit)
            if made is not None or self._failure is not None:
                return made
        return None

    def _go_through(self, chunk: Chunk, limit: int) -> Chunk | None:
        """Return what becomes of elements of the chunk in hand; None: nothing."""
        start = self._intake.offset
        rows = chunk.rows()[start : start + max(limit, BLOCK)]
        results: list[Any] = []
        origins: list[int] = []
        step, seen = self.step, 0
        try:
            for row in rows:
                made = step(row)
                if made is not NOTHING:
                    if made is END:
                        self._has_ended = True
                        break
                    results.append(made)
                    origins.append(start + seen)
                    if len(results) == limit:
                        seen += 1
                        break
                seen += 1
        except BaseException as error:
            self._fail(error, chunk, start + seen)
        self._use(seen)
        if not results:
            return None
        states = chosen_states(chunk.states, origins, start + seen)
        return Chunk.of_rows(results, states, chunk.column_at(origins))

    def _fail(self, error: BaseException, chunk: Chunk, index: int) -> None:
        """Keep the error of element `index` of the chunk in hand for when its turn comes."""
        count = self._looked_at + index - self._intake.offset
        number = position_of(chunk.state_at(index), count)
        rows = chunk.rows()
        self._failure = self.call.blame(error, number, *rows[index : index + 1])
        blame_element(self._failure, chunk.places, index)

    def _blamed(self, error: BaseException, live: Live, count: int, row: Any) -> Exception:
        """Return what to raise where `row`, number `count` of the single elements, failed."""
        live.taken += count - 1
        number = position_of(live.states(0), self._looked_at + count - 1)
        live.taken += 1  # the place is after it
        return self.call.blame(error, number, row)

    def _break_off(self, live: Live, start: int, count: int) -> None:
        """Take note of an error at number `count` of single elements, which is raised now.

        Args:
            live: The elements.
            start: `live.taken` before the first of them.
            count: Which one it was.
        """
        self._looked_at += count
        if live.taken == start:  # the error is the input's
            self._intake.drop_singles()

    def _pass_over(self, count: int) -> None:
        """Take note that there are no more single elements after `count` of them."""
        self._looked_at += count
        self._intake.drop_singles()

    def _use(self, count: int) -> None:
        self._looked_at += count
        super()._use(count)

    def set_state(self, state: State) -> None:
        self._has_ended = False
        super().set_state(state)


def chosen_states(states: States, origins: Sequence[int], end: int) -> States:
    """Return the states before some elements of a chunk.

    Args:
        states: Those of the whole chunk.
        origins: Which elements they are.
        end: The state after the last one is that before this element of the chunk.
    """
    count = len(origins)
    return lambda index: states(origins[index] if index < count else end)


def in_part(name: str, number: int, chunk: Chunk) -> Chunk:
    """Return elements of one part of a stream, with its number in their states and places."""
    column = chunk.column
    if isinstance(column, np.ndarray):
        chunk = chunk.with_places(within(np.array([number], np.uint64), column))
    return chunk.with_states(states_in(name, number, chunk.states))


def states_in(name: str, number: int, states: States) -> States:
    """Return the states of elements in one part of a stream: that part's number, and in it."""
    return lambda index: {name: number, "input": states(index)}


# --- What a step whose order is free has still to do, where it works in order ---------------------


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


# --- Sets of small numbers: as the bits of an integer, and as runs, as they are saved -------------


def mask_of(runs: Iterable[Sequence[int]]) -> int:
    """Return an integer with the bits of these runs, [first, one after the last] each."""
    mask = 0
    for start, stop in runs:
        mask |= (1 << stop) - (1 << start)
    return mask


def runs_of(mask: int) -> list[list[int]]:
    """Return the runs of bits that are set, in order."""
    runs = []
    at = 0
    while mask:
        low = (mask & -mask).bit_length() - 1
        mask >>= low
        size = (~mask & (mask + 1)).bit_length() - 1
        mask >>= size
        runs.append([at + low, at + low + size])
        at += low + size
    return runs
