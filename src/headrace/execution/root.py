"""Iterators that name elements by their origins, at a root or in a plan that is one unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from headrace.element.brief import Column
from headrace.element.chunk import Chunk
from headrace.element.places import named, numbers_in
from headrace.execution.context import Context
from headrace.execution.dealer import (
    DealtPositions,
    NextUnits,
    OnePart,
    Pause,
    UnitPart,
    WholeUnits,
)
from headrace.execution.dealt import (
    Dealt,
    DealtPlan,
    failed_unit,
    is_within_unit,
    leaves_in,
    units_done,
)
from headrace.execution.iterator import (
    MOST_FAILURES,
    ElementIterator,
    Singles,
    State,
    Watched,
    make_iterator,
)
from headrace.execution.ledger import Ended, Ledger
from headrace.execution.origins import ErrorOrigin, Failed, fails_below, give_origin, is_within
from headrace.execution.stage import Stage, chosen_states
from headrace.plan.units import FailsBelow, RaiseFailed, Root

__all__ = [
    "FailsBelowIterator",
    "OneUnit",
    "Part",
    "RaiseFailedIterator",
    "RootIterator",
]

# --- The root: it names elements by their origins, and reads units in part ------------------------
#
# Whole units are read in one go, one after the other. A unit in part is read alone, from its start,
# by an iterator of its own; the root passes over what is not wanted, and stops when no more is.


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


# --- A unit that is read for some of its elements -------------------------------------------------


class Part:
    """What is wanted of a unit, which is read from its start.

    Args:
        unit: The unit, and the ordinals.
    """

    def __init__(self, unit: UnitPart) -> None:
        self._wanted = unit.wanted
        self._has_failures = unit.has_failures
        self._failed = 0

    def pass_over(self, input_: ElementIterator) -> int:
        """Pass over the first elements, if none of them can fail; return how many there were.

        A step that is one-to-one calls nothing for them. Where some fail it cannot be said without
        a call which those are, so all are read.
        """
        first = self._wanted[0][0] if self._wanted else 0
        return 0 if self._has_failures or not first else input_.skip(first)

    def is_known_failure(self, ordinal: int) -> bool:
        """Say whether an error was raised before: the element after it is not wanted.

        One just before an element that is wanted is raised, perhaps once more.
        """
        self._failed += 1
        if self._failed > MOST_FAILURES + ordinal:
            return False
        return not is_within(np.array([ordinal]), self._wanted).any()

    def is_over(self, ordinal: int) -> bool:
        """Say whether nothing from this element on is wanted."""
        last = self._wanted[-1][1] if self._wanted else 0
        return last is not None and ordinal >= last

    def wanted_of(self, chunk: Chunk) -> Chunk | None:
        """Return the elements that are wanted; None: none of them."""
        assert chunk.places is not None
        keep = is_within(chunk.places["ordinal"], self._wanted)
        if keep.all():
            return chunk
        kept = np.flatnonzero(keep)
        if not len(kept):
            return None
        return chunk.take(kept).with_states(chosen_states(chunk.states, kept.tolist(), chunk.size))


# --- A plan that is dealt out as one unit: whoever is dealt it reads all of it --------------------


class OneUnit(DealtPlan):
    """A plan that is one unit: whoever is dealt it reads all of it.

    Args:
        open_plan: Makes the iterator of the plan.
        next_units: Who deals it out.
        names_units: Whether elements are to have origins.
    """

    def __init__(
        self,
        open_plan: Callable[[], ElementIterator],
        next_units: NextUnits,
        *,
        names_units: bool = False,
    ) -> None:
        self._open_plan = open_plan
        self._next_units = next_units
        self._names_units = names_units
        self._input: ElementIterator | None = None
        self._part: Part | None = None  # of the unit; None: all of it is wanted
        self._count = 0  # elements
        self._failed = ErrorOrigin(0, 0, 0)  # the last error
        self._has_ended = False
        self._done = 0
        self._ended: list[Ended] = []

    @property
    def begun(self) -> int:
        return 0 if self._input is None else 1

    def take_ended(self) -> tuple[Ended, ...]:
        ended, self._ended = self._ended, []
        return tuple(ended)

    def next_chunk(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            if self._input is None and not self._open():
                break
            chunk = self._read(limit)
            if chunk is not None:
                return chunk.with_states(lambda index: {"dealt": 0, "at": 0, "begun": 1})
        return None

    def _open(self) -> bool:
        units = self._next_units()
        while units is Pause.PAUSE:  # nothing is held
            units = self._next_units()
        if units is None:
            self._has_ended = True
            return False
        self._input = self._open_plan()
        if isinstance(units, UnitPart):
            self._part = Part(units)
            self._count = self._part.pass_over(self._input)
        return True

    def _read(self, limit: int) -> Chunk | None:
        """Return elements; None: none that are wanted, or the end."""
        assert self._input is not None
        part = self._part
        try:
            chunk = self._input.next_chunk(limit)
        except Exception as error:
            last = self._failed
            number = last.number if last.ordinal == self._count else 0
            self._failed = ErrorOrigin(0, self._count, number + 1)
            give_origin(error, self._failed)
            if part is None or not part.is_known_failure(self._count):
                raise
            return None
        if chunk is None:
            self._done, self.given, self._has_ended = 1, 1, True
            if self._names_units:
                self._ended.append(Ended(0, 1, self._count))
            return None
        if not self._names_units:
            return chunk
        ordinals = np.arange(self._count, self._count + chunk.size)
        self._count += chunk.size
        places = None if chunk.places is None else numbers_in(chunk.places)
        chunk = chunk.with_places(named(0, ordinals, places))
        if part is None:
            return chunk
        if part.is_over(self._count):
            self._done, self.given, self._has_ended = 1, 1, True
        return part.wanted_of(chunk)

    def get_state(self) -> State:
        return {"dealt": self._done, "at": 0}

    def close(self) -> None:
        if self._input is not None:
            self._input.close()


# --- Steps that say where an element fails that workers made (`plan.units`) -----------------------


@make_iterator.register(RaiseFailed)
class RaiseFailedIterator(Stage):
    """Raises the errors that are held in places of elements."""

    def __init__(self, node: RaiseFailed, context: Context) -> None:
        super().__init__(make_iterator(node.input, context))

    def _work(self, limit: int) -> Chunk | None:
        chunk = self._intake.look(limit)
        if chunk is None:
            return None
        start = self._intake.offset
        part = chunk.slice(start, start + limit)
        count = part.size
        if not part.is_columnar:  # columns hold nothing but elements
            rows = enumerate(part.rows())
            count = next((index for index, row in rows if type(row) is Failed), count)
        if not count:
            self._failure = part.rows()[0].error
            return None
        self._use(count)
        return part.slice(0, count)


@make_iterator.register(FailsBelow)
class FailsBelowIterator(Watched):
    """Lets errors say where they were raised."""

    def __init__(self, node: FailsBelow, context: Context) -> None:
        super().__init__(make_iterator(node.input, context))
        self.gives_rows = False

    def next_chunk(self, limit: int) -> Chunk | None:
        try:
            return super().next_chunk(limit)
        except Exception as error:
            fails_below(error)
            raise

    def singles(self) -> Singles | None:
        return ElementIterator.singles(self)
