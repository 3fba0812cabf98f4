"""Iterators of the steps that join elements into batches, padded or not, and take batches apart."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.element.brief import Column
from headrace.element.chunk import Chunk, PlacesLater, States
from headrace.element.chunk import concatenate as concatenate_chunks
from headrace.element.places import grouped, joined
from headrace.element.stack import Stacked
from headrace.element.structure import Element, component, flatten
from headrace.element.transpose import map_leaves
from headrace.element.wire import frame_bytes
from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.dealt import is_within_unit, units_done
from headrace.execution.intake import Intake
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.places import within
from headrace.execution.stage import mask_of, runs_of
from headrace.plan.batching import Batch, PaddedBatch, Unbatch
from headrace.plan.node import Node
from headrace.plan.user_function import step_name

__all__ = [
    "BatchIterator",
    "PaddedBatchIterator",
    "UnbatchIterator",
]

_MOST_ELEMENTS = 1 << 16
_TOGETHER_BYTES = 1 << 16
"""Batches that are stacked before any of them is given: to hand on one costs as much as these."""


@make_iterator.register(Batch)
class BatchIterator(ElementIterator):
    """Stacks consecutive elements. A batch is fresh memory that its receiver owns.

    It holds nothing that its state would have to contain: the state is the place of the next
    batch's first element. From there on an error within that batch is met again, so the state also
    says which of the elements from that place on (by ordinal, as runs) have failed already; their
    errors are not raised once more.
    """

    _verb = "stack"

    def __init__(self, node: Batch | PaddedBatch, context: Context) -> None:
        self._node = node
        self._size = node.size
        self._intake = Intake(make_iterator(node.input, context))
        #: Whether a batch is made of one unit that is dealt, the last of which may be short.
        self._is_unit = context.dealer is not None and _is_above_leaf(node, context)
        self._begin(0)

    @property
    def reads_ahead_freely(self) -> bool:
        return self._intake.input.reads_ahead_freely

    def _begin(self, failed: int) -> None:
        self._parts: list[Chunk] = []  # of a batch that an error interrupted
        self._have = 0  # elements in them
        self._unit: int | None = None  # that the batch is made of, once an element of it failed
        self._lacks = 0  # elements of that unit which failed
        self._met = 0  # elements from the place on, with those that failed
        #: Bit i: number i from the place on has failed, and its error was raised.
        self._failed = failed

    def next_chunk(self, limit: int) -> Chunk | None:
        size = self._size
        if limit > 1 and not self._have and not self._failed and self._unit is None:
            whole = self._several(limit)
            if whole is not None:
                return whole
        while self._have < size:
            if self._is_unit and self._is_unit_over():
                break
            try:
                # Where a unit lacks some, no elements of the next are taken in their place.
                part = self._intake.take(max(1, size - self._have - self._lacks))
            except Exception:
                if self._is_known_failure():
                    continue
                raise
            if part is None:
                break
            self._parts.append(part)
            self._have += part.size
            self._met += part.size
        parts, have, failed, met = self._parts, self._have, self._failed, self._met
        is_short = have + self._lacks < size
        self._begin(failed >> met)
        if not have or (self._node.drop_remainder and is_short):
            return None
        try:
            batch = self._joined(parts)
        except InvalidElementError as error:
            raise InvalidElementError(
                f"{step_name(self._node)} cannot {self._verb}: {error}"
            ) from error
        first, last, end, left = parts[0].states, parts[-1].states, parts[-1].size, self._failed
        if failed >> (met - 1) & 1:  # the input ended with one that failed
            after = self._intake.get_state()
            last = lambda index: after  # noqa: E731 - a name would cost a line

        def states(index: int) -> State:
            return _state(left, last(end)) if index else _state(failed, first(0))

        return Chunk.of_rows([batch], states).with_places(_places_of(parts))

    def _joined(self, parts: Sequence[Chunk]) -> Stacked:
        """Return the elements of a batch as one, in fresh memory."""
        if len(parts) > 1:
            parts = [part.with_places(None) for part in parts]  # their places are not needed here
        return concatenate_chunks(parts).columns()

    def _takes_columns(self, columns: Stacked) -> bool:
        """Say whether a batch of rows that are columns already is a piece of those."""
        return True

    def _is_known_failure(self) -> bool:
        """Count an error of the input; say whether it was raised before the state was saved."""
        is_known = bool(self._failed >> self._met & 1)
        if self._is_unit:
            self._lack_one()
        self._failed |= 1 << self._met
        self._met += 1
        if not self._have:  # the place is after it
            self._failed, self._met = self._failed >> self._met, 0
        return is_known

    def _lack_one(self) -> None:
        """Take note that an element of the unit failed of which the batch is made."""
        if not self._have:
            place = self._intake.get_state()
            if not is_within_unit(place):  # it was the last, and the batch is made of the next
                self._unit, self._lacks = None, 0
                return
            self._unit = units_done(place)
        self._lacks += 1

    def _several(self, limit: int) -> Chunk | None:
        """Return several whole batches at once, where as many elements are at hand.

        A block of columns only gets another shape. Of rows, batches are made one by one.
        """
        size = self._size
        if limit * size > _MOST_ELEMENTS:
            limit = max(1, _MOST_ELEMENTS // size)
        try:
            chunk = self._intake.look(limit * size)
        except Exception:
            if self._is_unit:
                self._lack_one()
            raise
        whole = min(self._intake.in_hand // size, limit)
        if chunk is None or not whole:
            return None
        if not chunk.is_columnar:
            batches = self._stacked(chunk, whole)
            return None if not batches else self._taken(len(batches), Chunk.of_rows(batches))
        if not self._takes_columns(chunk.columns()):
            return None
        start, stop = self._intake.offset, self._intake.offset + whole * size
        shaped = map_leaves(
            lambda leaf: leaf.reshape(whole, size, *leaf.shape[1:]),
            chunk.slice(start, stop).columns(),
        )
        return self._taken(whole, Chunk.of_columns(shaped, whole))

    def _stacked(self, chunk: Chunk, whole: int) -> list[Element]:
        """Return so many batches of the rows in hand, or some of them: together they are small."""
        batches: list[Element] = []
        size, start = self._size, self._intake.offset
        most_bytes = _TOGETHER_BYTES
        while len(batches) < whole and most_bytes > 0:
            try:
                batches.append(self._joined([chunk.slice(start, start + size)]))
            except Exception:
                break  # raised when those before it were given
            start += size
            most_bytes -= frame_bytes(Chunk.of_rows(batches[-1:]))
        return batches

    def _taken(self, whole: int, batches: Chunk) -> Chunk:
        """Take the elements of so many batches, and return these as what is made of them."""
        size = self._size
        taken = self._intake.take(whole * size)
        assert taken is not None
        states = taken.states
        places = None if taken.places is None else grouped(taken.places, size)
        return batches.with_places(places).with_states(
            lambda index: _state(0, states(index * size))
        )

    def _is_unit_over(self) -> bool:
        """Whether nothing is left of the unit that the batch begins with."""
        if self._unit is None:
            if not self._have:
                return False
            self._unit = units_done(self._parts[0].state_at(0))
        return units_done(self._intake.get_state()) != self._unit

    def get_state(self) -> State:
        place = self._parts[0].state_at(0) if self._parts else self._intake.get_state()
        return _state(self._failed, place)

    def set_state(self, state: State) -> None:
        self._begin(mask_of(state["failed"]))
        self._intake.set_state(state["input"])

    def seek(self, position: int) -> None:
        self._begin(0)
        self._intake.seek(position * self._size)

    def close(self) -> None:
        self._begin(0)
        self._intake.close()


def _places_of(parts: Sequence[Chunk]) -> PlacesLater | None:
    """Return what makes the place of a batch: that of its first element, and the origins of all.

    Where batches are small, those of several are made together.
    """
    later = [each for part in parts if (each := part.places_later) is not None]
    if not later:
        return None

    @functools.cache
    def make() -> Column:
        columns = [column_of_part() for column_of_part in later]
        arrays = [each if isinstance(each, np.ndarray) else each.made() for each in columns]
        return grouped(joined(arrays), sum(map(len, arrays)))

    return make


def _state(failed: int, place: State) -> State:
    return {"failed": runs_of(failed), "input": place}


def _is_above_leaf(node: Node, context: Context) -> bool:
    """Say whether batches are units: all steps between the batch and a leaf keep those whole."""
    while id(node) not in context.leaves:
        if node.unit_below(1) is None or not node.inputs:
            return False
        (node,) = node.inputs
    return True


@make_iterator.register(Unbatch)
class UnbatchIterator(ElementIterator):
    """Yields the rows of its input's elements; the state says how many of one were yielded."""

    def __init__(self, node: Unbatch, context: Context) -> None:
        self._node = node
        self._intake = Intake(make_iterator(node.input, context))
        self._begin(0)

    @property
    def reads_ahead_freely(self) -> bool:
        return self._intake.input.reads_ahead_freely

    @property
    def at_hand(self) -> int:
        return _MOST_ELEMENTS  # a chunk ends with the element whose rows it has

    def _begin(self, offset: int) -> None:
        self._rows: Chunk | None = None  # of the element in hand
        self._states: States | None = None  # before and after that element
        self._offset = offset  # rows of it, or of the next one, that were passed

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._rows is None or self._offset >= self._rows.size:
            # Only of an element that a state names were rows passed before it is read.
            passed = 0 if self._rows is not None else self._offset
            self._begin(0)  # where an error is raised, the place is before the next element
            outer = self._intake.take(1)
            if outer is None:
                return None
            (element,) = outer.rows()
            count = self._count(element)
            places = outer.places
            if places is not None:
                places = within(places, np.arange(count, dtype=np.uint64))
            self._rows = Chunk.of_columns(element, count, None, places)
            self._states, self._offset = outer.states, passed
        start = self._offset
        self._offset = min(start + limit, self._rows.size)
        assert self._states is not None
        rows = self._rows.slice(start, self._offset)
        return rows.with_states(_row_states(self._states, start, self._rows.size))

    def _count(self, element: Element) -> int:
        """Return the number of rows, which all components must have alike."""
        leaves, structure = flatten(element)
        lengths = {
            path: len(leaf) if getattr(leaf, "ndim", 0) else None
            for path, leaf in zip(structure.paths, leaves, strict=True)
        }
        if None in lengths.values() or len(set(lengths.values())) != 1:
            found = ", ".join(
                f"{component(path)} has {'no axis' if length is None else f'{length} rows'}"
                for path, length in lengths.items()
            )
            raise InvalidElementError(
                f"{step_name(self._node)} takes elements apart along their first axis, which all "
                f"components must have alike; {found or 'this element has no components'}"
            )
        return next(iter(lengths.values())) or 0

    def get_state(self) -> State:
        if self._rows is None:
            return {"offset": self._offset, "input": self._intake.get_state()}
        assert self._states is not None
        return _row_states(self._states, self._offset, self._rows.size)(0)

    def set_state(self, state: State) -> None:
        self._begin(state["offset"])
        self._intake.set_state(state["input"])

    def close(self) -> None:
        self._begin(0)
        self._intake.close()


def _row_states(states: States, start: int, size: int) -> States:
    """Return the states of rows `start` and following of an element with `size` rows.

    Args:
        states: Those before and after the element.
        start: The row.
        size: How many the element has.
    """

    def state_at(index: int) -> State:
        offset = start + index
        if offset < size:
            return {"offset": offset, "input": states(0)}
        return {"offset": 0, "input": states(1)}

    return state_at


# --- `padded_batch`: a batch like any other, but for how its elements are joined ------------------


@make_iterator.register(PaddedBatch)
class PaddedBatchIterator(BatchIterator):
    """Stacks consecutive elements, each component padded to one shape."""

    _verb = "pad"

    def __init__(self, node: PaddedBatch, context: Context) -> None:
        super().__init__(node, context)
        self._padding = node.padding

    def _joined(self, parts: Sequence[Chunk]) -> Stacked:
        if all(part.is_columnar for part in parts):
            return self._padding.join([part.columns() for part in parts])
        rows: list[Any] = []
        for part in parts:
            rows.extend(part.rows())
        return self._padding.stack(rows)

    def _takes_columns(self, columns: Stacked) -> bool:
        try:
            return self._padding.leaves_as_it_is(columns)
        except InvalidElementError:
            return False  # raised, with its step, when the batch is made
