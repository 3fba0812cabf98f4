"""Iterators of the steps that join datasets: `zip` and `concatenate`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.element.structure import unflatten
from headrace.execution.assigned_iterators import AssignedConcatenateIterator
from headrace.execution.caching import depends_on_seed
from headrace.execution.context import Context
from headrace.execution.element_numbers import nest_ids
from headrace.execution.input_buffer import InputBuffer, LazyRowStream
from headrace.execution.iterator import ElementIterator, LazyRows, State, make_iterator
from headrace.execution.step_iterator import tag_part
from headrace.plan.buffering import Prefetch
from headrace.plan.combining import Concatenate, Zip
from headrace.plan.elements import FromSource, GatherIndices, Indices, ReadIndices
from headrace.plan.node import Node, distinct_nodes
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality

__all__ = ["ConcatenateIterator", "ZipIterator", "concatenated_inputs"]


@make_iterator.register(Zip)
class ZipIterator(ElementIterator):
    """Joins the n-th elements of its inputs; ends with the shortest."""

    def __init__(self, node: Zip, context: Context) -> None:
        self._structure = node.structure
        numbers = tuple(range(len(node.inputs)))
        self._is_flat = unflatten(node.structure, numbers) == numbers
        self._inputs = [InputBuffer(make_iterator(input_, context)) for input_ in node.inputs]
        without_lazy_rows = [
            input_buffer for input_buffer in self._inputs if not input_buffer.input.has_lazy_rows
        ]
        self.has_lazy_rows: bool = len(without_lazy_rows) < min(2, len(self._inputs))
        #: Order in which the inputs are read: those that call no functions first. The order is
        #: fixed, because at the end of one input another may fail.
        self._read_order = sorted(numbers, key=lambda number: _calls_functions(node.inputs[number]))

    @property
    def can_read_ahead(self) -> bool:
        return all(input_buffer.input.can_read_ahead for input_buffer in self._inputs)

    def next_chunk(self, limit: int) -> Chunk | None:
        count = limit
        # The inputs that cost nothing limit how many elements are requested from the others.
        for number in self._read_order:
            input_buffer = self._inputs[number]
            if input_buffer.peek(count) is None:
                return None
            count = min(count, input_buffer.num_buffered)
        chunks = [input_buffer.take(count) for input_buffer in self._inputs]
        parts = [chunk for chunk in chunks if chunk is not None]
        part_states = [chunk.states for chunk in parts]

        def states(index: int) -> State:
            return [states_at(index) for states_at in part_states]

        columns = [chunk.metadata for chunk in parts if chunk.metadata is not None]
        metadata = reduce(nest_ids, columns) if columns else None

        if all(chunk.is_columnar for chunk in parts):
            joined = unflatten(self._structure, [chunk.columns() for chunk in parts])
            return Chunk.of_columns(joined, count, states, metadata)
        rows = zip(*[chunk.rows() for chunk in parts], strict=True)
        return Chunk.of_rows(list(map(self._join, rows)), states, metadata)

    def _join(self, parts: Sequence[Any]) -> Any:
        return tuple(parts) if self._is_flat else unflatten(self._structure, parts)

    def lazy_rows(self) -> LazyRows | None:
        found: dict[int, LazyRowStream] = {}
        for number in self._read_order:
            stream = self._inputs[number].lazy_rows()
            if stream is None:
                return None
            found[number] = stream
        streams = [found[number] for number in range(len(found))]
        part_states = [stream.states for stream in streams]
        return self._zip_rows(streams), lambda index: [
            states_at(index) for states_at in part_states
        ]

    def _zip_rows(self, lazy_rows: list[LazyRowStream]) -> Iterator[Any]:
        ordered_streams = [(number, lazy_rows[number]) for number in self._read_order]
        joined = tuple if self._is_flat else self._join
        parts: list[Any] = [None] * len(lazy_rows)
        number, count, has_ended = self._read_order[0], 0, False
        try:
            while not has_ended:
                for number, stream in ordered_streams:
                    for part in stream.rows:
                        parts[number] = part
                        break
                    else:
                        has_ended = True
                        break
                else:
                    yield joined(parts)
                    count += 1
        except Exception:
            self._record_consumed(ordered_streams, number, parts, count)
            raise
        self._record_consumed(ordered_streams, number, parts, count)

    def _record_consumed(
        self, streams: list[tuple[int, LazyRowStream]], number: int, parts: list[Any], count: int
    ) -> None:
        """Record `count` joined rows, and that the input `number` yielded no further part."""
        for _, stream in streams:
            stream.num_taken += count
        for earlier, stream in streams:
            if earlier == number:
                break
            stream.put_back(parts[earlier])  # kept for the next call
        self._inputs[number].end_lazy_rows()

    def get_state(self) -> State:
        return [input_buffer.get_state() for input_buffer in self._inputs]

    def set_state(self, state: State) -> None:
        for input_buffer, input_state in zip(self._inputs, state, strict=True):
            input_buffer.set_state(input_state)

    def seek(self, position: int) -> None:
        for input_buffer in self._inputs:
            input_buffer.seek(position)

    def close(self) -> None:
        for input_buffer in self._inputs:
            input_buffer.close()


@make_iterator.register(Concatenate)
def _make_concatenate(node: Concatenate, context: Context) -> ElementIterator:
    if context.split_provider is not None:
        return AssignedConcatenateIterator(
            concatenated_inputs(node), context, context.split_provider
        )
    return ConcatenateIterator(node, context)


class ConcatenateIterator(ElementIterator):
    """Reads its inputs one after the other. Chained `concatenate` steps are merged."""

    def __init__(self, node: Concatenate, context: Context) -> None:
        self._nodes = concatenated_inputs(node)
        self._context = context
        self._inputs = [make_iterator(member, context) for member in self._nodes]
        self._current = 0
        self._last_opened = 0  # highest input that was ever the current one
        self._seeded_inputs = [
            index for index, input_ in enumerate(self._nodes) if depends_on_seed(input_)
        ]
        #: Indices of inputs whose elements depend on a cache's contents at the start, each with its
        #: initial state, which contains the seed. None before the first read.
        self._later_states: list[tuple[int, State]] | None = None

    @property
    def can_read_ahead(self) -> bool:
        return all(input_.can_read_ahead for input_ in self._inputs[self._current :])

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._current < len(self._inputs):
            current, later = self._current, self._upcoming_states()
            chunk = self._inputs[current].next_chunk(limit)
            if chunk is not None:
                chunk = tag_part("current", current, chunk)
                return (
                    chunk.with_states(_with_later_states(chunk.states, later)) if later else chunk
                )
            self._current += 1
        return None

    def _upcoming_states(self) -> list[list[Any]]:
        """Return the seeded inputs after the current one, and their first states."""
        if self._later_states is None:
            self._later_states = [
                (index, self._inputs[index].get_state()) for index in self._seeded_inputs
            ]
        return [[index, state] for index, state in self._later_states if index > self._current]

    def get_state(self) -> State:
        later = self._upcoming_states()
        is_over = self._current == len(self._inputs)
        input_state = None if is_over else self._inputs[self._current].get_state()
        state = {"current": self._current, "input": input_state}
        return {**state, "later_inputs": later} if later else state

    def set_state(self, state: State) -> None:
        self._open_input(state["current"])
        if self._current < len(self._inputs):
            self._inputs[self._current].set_state(state["input"])
        self._later_states = [
            (index, first_state) for index, first_state in state.get("later_inputs", ())
        ]
        for index, first_state in self._later_states:
            self._inputs[index].set_state(first_state)

    def seek(self, position: int) -> None:
        sizes = [cardinality(node) for node in self._nodes]
        ends = list(accumulate(sizes)) if INFINITE not in sizes else _find_ends(sizes)
        current = min(bisect_right(ends, position), len(sizes) - 1)
        self._current = current
        self._inputs[current].seek(position - (ends[current - 1] if current else 0))
        for later in self._inputs[current + 1 :]:
            later.seek(0)

    def _open_input(self, current: int) -> None:
        """Make an input the current one, and reset those after it."""
        self._last_opened = max(self._last_opened, self._current)
        self._current = current
        for index in range(current + 1, min(self._last_opened + 1, len(self._inputs))):
            self._inputs[index].close()
            self._inputs[index] = make_iterator(self._nodes[index], self._context)

    def close(self) -> None:
        for input_ in self._inputs:
            input_.close()


def _with_later_states(states: States, later: list[list[Any]]) -> States:
    return lambda index: {**states(index), "later_inputs": later}


def _calls_functions(plan: Node) -> bool:
    """Return whether reading a plan may call user functions."""
    for node in distinct_nodes([plan]):
        if isinstance(node, FromSource | GatherIndices | ReadIndices):
            if node.source.runs_user_code:
                return True
        elif not (node.is_read_only or isinstance(node, Indices)):
            return True
    return False


def _find_ends(sizes: list[int]) -> list[int]:
    """Return where each input ends, up to the first infinite one."""
    return list(accumulate(sizes[: sizes.index(INFINITE)]))


def concatenated_inputs(node: Concatenate) -> list[Node]:
    """Return the inputs of chained `concatenate` steps, in order, also through prefetches."""
    found: list[Node] = []
    pending: list[Node] = [node]
    while pending:
        joined = pending.pop()
        parts = _joined_inputs(joined)
        if parts is None:
            found.append(joined)
        else:
            pending += reversed(parts)
    return found


def _joined_inputs(node: Node) -> list[Node] | None:
    """Return the two inputs that a node joins; a prefetch of a join is applied to each input.

    So states are the same with or without a prefetch between two `concatenate` steps.
    """
    if isinstance(node, Concatenate):
        return [node.first, node.second]
    if not isinstance(node, Prefetch):
        return None
    parts = _joined_inputs(node.input)
    return None if parts is None else [node.copy_with_inputs([part]) for part in parts]
