"""The iterator of a root: it names elements by their origins, and reads units in part.

Whole units are read in one go, one after the other. A unit in part is read alone, from its start,
by an iterator of its own; the root passes over what is not wanted, and stops when no more is.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from headrace.element.brief import Column
from headrace.element.chunk import Chunk
from headrace.execution.begun import failed_unit, is_within_unit
from headrace.execution.context import Context
from headrace.execution.dealer import DealtPositions, OnePart, UnitPart, WholeUnits
from headrace.execution.dealt import Dealt, leaves_in, units_done
from headrace.execution.error_origins import ErrorOrigin, give_origin
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.ledger import Ledger
from headrace.execution.part import Part
from headrace.plan.units import Root

__all__ = ["RootIterator"]


@make_iterator.register(Root)
class RootIterator(Dealt):
    """Gives the elements of its input, each with the unit and the ordinal that it has there."""

    def __init__(self, node: Root, context: Context) -> None:
        dealer = context.dealer
        assert isinstance(dealer, DealtPositions)
        assert dealer.ledger is not None
        self._node = node
        self._context = context
        self._dealer = dealer
        self._ledger: Ledger = dealer.ledger
        self._leaves = leaves_in(node.input, context)
        self._has_ended = False
        self._newest = -1  # unit, as they were dealt, of which something came
        self._failed = ErrorOrigin(-1, 0, 0)  # the last error
        self._part: Part | None = None  # that is read
        self._part_dealt = 0  # the number of its unit
        self._input = self._whole()

    def _whole(self) -> ElementIterator:
        context = dataclasses.replace(self._context, dealer=WholeUnits(self._dealer))
        return make_iterator(self._node.input, context)

    @property
    def reads_ahead_freely(self) -> bool:
        return self._input.reads_ahead_freely

    @property
    def at_hand(self) -> int:
        return self._input.at_hand

    def next_chunk(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            try:
                chunk = self._input.next_chunk(limit)
            except Exception as error:
                self._count_error(error)
                if self._part is None or not self._part.is_known_failure(self._part_count()):
                    raise
                continue
            if chunk is None:
                self._turn_page()
                continue
            made = self._named(chunk)
            if made is not None:
                return made
        return None

    def _count_error(self, error: Exception) -> None:
        """Let an error carry where it stands. Where several units are open, nobody knows that."""
        state = self._input.get_state()
        dealt = failed_unit(state)
        place = self._ledger.stands_at(dealt) if dealt >= 0 else None
        if place is not None:
            number = self._failed.number + 1 if self._failed[:2] == place else 1
            is_last = not is_within_unit(state)
            self._failed = ErrorOrigin(*place, number, is_last=is_last)
            give_origin(error, self._failed)

    def _part_count(self) -> int:
        return self._ledger.counted(self._part_dealt)

    def _turn_page(self) -> None:
        """Go on after the end of the input: to a unit in part, or to whole units after one."""
        self._ledger.end(self._leaves, self._dealer.dealt)  # nothing is held any more
        was_part, self._part = self._part is not None, None
        found = self._dealer.take_part(self._leaves, self._context.passes)
        if found is None and not was_part:
            self._has_ended = True
            return
        self._input.close()
        if found is None:
            self._input = self._whole()
        else:
            self._open_part(*found)

    def _open_part(self, unit: UnitPart, dealer: OnePart) -> None:
        self._input = make_iterator(
            self._node.input, dataclasses.replace(self._context, dealer=dealer)
        )
        self._part, self._part_dealt = Part(unit), dealer.run.dealt
        self._failed = ErrorOrigin(-1, 0, 0)  # the unit is read from its start
        self._ledger.pass_over(self._part_dealt, self._part.pass_over(self._input))

    def _named(self, chunk: Chunk) -> Chunk | None:
        column = chunk.column
        assert column is not None
        chunk = chunk.with_places(self._ledger.name(column))
        part = self._part
        if part is not None:
            if part.is_over(self._part_count()):
                self._leave_part()
            return part.wanted_of(chunk)
        newest = _newest(column)
        if newest > self._newest:
            self._newest = newest
            # Later units show that earlier ones have ended.
            states, size, after = chunk.states, chunk.size, chunk.state_at(chunk.size)
            done = units_done(after)
            if done is not None:
                self._ledger.end(self._leaves, done)
            # Whoever puts the chunk into a portion asks for that state, too.
            return chunk.with_states(lambda index: after if index == size else states(index))
        return chunk

    def _leave_part(self) -> None:
        """Read no more of a unit: what is wanted of it came."""
        self._ledger.leave(self._part_dealt)
        self._part = None
        self._input.close()
        self._input = self._whole()

    def get_state(self) -> State:
        return self._input.get_state()

    def close(self) -> None:
        self._has_ended = True
        self._input.close()


def _newest(column: Column) -> int:
    """Return the latest unit, as they were dealt, of which there is an element."""
    if not isinstance(column, np.ndarray):
        return column.newest()
    dealt = column["unit"]
    return int(dealt[0] if len(dealt) == 1 else np.maximum.reduce(dealt))
