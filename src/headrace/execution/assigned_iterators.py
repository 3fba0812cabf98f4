"""Iterators of the steps of a plan whose splits are assigned one by one.

Splits arrive in assignment order, which is arbitrary: a split reassigned from a lost worker may
belong to an earlier epoch. So the steps that define the order of positions (`repeat`,
`concatenate`) follow the assignments, and the leaves seek.

    next_splits() -> PositionSplitProvider
    peek -> AssignedRepeatIterator, AssignedConcatenateIterator: open the input of the next splits
    take -> AssignedLeafIterator: reads their positions

The state of a leaf is the number of assigned splits that are complete before an element;
`count_finished_splits` finds it in the state of any plan. In the middle of a split the state also
has the number of started splits. Assigned splits cannot be restored: the dispatcher assigns them
again.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.element.compact_columns import ConsecutiveSplits, MetadataColumn
from headrace.element.metadata import split_column
from headrace.errors import FailedPreconditionError
from headrace.execution.context import Context
from headrace.execution.element_numbers import number_positions
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.split_progress import FinishedSplits
from headrace.execution.split_provider import (
    AssignedPositions,
    FirstEpochSplitProvider,
    PositionSplitProvider,
    SplitProvider,
)
from headrace.execution.step_iterator import tag_part
from headrace.plan.node import Node, distinct_nodes
from headrace.plan.ordering import Repeat

__all__ = [
    "AssignedConcatenateIterator",
    "AssignedLeafIterator",
    "AssignedPlanIterator",
    "AssignedRepeatIterator",
    "MultiSplitIterator",
    "NotRestorableIterator",
    "as_first_epoch",
    "count_finished_splits",
    "count_started_splits",
    "find_failed_split",
    "find_leaf_numbers",
    "is_within_split",
]


def as_first_epoch(context: Context, split_provider: SplitProvider) -> Context:
    """Return a context in which every epoch of an assigned plan has the elements of epoch 0."""
    return dataclasses.replace(
        context,
        epochs=(0,) * len(context.epochs),
        split_provider=FirstEpochSplitProvider(split_provider, context.epochs),
    )


class NotRestorableIterator(ElementIterator):
    """An iterator that cannot be restored from a state."""

    def set_state(self, state: State) -> None:
        raise FailedPreconditionError(
            "an iterator over assigned splits cannot be restored from a state; the dispatcher "
            "assigns the splits again"
        )


class AssignedLeafIterator(NotRestorableIterator):
    """Iterator of an index plan whose positions are shared with other readers."""

    def __init__(self, node: Node, context: Context) -> None:
        assert context.split_provider is not None
        self._split_provider: SplitProvider = context.split_provider
        self._leaf = context.leaf_numbers[id(node)]
        self._epochs = context.epochs
        self._wants_element_numbers = context.wants_element_numbers
        self._tracks_splits = context.tracks_splits
        steps_context = dataclasses.replace(
            context,
            split_provider=None,
            leaf_numbers={},
            wants_element_numbers=False,
            tracks_splits=False,
        )
        self._steps = make_iterator(node, steps_context)
        self._positions: AssignedPositions | None = None
        self._position = 0  # position of the next element in `_positions`
        self._steps_position = -1  # position of `_steps`; -1 if unknown

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._positions is None or self._position == self._positions.stop:
            taken = self._split_provider.take(self._leaf, self._epochs)
            if taken is None:
                return None
            self._positions, self._position = taken, taken.start
        positions, position = self._positions, self._position
        chunk = self._read(positions, position, min(limit, positions.stop - position))
        if chunk is None:
            raise FailedPreconditionError(
                f"positions {position} to {positions.stop} were assigned, but the plan has fewer; "
                "check that all readers have the same plan and data"
            )
        self._position = self._steps_position = position + chunk.size
        self._split_provider.mark_started(positions.num_started(self._position))
        if self._wants_element_numbers or self._tracks_splits:
            chunk = chunk.with_metadata(self._id_column(positions, position, chunk.size))
        return chunk.with_states(_position_states(positions, position))

    def _id_column(self, positions: AssignedPositions, position: int, count: int) -> MetadataColumn:
        """Return the metadata of `count` elements from `position` on."""
        if positions.positions_per_split == 1 and not self._wants_element_numbers:
            return ConsecutiveSplits(
                positions.num_assigned_before + position - positions.start, count
            )
        numbers = number_positions(position, count) if self._wants_element_numbers else None
        if self._tracks_splits:
            return split_column(positions.assignments_of(position, count), numbers)
        assert numbers is not None
        return numbers

    def _read(self, positions: AssignedPositions, position: int, limit: int) -> Chunk | None:
        """Return elements from `position` on; skip a failed element when its error is raised."""
        while True:
            if self._steps_position != position:
                self._steps.seek(position)
            try:
                return self._steps.next_chunk(limit)
            except Exception:
                self._steps_position = -1  # unknown
                if limit > 1:  # read one by one to find the element that failed
                    limit = 1
                    continue
                self._position = position + 1
                self._split_provider.mark_started(positions.num_started(self._position))
                raise

    def get_state(self) -> State:
        if self._positions is None:
            return {"assigned": self._split_provider.num_assigned, "position": 0}
        return _state(self._positions, self._position)

    def close(self) -> None:
        self._steps.close()


class _AssignmentFollower(NotRestorableIterator):
    """Base class of steps that read the input containing the next assigned splits."""

    _state_key: str
    """Key of `_number` in a state; the same as in states of the step without assigned splits."""

    def __init__(self, context: Context, split_provider: SplitProvider) -> None:
        self._context = context
        self._split_provider = split_provider
        self._input: ElementIterator | None = None
        self._number = 0  # epoch or index of the input that `_input` reads

    @abstractmethod
    def _select_input(self, leaf: int, epochs: tuple[int, ...]) -> tuple[int, Node, Context] | None:
        """Return the number, plan and context of the input that has the splits of a leaf.

        None if the splits belong to another step.
        """

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            if self._input is None:
                upcoming = self._split_provider.peek()
                selected = None if upcoming is None else self._select_input(*upcoming)
                if selected is None:
                    return None
                self._number, plan, context = selected
                self._input = make_iterator(plan, context)
            chunk = self._input.next_chunk(limit)
            number = self._number
            if chunk is not None:
                return tag_part(
                    self._state_key,
                    number,
                    chunk,
                    above_boundary=self._context.is_whole_pipeline,
                )
            self._input.close()
            self._input = None
            self._skip_rest(number)

    def _skip_rest(self, number: int) -> None:
        """Discard splits of an input that has ended because a step above the leaf stopped early."""
        while (upcoming := self._split_provider.peek()) is not None:
            selected = self._select_input(*upcoming)
            if selected is None or selected[0] != number:
                return
            self._split_provider.take(*upcoming)

    def get_state(self) -> State:
        if self._input is None:
            return {"assigned": self._split_provider.num_assigned, "position": 0}
        return {self._state_key: self._number, "input": self._input.get_state()}

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = None


class AssignedRepeatIterator(_AssignmentFollower):
    """Reads its input in the epoch of the next assigned splits."""

    _state_key = "epoch"

    def __init__(self, node: Repeat, context: Context, split_provider: SplitProvider) -> None:
        super().__init__(context, split_provider)
        self._plan = node.input
        self._leaf_numbers = find_leaf_numbers(node.input, context)

    def _select_input(self, leaf: int, epochs: tuple[int, ...]) -> tuple[int, Node, Context] | None:
        depth = len(self._context.epochs)
        if leaf not in self._leaf_numbers or epochs[:depth] != self._context.epochs:
            return None
        return epochs[depth], self._plan, self._context.in_epoch(epochs[depth])


class AssignedConcatenateIterator(_AssignmentFollower):
    """Reads the input that contains the next assigned splits."""

    _state_key = "current"

    def __init__(self, inputs: list[Node], context: Context, split_provider: SplitProvider) -> None:
        super().__init__(context, split_provider)
        self._inputs = inputs
        self._input_of_leaf = {
            leaf: number
            for number, input_ in enumerate(inputs)
            for leaf in find_leaf_numbers(input_, context)
        }

    def _select_input(self, leaf: int, epochs: tuple[int, ...]) -> tuple[int, Node, Context] | None:
        number = self._input_of_leaf.get(leaf)
        if number is None or epochs[: len(self._context.epochs)] != self._context.epochs:
            return None
        return number, self._inputs[number], self._context


class AssignedPlanIterator(NotRestorableIterator):
    """Base class of iterators over a whole plan with assigned splits."""

    @property
    @abstractmethod
    def num_started(self) -> int:
        """Number of splits, in assignment order, that leaves have started to read.

        No element of later splits was yielded. Elements of these splits may still be read ahead or
        held by a step.
        """

    num_delivered: int = 0
    """Number of splits, in assignment order, yielded completely before the last pause or end."""

    @abstractmethod
    def take_finished(self) -> tuple[FinishedSplits, ...]:
        """Return the splits that finished since the last call, with their numbers of elements.

        Elements are counted at the partition boundary. Steps above it may still hold some or have
        dropped them. Splits without elements are included. The result is empty unless splits are
        tracked. Thread safe.
        """


class MultiSplitIterator(AssignedPlanIterator):
    """A plan whose leaves read assigned splits.

    Before a pause the steps run to their ends, so that none of them holds elements. Splits assigned
    after the pause go through newly opened steps.

    Args:
        open_steps: Makes the plan's iterator.
        split_provider: Source of the splits that its leaves read.
    """

    def __init__(
        self, open_steps: Callable[[], ElementIterator], split_provider: PositionSplitProvider
    ) -> None:
        self._open_steps = open_steps
        self._steps = open_steps()
        self._split_provider = split_provider

    @property
    def num_started(self) -> int:
        return self._split_provider.num_started

    def take_finished(self) -> tuple[FinishedSplits, ...]:
        return (
            ()
            if self._split_provider.progress is None
            else self._split_provider.progress.take_finished()
        )

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            chunk = self._steps.next_chunk(limit)
            if chunk is not None:
                return chunk
            self.num_delivered = self._split_provider.num_assigned
            if not self._split_provider.is_paused:
                return None
            self._steps.close()
            self._split_provider.resume()
            self._steps = self._open_steps()

    def get_state(self) -> State:
        return self._steps.get_state()

    def close(self) -> None:
        self._steps.close()


def count_finished_splits(state: State) -> int | None:
    """Return the number of complete splits, in assignment order, in a state of an assigned plan.

    Hints are ignored, because a source's position in one may have any form.

    Returns:
        The number, or None if the state does not contain one.
    """
    if type(state) is dict and "assigned" in state:
        num_finished: int = state["assigned"]
        return num_finished
    found: list[int] = []
    pending: list[Any] = [state]
    for value in pending:  # `pending` grows in the loop
        if type(value) is dict:
            if "assigned" in value:
                found.append(value["assigned"])
            else:
                parts = value.items()
                pending += [
                    part for name, part in parts if type(part) in _NESTED and name != "hint"
                ]
        elif type(value) is list:
            pending += [part for part in value if type(part) in _NESTED]
    return min(found, default=None)


_NESTED = frozenset({dict, list})


def _position_states(positions: AssignedPositions, start: int) -> States:
    return lambda index: _state(positions, start + index)


def _state(positions: AssignedPositions, position: int) -> State:
    finished, started = positions.num_finished(position), positions.num_started(position)
    state = {"assigned": finished, "position": position}
    return state if finished == started else {**state, "started": started}


def find_leaf_numbers(plan: Node, context: Context) -> frozenset[int]:
    """Return the numbers of the leaves in a part of the plan."""
    return frozenset(
        context.leaf_numbers[id(node)]
        for node in distinct_nodes([plan])
        if id(node) in context.leaf_numbers
    )


# --- Started splits in the states of assigned plans -----------------------------------------------
#
# Each leaf of an assigned plan has `{"assigned": n}` in its state: the leaf has returned splits 0
# to n - 1, in assignment order (`count_finished_splits`). In the middle of a split, a leaf also has
# `"started"`, which is one more.
#
# A step that reads its input in order and stores its position in it has an entry in
# `_SEQUENTIAL_STATES`.


def count_started_splits(state: State) -> int | None:
    """Return the number of splits that yielded elements before `state`.

    Only defined if all steps read their inputs in order: the number of complete splits, plus one in
    the middle of a split.

    Returns:
        The number, or None if a step holds elements or has several splits open at once.
    """
    is_within = False
    while isinstance(state, dict):
        if "assigned" in state:
            return max(int(state.get("started", 0)), int(state["assigned"]) + is_within)
        input_key = _SEQUENTIAL_STATES.get(frozenset(state))
        if input_key is None:
            return None
        is_within = is_within or bool(state.get("ordinal") or state.get("offset"))
        state = state[input_key]
    return None


_SEQUENTIAL_STATES: dict[frozenset[str], str] = {
    frozenset({"index", "ordinal"}): "index",
    frozenset({"index", "ordinal", "hint"}): "index",
    frozenset({"offset", "input"}): "input",
    frozenset({"epoch", "input"}): "input",
    frozenset({"current", "input"}): "input",
    frozenset({"count", "input"}): "input",
    frozenset({"ignored", "input"}): "input",
}
"""Keys in the states of sequential steps, and the key of the input's state."""


def find_failed_split(state: State) -> int:
    """Return the split, in assignment order, of the element that failed just before `state`.

    Valid only if splits are read one after the other.

    Returns:
        The number of the split, or -1 if the state does not contain it.
    """
    finished = count_finished_splits(state)
    if finished is None:
        return -1
    return finished if is_within_split(state) else finished - 1


def is_within_split(state: State) -> bool:
    """Return whether a state is in the middle of a split, if splits are read sequentially."""
    if isinstance(state, list):
        return any(is_within_split(each) for each in state)
    if not isinstance(state, dict):
        return False
    is_within = any(state.get(name) for name in ("ordinal", "offset", "failed", "started"))
    if is_within or any(slot is not None for slot in state.get("slots", ())):
        return True
    return any(is_within_split(part) for name, part in state.items() if name != "hint")
