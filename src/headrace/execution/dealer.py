"""Who deals the units of a plan, as runs of positions of its leaves: no iterator, no lock.

next_units() -> DealtPositions -> head, take: runs of positions -> the leaves (`dealt`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from headrace.rewrites.positions import Deal

__all__ = ["Dealer", "DealtPositions", "FirstPass", "NextUnits", "Run"]

NextUnits: TypeAlias = Callable[[], tuple[int, int] | None]
"""Returns the next units that are dealt (start, stop), perhaps after a wait; None: no more come."""


class Run(NamedTuple):
    """Positions of a leaf that were dealt together: `start` to `stop` - 1."""

    start: int
    stop: int
    unit: int
    """Positions in a unit; the last unit of a run may have fewer."""
    dealt: int
    """Units that were dealt before it."""

    def done(self, position: int) -> int:
        """Return how many units are whole, in dealt order, before this position of the run."""
        units = position - self.start
        return self.dealt + (
            -(-units // self.unit) if position == self.stop else units // self.unit
        )

    def begun(self, position: int) -> int:
        """Return how many units, in dealt order, have positions before this one of the run."""
        return self.dealt - (self.start - position) // self.unit


class Dealer(Protocol):
    """Deals the units of a plan, as runs of positions of its leaves (`dealt`)."""

    def head(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the leaf and the passes that the next run lies in, or None: no more comes."""

    def take(self, leaf: int, passes: tuple[int, ...]) -> Run | None:
        """Return the next run, or None if it lies elsewhere."""

    def begin(self, units: int) -> None:
        """Take note that a leaf handed out positions of units before this number."""

    @property
    def dealt(self) -> int:
        """Units that were dealt so far in the runs that were taken."""


class DealtPositions:
    """Turns units into runs of positions.

    Args:
        deal: What the units of the plan are.
        next_units: Who deals them.
        pass_number: The pass that the plan is in; leaves are in passes within it.
    """

    def __init__(self, deal: Deal, next_units: NextUnits, pass_number: tuple[int, ...]) -> None:
        self._deal = deal
        self._next_units = next_units
        self._pass = pass_number
        self._runs: deque[tuple[int, tuple[int, ...], Run]] = deque()
        self._located = 0  # units, in runs that were taken or not
        self._has_ended = False
        self.begun = 0
        """Units, in dealt order, that leaves handed out something of."""

    @property
    def dealt(self) -> int:
        return self._runs[0][2].dealt if self._runs else self._located

    def head(self) -> tuple[int, tuple[int, ...]] | None:
        while not self._runs and not self._has_ended:
            units = self._next_units()
            if units is None:
                self._has_ended = True
            else:
                self._locate(*units)
        return self._runs[0][:2] if self._runs else None

    def take(self, leaf: int, passes: tuple[int, ...]) -> Run | None:
        if self.head() != (leaf, passes):
            return None
        return self._runs.popleft()[2]

    def begin(self, units: int) -> None:
        self.begun = max(self.begun, units)

    def _locate(self, first: int, stop: int) -> None:
        for leaf, passes, start, end in self._deal.locate(first, stop):
            ((_, _, one_start, one_end),) = self._deal.locate(first, first + 1)
            run = Run(start, end, one_end - one_start, self._located)
            self._runs.append((leaf, (*self._pass, *passes), run))
            units = run.done(end) - run.dealt
            self._located += units
            first += units


class FirstPass:
    """Deals what lies in some pass as if it lay in the first: a cache has the same in each."""

    def __init__(self, dealer: Dealer, passes: tuple[int, ...]) -> None:
        self._dealer = dealer
        self._passes = passes

    @property
    def dealt(self) -> int:
        return self._dealer.dealt

    def head(self) -> tuple[int, tuple[int, ...]] | None:
        head, depth = self._dealer.head(), len(self._passes)
        if head is None or head[1][:depth] != self._passes:
            return None
        return head[0], (0,) * depth + head[1][depth:]

    def take(self, leaf: int, passes: tuple[int, ...]) -> Run | None:
        return self._dealer.take(leaf, self._passes + passes[len(self._passes) :])

    def begin(self, units: int) -> None:
        self._dealer.begin(units)
