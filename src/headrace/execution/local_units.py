"""Units that are made in this process: the lower half of a plan, run unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.element.chunk import Chunk
from headrace.execution.dealer import NextUnits, UnitPart
from headrace.execution.dealt import DealtPlan

__all__ = ["LocalUnits"]


class LocalUnits:
    """Reads each unit by an iterator of its own (`unit_source.UnitSource`).

    Args:
        start_half: Starts the lower half of the plan with origins, dealt by what it is given.
    """

    def __init__(self, start_half: Callable[[NextUnits], DealtPlan]) -> None:
        self._start_half = start_half

    def open(self, unit: int, first: int) -> LocalReader:
        """Return a reader of a unit from an ordinal on, before which nothing has failed."""
        part = UnitPart(unit, ((first, None),), has_failures=False)
        waiting: Iterator[UnitPart] = iter([part])
        return LocalReader(self._start_half(lambda: next(waiting, None)))


class LocalReader:
    """Reads one unit."""

    def __init__(self, iterator: DealtPlan) -> None:
        self._iterator = iterator
        self._elements: int | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        """Return the next elements, with their origins; None at the end."""
        return self._iterator.next_chunk(limit)

    @property
    def elements(self) -> int:
        """How many elements the unit had, once its end was read."""
        if self._elements is None:
            self._elements = sum([ended.elements for ended in self._iterator.take_ended()])
        return self._elements

    def close(self) -> None:
        """Close the iterator."""
        self._iterator.close()
