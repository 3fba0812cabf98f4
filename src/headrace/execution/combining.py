"""Iterators of the steps that join datasets: side by side, and one after the other."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from headrace.element.chunk import Chunk
from headrace.element.tree import unflatten
from headrace.execution.context import Context
from headrace.execution.dealt import DealtConcatenate
from headrace.execution.intake import Intake
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.stage import states_in
from headrace.plan.combining import Concatenate, Zip
from headrace.plan.node import Node
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality

__all__ = ["ConcatenateIterator", "ZipIterator", "members"]


@make_iterator.register(Zip)
class ZipIterator(ElementIterator):
    """Joins the n-th elements of its inputs; ends with the shortest."""

    def __init__(self, node: Zip, context: Context) -> None:
        self._structure = node.structure
        self._intakes = [Intake(make_iterator(input_, context)) for input_ in node.inputs]

    @property
    def reads_ahead_freely(self) -> bool:
        return all(intake.input.reads_ahead_freely for intake in self._intakes)

    def next_chunk(self, limit: int) -> Chunk | None:
        count = limit
        # First those that cost nothing: how many they give bounds what the others are asked for.
        for intake in sorted(self._intakes, key=_costs):
            if intake.look(count) is None:
                return None
            count = min(count, intake.in_hand)
        chunks = [intake.take(count) for intake in self._intakes]
        parts = [chunk for chunk in chunks if chunk is not None]
        places = [chunk.states for chunk in parts]

        def states(index: int) -> State:
            return [place(index) for place in places]

        if all(chunk.is_columnar for chunk in parts):
            joined = unflatten(self._structure, [chunk.columns() for chunk in parts])
            return Chunk.of_columns(joined, count, states)
        rows = zip(*[chunk.rows() for chunk in parts], strict=True)
        return Chunk.of_rows([unflatten(self._structure, list(row)) for row in rows], states)

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
        self._inputs = [make_iterator(member, context) for member in self._nodes]
        self._begins = [input_.get_state() for input_ in self._inputs]
        self._current = 0
        self._furthest = 0  # input that was ever the current one

    @property
    def reads_ahead_freely(self) -> bool:
        return all(input_.reads_ahead_freely for input_ in self._inputs[self._current :])

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._current < len(self._inputs):
            current = self._current
            chunk = self._inputs[current].next_chunk(limit)
            if chunk is not None:
                return chunk.with_states(states_in("current", current, chunk.states))
            self._current += 1
        return None

    def get_state(self) -> State:
        if self._current == len(self._inputs):
            return {"current": self._current, "input": None}
        return {"current": self._current, "input": self._inputs[self._current].get_state()}

    def set_state(self, state: State) -> None:
        self._rewind(state["current"])
        if self._current < len(self._inputs):
            self._inputs[self._current].set_state(state["input"])

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
            self._inputs[used].set_state(self._begins[used])

    def close(self) -> None:
        for input_ in self._inputs:
            input_.close()


def _costs(intake: Intake) -> bool:
    return not intake.input.reads_ahead_freely


def _until_infinite(sizes: list[int]) -> list[int]:
    """Return where each input ends, up to the first that does not."""
    return list(accumulate(sizes[: sizes.index(INFINITE)]))


def members(node: Concatenate) -> list[Node]:
    """Return what a chain of `concatenate` steps joins, in order."""
    found: list[Node] = []
    pending: list[Node] = [node]
    while pending:
        first = pending.pop()
        if isinstance(first, Concatenate):
            pending += [first.second, first.first]
        else:
            found.append(first)
    return found
