"""A plan that is dealt out as one unit: whoever is dealt it reads all of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.places import named, numbers_in
from headrace.execution.dealer import NextUnits, Pause, UnitPart
from headrace.execution.dealt import DealtPlan
from headrace.execution.error_origins import ErrorOrigin, give_origin
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.ledger import Ended
from headrace.execution.part import Part

__all__ = ["OneUnit"]


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
