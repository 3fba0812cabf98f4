"""Iterators of the steps that join datasets: side by side, and one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.element.structure import unflatten
from headrace.execution.caching import has_seed
from headrace.execution.context import Context
from headrace.execution.dealt import DealtConcatenate
from headrace.execution.intake import Intake, Live
from headrace.execution.iterator import ElementIterator, Singles, State, make_iterator
from headrace.execution.places import within
from headrace.execution.stage import in_part
from headrace.plan.buffering import Prefetch
from headrace.plan.combining import Concatenate, Zip
from headrace.plan.elements import FromSource, Gather, Indices, Read
from headrace.plan.node import Node, distinct
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality

__all__ = ["ConcatenateIterator", "ZipIterator", "members"]


@make_iterator.register(Zip)
class ZipIterator(ElementIterator):
    """Joins the n-th elements of its inputs; ends with the shortest."""

    def __init__(self, node: Zip, context: Context) -> None:
        self._structure = node.structure
        numbers = tuple(range(len(node.inputs)))
        self._is_flat = unflatten(node.structure, numbers) == numbers
        self._intakes = [Intake(make_iterator(input_, context)) for input_ in node.inputs]
        others = [intake for intake in self._intakes if not intake.input.gives_rows]
        self.gives_rows = len(others) < min(2, len(self._intakes))
        #: In which order the inputs are asked, those that call no functions first. It is always
        #: the same, for at the end of one another may fail.
        self._in_turn = sorted(numbers, key=lambda number: _calls_functions(node.inputs[number]))

    @property
    def reads_ahead_freely(self) -> bool:
        return all(intake.input.reads_ahead_freely for intake in self._intakes)

    def next_chunk(self, limit: int) -> Chunk | None:
        count = limit
        # How many elements those that cost nothing give bounds what the others are asked for.
        for number in self._in_turn:
            intake = self._intakes[number]
            if intake.look(count) is None:
                return None
            count = min(count, intake.in_hand)
        chunks = [intake.take(count) for intake in self._intakes]
        parts = [chunk for chunk in chunks if chunk is not None]
        each = [chunk.states for chunk in parts]

        def states(index: int) -> State:
            return [at(index) for at in each]

        numbers = [chunk.places for chunk in parts if chunk.places is not None]
        places = reduce(within, numbers) if numbers else None

        if all(chunk.is_columnar for chunk in parts):
            joined = unflatten(self._structure, [chunk.columns() for chunk in parts])
            return Chunk.of_columns(joined, count, states, places)
        rows = zip(*[chunk.rows() for chunk in parts], strict=True)
        return Chunk.of_rows(list(map(self._joined, rows)), states, places)

    def _joined(self, parts: Sequence[Any]) -> Any:
        return tuple(parts) if self._is_flat else unflatten(self._structure, parts)

    def singles(self) -> Singles | None:
        found: dict[int, Live] = {}
        for number in self._in_turn:
            live = self._intakes[number].singles()
            if live is None:
                return None
            found[number] = live
        lives = [found[number] for number in range(len(found))]
        each = [live.states for live in lives]
        return self._side_by_side(lives), lambda index: [at(index) for at in each]

    def _side_by_side(self, lives: list[Live]) -> Iterator[Any]:
        in_turn = [(number, lives[number]) for number in self._in_turn]
        joined = tuple if self._is_flat else self._joined
        parts: list[Any] = [None] * len(lives)
        number, count, has_ended = self._in_turn[0], 0, False
        try:
            while not has_ended:
                for number, live in in_turn:
                    for part in live.rows:
                        parts[number] = part
                        break
                    else:
                        has_ended = True
                        break
                else:
                    yield joined(parts)
                    count += 1
        except Exception:
            self._leave(in_turn, number, parts, count)
            raise
        self._leave(in_turn, number, parts, count)

    def _leave(
        self, in_turn: list[tuple[int, Live]], number: int, parts: list[Any], count: int
    ) -> None:
        """Note that so many elements came, and that the next part of an input did not."""
        for _, live in in_turn:
            live.taken += count
        for earlier, live in in_turn:
            if earlier == number:
                break
            live.put_back(parts[earlier])  # it waits for the next try
        self._intakes[number].drop_singles()

    def get_state(self) -> State:
        return [intake.get_state() for intake in self._intakes]

    def set_state(self, state: State) -> None:
        for intake, place in zip(self._intakes, state, strict=True):
            intake.set_state(place)

    def seek(self, position: int) -> None:
        for intake in self._intakes:
            intake.seek(position)

    def close(self) -> None:
        for intake in self._intakes:
            intake.close()


@make_iterator.register(Concatenate)
def _make_concatenate(node: Concatenate, context: Context) -> ElementIterator:
    if context.dealer is not None:
        return DealtConcatenate(members(node), context, context.dealer)
    return ConcatenateIterator(node, context)


class ConcatenateIterator(ElementIterator):
    """Reads its inputs one after the other. Several `concatenate` in a row are one."""

    def __init__(self, node: Concatenate, context: Context) -> None:
        self._nodes = members(node)
        self._context = context
        self._inputs = [make_iterator(member, context) for member in self._nodes]
        self._current = 0
        self._furthest = 0  # input that was ever the current one
        self._seeded = [place for place, input_ in enumerate(self._nodes) if has_seed(input_)]
        #: Places of inputs whose elements depend on what a cache holds when this begins, each with
        #: its state at its beginning, which names that. None: this has not begun.
        self._later: list[tuple[int, State]] | None = None

    @property
    def reads_ahead_freely(self) -> bool:
        return all(input_.reads_ahead_freely for input_ in self._inputs[self._current :])

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._current < len(self._inputs):
            current, later = self._current, self._states_to_come()
            chunk = self._inputs[current].next_chunk(limit)
            if chunk is not None:
                chunk = in_part("current", current, chunk)
                return chunk.with_states(_with_later(chunk.states, later)) if later else chunk
            self._current += 1
        return None

    def _states_to_come(self) -> list[list[Any]]:
        """Return the inputs after the current one that have a seed, and their first states."""
        if self._later is None:
            self._later = [(place, self._inputs[place].get_state()) for place in self._seeded]
        return [[place, state] for place, state in self._later if place > self._current]

    def get_state(self) -> State:
        later = self._states_to_come()
        is_over = self._current == len(self._inputs)
        place = None if is_over else self._inputs[self._current].get_state()
        state = {"current": self._current, "input": place}
        return {**state, "later": later} if later else state

    def set_state(self, state: State) -> None:
        self._rewind(state["current"])
        if self._current < len(self._inputs):
            self._inputs[self._current].set_state(state["input"])
        self._later = [(place, first) for place, first in state.get("later", ())]
        for place, first in self._later:
            self._inputs[place].set_state(first)

    def seek(self, position: int) -> None:
        sizes = [cardinality(node) for node in self._nodes]
        ends = list(accumulate(sizes)) if INFINITE not in sizes else _until_infinite(sizes)
        current = min(bisect_right(ends, position), len(sizes) - 1)
        self._current = current
        self._inputs[current].seek(position - (ends[current - 1] if current else 0))
        for later in self._inputs[current + 1 :]:
            later.seek(0)

    def _rewind(self, current: int) -> None:
        """Make an input the current one, and those after it begin at their beginning."""
        self._furthest = max(self._furthest, self._current)
        self._current = current
        for used in range(current + 1, min(self._furthest + 1, len(self._inputs))):
            self._inputs[used].close()
            self._inputs[used] = make_iterator(self._nodes[used], self._context)

    def close(self) -> None:
        for input_ in self._inputs:
            input_.close()


def _with_later(states: States, later: list[list[Any]]) -> States:
    return lambda index: {**states(index), "later": later}


def _calls_functions(plan: Node) -> bool:
    """Say whether the user's functions may be called to read a plan."""
    for node in distinct([plan]):
        if isinstance(node, FromSource | Gather | Read):
            if node.source.runs_user_code:
                return True
        elif not (node.only_reads or isinstance(node, Indices)):
            return True
    return False


def _until_infinite(sizes: list[int]) -> list[int]:
    """Return where each input ends, up to the first that does not."""
    return list(accumulate(sizes[: sizes.index(INFINITE)]))


def members(node: Concatenate) -> list[Node]:
    """Return what a chain of `concatenate` steps joins, in order, whatever is read ahead in it."""
    found: list[Node] = []
    pending: list[Node] = [node]
    while pending:
        joined = pending.pop()
        parts = _parts(joined)
        if parts is None:
            found.append(joined)
        else:
            pending += reversed(parts)
    return found


def _parts(node: Node) -> list[Node] | None:
    """Return the two that a node joins. Where a prefetch reads their join ahead, it reads each.

    So states and places are the same with a prefetch between two `concatenate` and without.
    """
    if isinstance(node, Concatenate):
        return [node.first, node.second]
    if not isinstance(node, Prefetch):
        return None
    parts = _parts(node.input)
    return None if parts is None else [node.with_inputs([part]) for part in parts]
