"""The iterators of the client's half over units: one after the other, or several in turn.

Their states are those of one process, but for the place within a unit: `{"ordinal": n}`, and how
many errors of the unit were raised, if any were (`"failed"`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.places import named, numbers_in
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.execution.context import Context
from headrace.execution.inner import Inner, Opened
from headrace.execution.interleave import InterleaveIterator
from headrace.execution.iterator import MOST_FAILURES, ElementIterator, State, make_iterator
from headrace.execution.pace import Pace
from headrace.execution.places import Places
from headrace.execution.stage import chosen_states
from headrace.execution.unit_source import GivesWholeUnits, UnitReader, UnitSource
from headrace.plan.source import INFINITE
from headrace.plan.units import Units

__all__ = ["UnitsInTurnIterator", "UnitsIterator"]

_AT_ONCE = 1024
_WITHIN_A_UNIT = (
    "the state was saved by one process in the middle of what a worker reads as one unit (a file, "
    "what a flat_map or an interleave opens), of which it does not say how many elements came; "
    "restore it in one process, or one that was saved over the service"
)
_LEFT_OUT = -1
"""The unit of what stands in place of an element that a filter left out."""


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


class _OneUnit(ElementIterator):
    """The elements of one unit, read from a source.

    Args:
        source: The source.
        unit: The number of the unit.
        fills: Whether what filters left out has something in its place, so that it counts.
        has_places: Whether the elements have places.
    """

    def __init__(
        self, source: UnitSource, unit: int, *, fills: bool = False, has_places: bool = False
    ) -> None:
        self._source = source
        self._unit = unit
        self._fills = fills
        self._has_places = has_places
        self._reader: UnitReader | None = None
        self._ordinal = 0  # of the next element
        self._failed = 0
        self._held: Chunk | None = None  # read, and not given yet
        self._has_ended = False
        self._is_there = True

    def next_chunk(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            if not self._is_there:
                self._go_there()
            chunk, self._held = self._held, None
            if chunk is None:
                chunk = self._read(limit)
            if chunk is None:
                return self._left_at_end(limit)
            first = self._ordinal
            if self._fills:
                chunk = _filled(chunk, first)
            if chunk.size > limit:
                self._held = chunk.slice(limit, chunk.size)
                chunk = chunk.slice(0, limit)
            assert chunk.places is not None
            ordinals = chunk.places["ordinal"]
            self._ordinal = int(ordinals[-1]) + 1
            return chunk.with_states(self._states(first, ordinals))
        return None

    def _read(self, limit: int) -> Chunk | None:
        if self._reader is None:
            self._reader = self._source.open(self._unit, self._ordinal)
        try:
            return self._reader.next_chunk(limit)
        except Exception:
            self._failed += 1
            raise

    def _left_at_end(self, limit: int) -> Chunk | None:
        """Return what stands for elements that were left out at the end of the unit."""
        assert self._reader is not None
        missing = self._reader.elements - self._ordinal
        if not self._fills or missing <= 0:
            self._has_ended = True
            return None
        first, count = self._ordinal, min(missing, limit)
        self._ordinal += count
        places = named(_LEFT_OUT, np.arange(first, self._ordinal), self._no_places(count))
        states = self._states(first, places["ordinal"])
        return Chunk.of_rows([None] * count, states, places)

    def _no_places(self, count: int) -> Places | None:
        return np.zeros(count, np.uint64) if self._has_places else None

    def _states(self, first: int, ordinals: Any) -> States:
        """Return the states before elements with these ordinals."""
        failed, size = self._failed, len(ordinals)

        def state_at(index: int) -> State:
            return _state(int(ordinals[index - 1]) + 1 if index else first, failed)

        assert size
        return state_at

    def _go_there(self) -> None:
        """Read up to the place that was set, where some elements before it had failed."""
        self._is_there = True
        ordinal, failed = self._ordinal, self._failed
        if not failed:
            return
        self._reader = self._source.open(self._unit, 0)
        seen = 0
        reached = 0
        while reached < ordinal or seen < failed:
            try:
                chunk = self._reader.next_chunk(min(ordinal - reached, _AT_ONCE) or 1)
            except Exception:
                seen += 1
                if seen > MOST_FAILURES + failed:
                    raise
                continue
            if chunk is None:
                if self._reader.elements >= ordinal:
                    return  # the rest of it was left out
                raise DataLossError(
                    f"unit {self._unit} has {self._reader.elements} elements, but {ordinal} were "
                    "read before the state was saved; restore it with the same data"
                )
            assert chunk.places is not None
            ordinals = chunk.places["ordinal"]
            past = int(np.searchsorted(ordinals, ordinal))
            reached = int(ordinals[-1]) + 1
            if past < chunk.size:  # left out before it, or what failed does not any more
                self._held = chunk.slice(past, chunk.size)
                return

    def get_state(self) -> State:
        return _state(self._ordinal, self._failed)

    def set_state(self, state: State) -> None:
        if not isinstance(state, dict) or "ordinal" not in state:
            raise FailedPreconditionError(_WITHIN_A_UNIT)
        self.close()
        self._ordinal, self._failed = state["ordinal"], state.get("failed", 0)
        self._has_ended = self._is_there = False

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._held = None
        self._has_ended = True


def _state(ordinal: int, failed: int) -> State:
    return {"ordinal": ordinal, "failed": failed} if failed else {"ordinal": ordinal}


def _filled(chunk: Chunk, first: int) -> Chunk:
    """Return elements with something in the place of those that were left out among them.

    Args:
        chunk: The elements.
        first: The ordinal after the one before them.
    """
    assert chunk.places is not None
    ordinals = chunk.places["ordinal"]
    count = int(ordinals[-1]) + 1 - first
    if count == chunk.size:
        return chunk
    at = ordinals - first
    places = np.empty(count, chunk.places.dtype)
    places["unit"] = _LEFT_OUT
    places["ordinal"] = np.arange(first, first + count)
    places[at] = chunk.places
    rows: list[Any] = [None] * count
    for index, row in zip(at.tolist(), chunk.rows(), strict=True):
        rows[index] = row
    return Chunk.of_rows(rows, None, places)


class UnitsIterator(ElementIterator):
    """Reads units one after the other."""

    def __init__(self, node: Units, context: Context) -> None:
        assert context.unit_source is not None
        self._source = context.unit_source
        self._node = node
        self._range = _Range(node, context)
        self._wants_places = context.wants_places
        self._index = 0  # of the unit
        self._input: _OneUnit | None = None

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

    def _open(self) -> _OneUnit:
        return _OneUnit(self._source, self._range.unit(self._index))

    def get_state(self) -> State:
        inner = {"ordinal": 0} if self._input is None else self._input.get_state()
        return {"unit": self._index, **inner}

    def set_state(self, state: State) -> None:
        self.close()
        if not isinstance(state, dict) or "unit" not in state:
            state = self._node.taken_over(state)
            if state is None:
                raise FailedPreconditionError(_WITHIN_A_UNIT)
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

    def __init__(self, node: Units, context: Context) -> None:
        assert context.unit_source is not None
        self._source = context.unit_source
        self._range = _Range(node, context)
        self._has_places = context.units_have_places
        self._pace_at_least = node.block_length
        self._next = 0

    def next(self) -> Opened:
        """Open the next unit."""
        index = self._next
        if not self._range.has(index):
            return Opened(_counting_from(index), index, is_end=True)
        self._next = index + 1
        return Opened(_counting_from(index), index, inner=self._open(index))

    def open_at(self, origin: State, number: int) -> Inner:
        """Open the unit that is number `origin` of the pass."""
        return self._open(origin)

    def _open(self, index: int) -> Inner:
        unit = self._range.unit(index)
        iterator = _OneUnit(self._source, unit, fills=True, has_places=self._has_places)
        return Inner(_counting_from(index), index, iterator, Pace(least=self._pace_at_least), _NONE)

    def place(self) -> tuple[States, int]:
        """Return the place of the next unit, and its number."""
        return _counting_from(self._next), self._next

    def set_state(self, state: State, number: int) -> None:
        """Go to a place."""
        if not isinstance(state, int):
            raise FailedPreconditionError(_WITHIN_A_UNIT)
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
            is_left_out = chunk.places["unit"] == _LEFT_OUT
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
