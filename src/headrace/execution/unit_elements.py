"""The elements of one unit, as the client's half reads them, with the places that a state saves."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.places import named
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.execution.context import UnitReader, UnitSource
from headrace.execution.iterator import MOST_FAILURES, ElementIterator, State
from headrace.execution.origins import ErrorOrigin, Failed, origin_of_error
from headrace.execution.places import Places

__all__ = ["LEFT_OUT", "WITHIN_A_UNIT", "UnitElements"]

_AT_ONCE = 1024
WITHIN_A_UNIT = (
    "the state was saved by one process in the middle of what a worker reads as one unit (a file, "
    "what a flat_map or an interleave opens), of which it does not say how many elements came; "
    "restore it in one process, or one that was saved over the service"
)
LEFT_OUT = -1
"""The unit of what stands in place of an element that a filter left out."""


class UnitElements(ElementIterator):
    """The elements of one unit, read from a source.

    Args:
        source: The source.
        unit: The number of the unit.
        fills: Whether what filters left out has something in its place, so that it counts.
        has_places: Whether the elements have places.
        holds_failures: Whether an element that failed has its error in its place (`Failed`).
    """

    def __init__(
        self,
        source: UnitSource,
        unit: int,
        *,
        fills: bool = False,
        has_places: bool = False,
        holds_failures: bool = False,
    ) -> None:
        self._source = source
        self._unit = unit
        self._fills = fills
        self._has_places = has_places
        self._holds_failures = holds_failures
        self._reader: UnitReader | None = None
        self._ordinal = 0  # of the next element
        self._failed = 0
        self._held: Chunk | None = None  # read, and not given yet
        self._error: Exception | None = None  # met, and not raised yet
        self._has_ended = False
        self._is_there = True

    def next_chunk(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            if not self._is_there:
                self._go_there()
            chunk, self._held = self._held, None
            if chunk is None and self._error is None:
                chunk = self._read(limit)
            if self._error is not None:
                return self._left_out_before_error(self._error, limit)
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
        while True:
            try:
                return self._reader.next_chunk(limit)
            except Exception as error:
                origin = origin_of_error(error)
                if origin is not None and self._is_held(origin) and origin.element < self._ordinal:
                    continue  # its element lies before the place that was gone to
                self._error = error
                return None

    def failure_to_open(self) -> Exception | None:
        """Return the error that is all there is of the unit, if so; something is in hand then.

        What an interleave was to open a dataset for has failed: no slot is taken.
        """
        self._held = self._read(1)
        error = self._error
        origin = None if error is None else origin_of_error(error)
        if origin is None or not origin.stands_for_all:
            return None
        assert self._reader is not None
        self._reader.next_chunk(1)  # its end
        return error

    def _left_out_before_error(self, error: Exception, limit: int) -> Chunk:
        """Return what stands for elements that were left out before an error, or raise that.

        If errors are held in the places of elements, return one that is of an element.
        """
        origin = origin_of_error(error)
        before = None if origin is None else self._left_out_before(origin.element, limit)
        if before is not None:
            return before
        self._error = None
        if origin is not None and self._is_held(origin):
            first, self._ordinal = self._ordinal, origin.ordinal
            places = named(origin.unit, np.array([origin.element]), self._no_places(1))
            return Chunk.of_rows([Failed(error)], self._states(first, places["ordinal"]), places)
        self._failed += 1
        raise error

    def _is_held(self, origin: ErrorOrigin) -> bool:
        return self._holds_failures and origin.number == 0

    def _left_at_end(self, limit: int) -> Chunk | None:
        """Return what stands for elements that were left out at the end of the unit."""
        assert self._reader is not None
        left_out = self._left_out_before(self._reader.elements, limit)
        self._has_ended = left_out is None
        return left_out

    def _left_out_before(self, ordinal: int, limit: int) -> Chunk | None:
        """Return what stands for elements that were left out before this one; None: nothing."""
        missing = ordinal - self._ordinal
        if not self._fills or missing <= 0:
            return None
        first, count = self._ordinal, min(missing, limit)
        self._ordinal += count
        places = named(LEFT_OUT, np.arange(first, self._ordinal), self._no_places(count))
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
            except Exception as error:
                origin = origin_of_error(error)
                is_held = origin is not None and self._is_held(origin)
                # Where several in a row fail, those after the place were not raised yet.
                if origin is not None and origin.element >= ordinal and (is_held or seen == failed):
                    self._error = error
                    return
                if origin is not None and is_held:
                    reached = origin.ordinal
                    continue
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
        # That of a source in one process, say, counts what it read, and has an index besides.
        if not isinstance(state, dict) or not {"ordinal"} <= state.keys() <= _KEYS:
            raise FailedPreconditionError(WITHIN_A_UNIT)
        self.close()
        self._ordinal, self._failed = state["ordinal"], state.get("failed", 0)
        self._has_ended = self._is_there = False

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._held = self._error = None
        self._has_ended = True


_KEYS = {"unit", "ordinal", "failed"}


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
    places["unit"] = LEFT_OUT
    places["ordinal"] = np.arange(first, first + count)
    places[at] = chunk.places
    rows: list[Any] = [None] * count
    for index, row in zip(at.tolist(), chunk.rows(), strict=True):
        rows[index] = row
    return Chunk.of_rows(rows, None, places)
