"""Iterators of the steps that join datasets: side by side, and one after the other."""

from __future__ import annotations

from headrace.element.chunk import Chunk
from headrace.element.tree import unflatten
from headrace.execution.context import Context
from headrace.execution.intake import Intake
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.combining import Concatenate, Zip

__all__ = ["ConcatenateIterator", "ZipIterator"]


@make_iterator.register(Zip)
class ZipIterator(ElementIterator):
    """Joins the n-th elements of its inputs; ends with the shortest."""

    def __init__(self, node: Zip, context: Context) -> None:
        self._structure = node.structure
        self._intakes = [
            Intake(make_iterator(input_, context.below(i))) for i, input_ in enumerate(node.inputs)
        ]

    def next_chunk(self, limit: int) -> Chunk | None:
        # As many as every input has at hand: the smallest of what one `take` of each gives.
        count = limit
        taken: list[tuple[Intake, Chunk]] = []
        for intake in self._intakes:
            try:
                chunk = intake.take(count)
            except Exception:
                self._give_back(taken, 0)
                raise
            if chunk is None:
                self._give_back(taken, 0)
                return None
            taken.append((intake, chunk))
            count = min(count, chunk.size)
        self._give_back(taken, count)
        chunks = [chunk if chunk.size == count else chunk.slice(0, count) for _, chunk in taken]
        if all(chunk.is_columnar for chunk in chunks):
            joined = unflatten(self._structure, [chunk.columns() for chunk in chunks])
            return Chunk.of_columns(joined, count)
        rows = zip(*[chunk.rows() for chunk in chunks], strict=True)
        return Chunk.of_rows([unflatten(self._structure, list(row)) for row in rows])

    def _give_back(self, taken: list[tuple[Intake, Chunk]], count: int) -> None:
        for intake, chunk in taken:
            if chunk.size > count:
                intake.put_back(chunk.size - count)

    def get_state(self) -> State:
        return [intake.get_state() for intake in self._intakes]

    def set_state(self, state: State) -> None:
        for intake, place in zip(self._intakes, state, strict=True):
            intake.set_state(place)

    def close(self) -> None:
        for intake in self._intakes:
            intake.close()


@make_iterator.register(Concatenate)
class ConcatenateIterator(ElementIterator):
    """Reads its inputs one after the other."""

    def __init__(self, node: Concatenate, context: Context) -> None:
        self._inputs = [
            make_iterator(input_, context.below(i)) for i, input_ in enumerate(node.inputs)
        ]
        self._current = 0

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._current < len(self._inputs):
            chunk = self._inputs[self._current].next_chunk(limit)
            if chunk is not None:
                return chunk
            self._current += 1
        return None

    def get_state(self) -> State:
        if self._current == len(self._inputs):
            return {"current": self._current, "input": None}
        return {"current": self._current, "input": self._inputs[self._current].get_state()}

    def set_state(self, state: State) -> None:
        self._current = state["current"]
        if self._current < len(self._inputs):
            self._inputs[self._current].set_state(state["input"])

    def close(self) -> None:
        for input_ in self._inputs:
            input_.close()
