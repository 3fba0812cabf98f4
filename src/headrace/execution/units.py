"""The iterators of the client's half over units: one after the other, or several in turn.

Their states are those of one process, but for the place within a unit: `{"ordinal": n}`, and how
many errors of the unit were raised, if any were (`"failed"`).
"""

from __future__ import annotations

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.places import numbers_in
from headrace.errors import FailedPreconditionError
from headrace.execution.context import Context, GivesWholeUnits
from headrace.execution.inner import Inner, Opened
from headrace.execution.intake import Pace
from headrace.execution.interleave import InterleaveIterator
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.stage import chosen_states
from headrace.execution.unit_elements import LEFT_OUT, WITHIN_A_UNIT, UnitElements
from headrace.plan.source import INFINITE
from headrace.plan.units import Units

__all__ = ["UnitsInTurnIterator", "UnitsIterator"]


@make_iterator.register(Units)
def _make_units(node: Units, context: Context) -> ElementIterator:
    assert context.unit_source is not None
    if node.cycle_length > 1:
        return UnitsInTurnIterator(node, context)
    return UnitsIterator(node, context)


class _Range:
    """Which units a step has, in one pass."""

    def __init__(self, node: Units, context: Context) -> None:
        self.size = node.size
        self._node = node
        self._passes = context.passes[len(context.passes) - len(node.strides) :]

    def has(self, index: int) -> bool:
        """Whether there is a unit with this number."""
        return self.size == INFINITE or index < self.size

    def unit(self, index: int) -> int:
        """Return the number of a unit in the stream of the plan."""
        return self._node.unit_at(self._passes, index)


class UnitsIterator(ElementIterator):
    """Reads units one after the other."""

    def __init__(self, node: Units, context: Context) -> None:
        assert context.unit_source is not None
        self._source = context.unit_source
        self._node = node
        self._range = _Range(node, context)
        self._wants_places = context.wants_places
        self._has_places = context.units_have_places
        self._index = 0  # of the unit
        self._input: UnitElements | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._range.has(self._index):
            if self._input is None:
                many = self._whole_units(limit)
                if many is not None:
                    return many
                self._input = self._open()
            chunk = self._input.next_chunk(limit)
            if chunk is not None:
                return _plain(chunk, self._wants_places).with_states(
                    _in_unit(self._index, chunk.states)
                )
            self._input.close()
            self._input = None
            self._index += 1
        return None

    def _whole_units(self, limit: int) -> Chunk | None:
        """Return the elements of many units, where they are at hand."""
        if not isinstance(self._source, GivesWholeUnits) or self._wants_places:
            return None
        first = self._index
        most = limit if self._range.size == INFINITE else min(limit, self._range.size - first)
        given = self._source.whole(self._range.unit(first), most, limit)
        if given is None:
            return None
        chunk, units = given
        self._index += units
        each = chunk.size // units
        return chunk.with_states(
            lambda index: {"unit": first + index // each, "ordinal": index % each}
        )

    def _open(self) -> UnitElements:
        return UnitElements(
            self._source,
            self._range.unit(self._index),
            has_places=self._has_places,
            holds_failures=self._node.holds_failures,
        )

    def get_state(self) -> State:
        inner = {"ordinal": 0} if self._input is None else self._input.get_state()
        return {"unit": self._index, **inner}

    def set_state(self, state: State) -> None:
        self.close()
        if not isinstance(state, dict) or "unit" not in state:
            state = self._node.taken_over(state)
            if state is None:
                raise FailedPreconditionError(WITHIN_A_UNIT)
        self._index = state["unit"]
        if self._range.has(self._index):
            self._input = self._open()
            self._input.set_state(state)

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = None


def _in_unit(index: int, states: States) -> States:
    return lambda at: {"unit": index, **states(at)}


def _plain(chunk: Chunk, wants_places: bool) -> Chunk:
    """Return elements with places as numbers, or without."""
    numbers = None if not wants_places or chunk.places is None else numbers_in(chunk.places)
    return chunk.with_places(None if numbers is None else np.ascontiguousarray(numbers))


class _OuterUnits:
    """Units in place of the outer elements of an interleave, each the dataset that it opens.

    Args:
        node: The step.
        context: That of the step.
    """

    meets_others = False

    def __init__(self, node: Units, context: Context) -> None:
        assert context.unit_source is not None
        self._source = context.unit_source
        self._range = _Range(node, context)
        self._has_places = context.units_have_places
        self._pace_at_least = node.block_length
        self._holds_failures = node.holds_failures
        self._next = 0

    def next(self) -> Opened:
        """Open the next unit."""
        index = self._next
        if not self._range.has(index):
            return Opened(_counting_from(index), index, is_end=True)
        self._next = index + 1
        unit = self._unit(index)
        error = unit.failure_to_open()
        if error is not None:
            unit.close()
            return Opened(_counting_from(index), index, error=error)
        return Opened(_counting_from(index), index, inner=self._inner(index, unit))

    def open_at(self, origin: State, number: int) -> Inner:
        """Open the unit that is number `origin` of the pass.

        Raises:
            FailedPreconditionError: It is a place of one process, in other terms.
        """
        if not isinstance(origin, int):
            raise FailedPreconditionError(WITHIN_A_UNIT)
        return self._inner(origin, self._unit(origin))

    def _unit(self, index: int) -> UnitElements:
        unit = self._range.unit(index)
        return UnitElements(
            self._source,
            unit,
            fills=True,
            has_places=self._has_places,
            holds_failures=self._holds_failures,
        )

    def _inner(self, index: int, unit: UnitElements) -> Inner:
        return Inner(_counting_from(index), index, unit, Pace(least=self._pace_at_least), _NONE)

    def place(self) -> tuple[States, int]:
        """Return the place of the next unit, and its number."""
        return _counting_from(self._next), self._next

    def set_state(self, state: State, number: int) -> None:
        """Go to a place."""
        if not isinstance(state, int):
            raise FailedPreconditionError(WITHIN_A_UNIT)
        self._next = state

    def close(self) -> None:
        """Nothing is open here."""


_NONE = np.zeros(1, np.uint64)


def _counting_from(index: int) -> States:
    return index.__add__


class UnitsInTurnIterator(ElementIterator):
    """Reads several units in turn, as an interleave reads the datasets that it opens."""

    def __init__(self, node: Units, context: Context) -> None:
        self._turns = InterleaveIterator(node, context, _OuterUnits(node, context))
        self._wants_places = context.wants_places

    def next_chunk(self, limit: int) -> Chunk | None:
        while (chunk := self._turns.next_chunk(limit)) is not None:
            assert chunk.places is not None
            is_left_out = chunk.places["unit"] == LEFT_OUT
            if is_left_out.any():
                kept = np.flatnonzero(~is_left_out)
                if not len(kept):
                    continue
                states = chosen_states(chunk.states, kept.tolist(), chunk.size)
                chunk = chunk.take(kept).with_states(states)
            return _plain(chunk, self._wants_places)
        return None

    def get_state(self) -> State:
        return self._turns.get_state()

    def set_state(self, state: State) -> None:
        self._turns.set_state(state)

    def close(self) -> None:
        self._turns.close()
