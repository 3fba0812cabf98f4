"""Iterators that take each element from one of several inputs, chosen at random or by a dataset.

    selector --choices--> buffered elements of the inputs --> chunk

A random choice is a function of the seed, its number and the set of ended inputs: an ended input
has weight zero, and a choice that selected it is drawn again among the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk, States
from headrace.element.structure import unflatten
from headrace.execution.context import Context
from headrace.execution.element_numbers import BufferedChunk, nest_ids
from headrace.execution.input_buffer import InputBuffer, LazyRowStream
from headrace.execution.input_selector import (
    ChoiceInputSelector,
    InputSelector,
    RandomInputSelector,
    VaryingWeightsInputSelector,
)
from headrace.execution.iterator import ElementIterator, LazyRows, State, make_iterator
from headrace.plan.combining import Choose, Sample
from headrace.plan.user_function import step_name

__all__ = ["InputSelectionIterator"]

IndexArray: TypeAlias = NDArray[np.int64]
"""Choices, as numbers of inputs; or indices of choices in such an array."""


class _SelectedInput:
    """One of the inputs: its buffered elements, and a pending error."""

    def __init__(self, input_: ElementIterator) -> None:
        self.input_buffer = InputBuffer(input_)
        self.error: Exception | None = None
        self._states_before_error: States | None = None  # states before the failed element
        self._next_states: States | None = None  # states after the last element taken
        #: Whether the input is exhausted.
        self.is_at_end = False
        #: Whether the input was chosen after its end; until then it is chosen as before.
        self.has_ended = False

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next element is known or can be read without extra cost."""
        return self.is_known or self.input_buffer.input.can_read_ahead

    @property
    def is_known(self) -> bool:
        """Whether the next element, error or end is known."""
        return self.input_buffer.chunk is not None or self.error is not None or self.is_at_end

    def fill(self, indices: IndexArray, size: int) -> int:
        """Buffer the next elements; return how many of the choices have their elements.

        Args:
            indices: Indices of the choices of this input, ascending.
            size: Number of choices that have their elements as far as known.
        """
        num_wanted = int(np.searchsorted(indices, size))
        if num_wanted and not self.is_known:
            self._peek(num_wanted)
        num_buffered = self.input_buffer.num_buffered
        return size if num_buffered >= num_wanted else int(indices[num_buffered])

    def _peek(self, count: int) -> None:
        input_buffer = self.input_buffer
        states = self.states()
        try:
            if input_buffer.input.can_read_ahead:
                self.is_at_end = input_buffer.peek_ahead(count) is None
            else:
                self.is_at_end = input_buffer.peek(count) is None
        except Exception as error:
            self.error, self._states_before_error = error, states
        if self.is_at_end:
            self._next_states = None

    def take(self, count: int) -> Chunk:
        """Return buffered elements."""
        chunk = self.input_buffer.take(count)
        assert chunk is not None
        states, size = chunk.states, chunk.size
        self._next_states = lambda index: states(size)
        return chunk

    @property
    def has_lazy_rows(self) -> bool:
        """Whether lazy rows come next, which are only computed when they are taken."""
        return self.error is None and self.input_buffer.states is not None

    def start_lazy_rows(self) -> LazyRowStream | None:
        """Return the next elements as a stream of lazy rows, or None if there are none."""
        try:
            stream = self.input_buffer.lazy_rows()
        except Exception:
            self._next_states = None
            raise
        if stream is None:
            self.is_at_end, self._next_states = True, None
        return stream

    def end_lazy_rows(self) -> None:
        """Record that the lazy rows ended, after the last one or an error."""
        self.input_buffer.end_lazy_rows()
        self._next_states = None

    def take_error(self) -> Exception:
        """Return the pending error, and clear it."""
        assert self.error is not None
        failure = self.error
        self.error = self._states_before_error = self._next_states = None
        return failure

    def states(self) -> States:
        """Return the states before the next element or error, as far as known.

        The result is cached, because computing the input's state may be slow.
        """
        states = self._states_before_error or self.input_buffer.states or self._next_states
        if states is None:
            state = self.input_buffer.get_state()
            states = self._next_states = lambda index: state
        return states

    def set_state(self, state: State, has_ended: bool) -> None:
        """Restore a state."""
        self.error = self._states_before_error = self._next_states = None
        self.is_at_end = self.has_ended = has_ended
        self.input_buffer.set_state(state)


class InputSelectionIterator(ElementIterator):
    """Takes each element from the input that a selector chooses.

    Args:
        inputs: The inputs.
        selector: Chooses the input of each element.
        stops_on_empty: Whether the iterator ends when an ended input is chosen.
    """

    def __init__(
        self, inputs: Sequence[ElementIterator], selector: InputSelector, *, stops_on_empty: bool
    ) -> None:
        self._inputs = [_SelectedInput(input_) for input_ in inputs]
        self._selector = selector
        self._stops_on_empty = stops_on_empty
        self._has_ended = False

    @property
    def can_read_ahead(self) -> bool:
        inputs = [member.input_buffer.input for member in self._inputs]
        return self._selector.can_look_ahead and all(input_.can_read_ahead for input_ in inputs)

    @property
    def has_lazy_rows(self) -> bool:  # type: ignore[override]
        return any(member.input_buffer.input.has_lazy_rows for member in self._inputs)

    def next_chunk(self, limit: int) -> Chunk | None:
        selector = self._selector
        while not self._has_ended:
            ended = [member.has_ended for member in self._inputs]
            choices = None
            if not all(ended):
                choices = selector.choices(limit if selector.can_look_ahead else 1, ended)
            if choices is None:
                break
            size = self._fill_inputs(choices)
            if size:
                return self._take(choices[:size])
            member = self._inputs[choices[0]]
            if member.error is not None:
                selector.consume(1)
                raise member.take_error()
            if self._stops_on_empty:
                break
            member.has_ended = True
            selector.skip_ended_input()
        self._has_ended = True
        return None

    def _fill_inputs(self, choices: IndexArray) -> int:
        """Buffer the elements of these choices; return how many choices have their elements."""
        size = len(choices)
        indices_of = {n: np.flatnonzero(choices == n) for n in np.unique(choices).tolist()}
        for number, indices in indices_of.items():
            if self._inputs[number].can_look_ahead:
                size = self._inputs[number].fill(indices, size)
        # Read only one input that costs calls, so that everything it computes is yielded.
        costly = sorted(
            (int(indices[0]), number)
            for number, indices in indices_of.items()
            if indices[0] < size and not self._inputs[number].can_look_ahead
        )
        if len(costly) > 1:
            size = costly[1][0]
        if costly:
            _, number = costly[0]
            size = self._inputs[number].fill(indices_of[number], size)
        return size

    def _take(self, choices: IndexArray) -> Chunk:
        """Return the elements of these choices from the buffers."""
        states = self._states(choices)
        parts: list[tuple[IndexArray, Chunk]] = []
        for number in np.unique(choices).tolist():
            indices = np.flatnonzero(choices == number)
            chunk = self._inputs[number].take(len(indices))
            if chunk.metadata is not None:
                chunk = chunk.with_metadata(nest_ids(np.array([number], np.uint64), chunk.metadata))
            parts.append((indices, chunk))
        self._selector.consume(len(choices))
        return _interleave_chunks(parts, len(choices)).with_states(states)

    # --- lazy rows ------------------------------------------------------------------------------

    def lazy_rows(self) -> LazyRows | None:
        if self._has_ended or not self._selector.can_look_ahead:
            return super().lazy_rows()
        ended = [member.has_ended for member in self._inputs]
        choices = None if all(ended) else self._selector.choices(_LAZY_ROWS_AT_ONCE, ended)
        if choices is None:
            return super().lazy_rows()
        member = self._inputs[choices[0]]
        if member.error is not None or member.is_at_end:
            return super().lazy_rows()
        try:
            stream = member.start_lazy_rows()
        except Exception:
            self._selector.consume(1)
            raise
        if stream is None:
            return super().lazy_rows()
        started = {
            number: member.start_lazy_rows()
            for number, member in enumerate(self._inputs)
            if member.has_lazy_rows
        }
        streams = {number: stream for number, stream in started.items() if stream is not None}
        return self._select_rows(choices, streams), self._states(choices)

    def _select_rows(
        self, choices: IndexArray, rows_by_input: dict[int, LazyRowStream]
    ) -> Iterator[Any]:
        """Yield rows of the inputs in turn, until an input without lazy rows is chosen."""
        numbers: list[int] = choices.tolist()
        number, count, has_ended = numbers[0], 0, False
        try:
            for number in numbers:
                if number not in rows_by_input:
                    break
                for row in rows_by_input[number].rows:
                    count += 1
                    yield row
                    break
                else:
                    has_ended = True
                    break
        except Exception:
            self._record_consumed(choices[:count], rows_by_input)
            self._selector.consume(1)
            self._inputs[number].end_lazy_rows()
            raise
        self._record_consumed(choices[:count], rows_by_input)
        if has_ended:
            self._inputs[number].end_lazy_rows()

    def _record_consumed(
        self, choices: IndexArray, rows_by_input: dict[int, LazyRowStream]
    ) -> None:
        """Record that the lazy rows of these choices were taken."""
        counts = np.bincount(choices, minlength=len(self._inputs)).tolist()
        for number, stream in rows_by_input.items():
            stream.num_taken += counts[number]
        self._selector.consume(len(choices))

    # --- state ----------------------------------------------------------------------------------

    def _states(self, choices: IndexArray) -> States:
        """Return the states before and after the elements of these choices."""
        input_states = [member.states() for member in self._inputs]
        selector = self._selector.states()
        ended = [number for number, member in enumerate(self._inputs) if member.has_ended]

        def states(index: int) -> State:
            counts = np.bincount(choices[:index], minlength=len(input_states)).tolist()
            return {
                "selector": selector(index),
                "ended": ended,
                "inputs": [
                    states_at(count) for states_at, count in zip(input_states, counts, strict=True)
                ],
            }

        return states

    def get_state(self) -> State:
        return self._states(_NO_CHOICES)(0)

    def set_state(self, state: State) -> None:
        self._has_ended = False
        self._selector.set_state(state["selector"])
        for number, (member, input_state) in enumerate(
            zip(self._inputs, state["inputs"], strict=True)
        ):
            member.set_state(input_state, number in state["ended"])

    def close(self) -> None:
        self._selector.close()
        for member in self._inputs:
            member.input_buffer.close()


_NO_CHOICES = np.empty(0, np.int64)
_LAZY_ROWS_AT_ONCE = 64
"""Number of choices made at once for lazy rows."""


def _interleave_chunks(parts: Sequence[tuple[IndexArray, Chunk]], size: int) -> Chunk:
    """Merge several chunks into one; each has the indices of its elements in the result."""
    first = parts[0][1]
    if len(parts) == 1:
        return first
    buffered = [BufferedChunk(chunk) for _, chunk in parts]
    layout = buffered[0].layout
    if layout is not None and all(part.layout == layout for part in buffered):
        leaves = []
        for number, leaf in enumerate(buffered[0].leaves):
            # Zeroed if there is padding between fields, which is not written here.
            make = np.zeros if leaf.dtype.kind == "V" else np.empty
            merged = make((size, *leaf.shape[1:]), leaf.dtype)
            for (indices, _), part in zip(parts, buffered, strict=True):
                merged[indices] = part.leaves[number]
            leaves.append(merged)
        assert buffered[0].structure is not None
        result = Chunk.of_columns(unflatten(buffered[0].structure, leaves), size)
    else:
        rows: list[Any] = [None] * size
        for indices, chunk in parts:
            for index, row in zip(indices.tolist(), chunk.rows(), strict=True):
                rows[index] = row
        result = Chunk.of_rows(rows)
    columns = [(indices, chunk.metadata) for indices, chunk in parts if chunk.metadata is not None]
    if not columns:
        return result
    metadata = np.empty(size, np.uint64)
    for indices, column in columns:
        metadata[indices] = column
    return result.with_metadata(metadata)


@make_iterator.register(Sample)
def _make_sample(node: Sample, context: Context) -> ElementIterator:
    entropy = _entropy(node, context)
    selector: InputSelector
    if node.weight_inputs:
        weights = make_iterator(node.weight_inputs[0], context.with_element_numbers(False))
        selector = VaryingWeightsInputSelector(
            entropy, weights, len(node.datasets), step_name(node)
        )
    else:
        selector = RandomInputSelector(entropy, node.schedule)
    inputs = [make_iterator(input_, context) for input_ in node.datasets]
    return InputSelectionIterator(inputs, selector, stops_on_empty=node.stop_on_empty_dataset)


def _entropy(node: Sample, context: Context) -> list[int]:
    """Return the entropy of a sampling step's random numbers."""
    if node.seed is None:
        if node.is_same_in_each_epoch:
            return context.fixed_entropy(node.number, node.default_seed)
        return context.entropy(node.number)
    epochs = () if node.is_same_in_each_epoch else context.epochs
    return [6, node.seed & _MASK, *epochs]


_MASK = (1 << 64) - 1


@make_iterator.register(Choose)
def _make_choose(node: Choose, context: Context) -> ElementIterator:
    choices = make_iterator(node.choices, context.with_element_numbers(False))
    selector = ChoiceInputSelector(choices, len(node.datasets), step_name(node))
    inputs = [make_iterator(input_, context) for input_ in node.datasets]
    return InputSelectionIterator(inputs, selector, stops_on_empty=node.stop_on_empty_dataset)
