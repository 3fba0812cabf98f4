"""Where the client's half of a plan gets the elements of units from: the contract.

Rule 1. A reader gives the elements of one unit in order, each with its origin (`chunk.places`, as
        `element.places.named` makes it), and with its place if the half of the plan wants that
        (`Cut.wants_places`). Ordinals that are missing were left out by filters, or failed. An
        error that it raises has its origin (`error_origins`).
Rule 2. After the end it says how many elements the unit had at the root, those left out too.
Rule 3. Units are opened in any order, several at once, and perhaps the same one again.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from headrace.element.chunk import Chunk

__all__ = ["GivesWholeUnits", "UnitReader", "UnitSource"]


class UnitReader(Protocol):
    """Reads the elements of one unit, in order."""

    def next_chunk(self, limit: int) -> Chunk | None:
        """Return the next 1 to `limit` elements, with origins; None at the end.

        An element that fails raises when its turn comes; the next call goes on after it.
        """

    @property
    def elements(self) -> int:
        """How many elements the unit had at the root. Asked for after the end alone."""

    def close(self) -> None:
        """Let go of it. May be called twice."""


class UnitSource(Protocol):
    """Opens units of a plan's lower half."""

    def open(self, unit: int, first: int) -> UnitReader:
        """Return a reader of a unit from an ordinal on.

        Args:
            unit: Its number in the stream of the plan.
            first: Nothing before this ordinal has failed that was raised, and all of it was read.
                The error of the element before it may come again.
        """


@runtime_checkable
class GivesWholeUnits(Protocol):
    """A source of units that may have many small ones at hand."""

    def whole(self, unit: int, most: int, limit: int) -> tuple[Chunk, int] | None:
        """Return units in a row, each whole and with as many elements, which are read with that.

        Args:
            unit: The first.
            most: The most units.
            limit: The most elements.

        Returns:
            The elements, at least one of each, and how many units they are of; None: open the unit.
        """
