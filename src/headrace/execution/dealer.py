"""Who deals the units of a plan, as runs of positions of its leaves: no iterator, no lock.

next_units() -> DealtPositions -> head, take: runs of positions -> the leaves (`dealt`)

A unit may be dealt in part: who reads it wants some of its elements only, for others have the rest.
It is read alone, by a root (`root`), which is where the elements of a unit are counted.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.execution.ledger import Ledger
from headrace.execution.origins import Ranges
from headrace.rewrites.positions import Deal

__all__ = [
    "Dealer",
    "DealtPositions",
    "FirstPass",
    "NextUnits",
    "OnePart",
    "Pause",
    "Run",
    "UnitPart",
    "WholeUnits",
]


class UnitPart(NamedTuple):
    """A unit of which only some elements are wanted."""

    unit: int
    wanted: Ranges
    """Their ordinals at the root."""
    has_failures: bool = True
    """Whether elements of the unit may have failed before the first that is wanted. Where none did,
    whatever can be passed over without a call is."""


class Pause(enum.Enum):
    """In place of units: others come later, and what steps hold is wanted now."""

    PAUSE = "pause"


NextUnits: TypeAlias = Callable[[], tuple[int, int] | UnitPart | Pause | None]
"""Returns the next units that are dealt (start, stop), or one in part, perhaps after a wait; None:
no more come. Parts are for plans that are started with `origins`."""


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

    def units_of(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the unit of each of `count` positions, in dealt order."""
        since = np.arange(position - self.start, position - self.start + count)
        return self.dealt + (since if self.unit == 1 else since // self.unit)


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


class _Dealt(NamedTuple):
    leaf: int
    passes: tuple[int, ...]
    run: Run
    part: UnitPart | None


class DealtPositions:
    """Turns units into runs of positions.

    Args:
        deal: What the units of the plan are.
        next_units: Who deals them.
        pass_number: The pass that the plan is in; leaves are in passes within it.
        ledger: Where roots count what units give; None: there are no roots.
    """

    def __init__(
        self,
        deal: Deal,
        next_units: NextUnits,
        pass_number: tuple[int, ...],
        ledger: Ledger | None = None,
    ) -> None:
        self._deal = deal
        self._next_units = next_units
        self._pass = pass_number
        self._runs: deque[_Dealt] = deque()
        self._located = 0  # units, in runs that were taken or not
        self._has_ended = False
        self.ledger = ledger
        self.has_paused = False
        """Whether no more units come before `go_on`: until then, they have ended."""
        self.begun = 0
        """Units, in dealt order, that leaves handed out something of."""

    @property
    def dealt(self) -> int:
        return self._runs[0].run.dealt if self._runs else self._located

    def head(self) -> tuple[int, tuple[int, ...]] | None:
        return (self._runs[0].leaf, self._runs[0].passes) if self._look() else None

    @property
    def is_part(self) -> bool:
        """Whether the next run is a unit in part."""
        return self._look() and self._runs[0].part is not None

    def _look(self) -> bool:
        """Have a run; False: no more come."""
        while not (self._runs or self._has_ended or self.has_paused):
            units = self._next_units()
            if units is None:
                self._has_ended = True
            elif units is Pause.PAUSE:
                self.has_paused = True
            elif isinstance(units, UnitPart):
                self._locate(units.unit, units.unit + 1, units)
            else:
                self._locate(*units, None)
        return bool(self._runs)

    def take(self, leaf: int, passes: tuple[int, ...]) -> Run | None:
        if self.head() != (leaf, passes):
            return None
        return self._runs.popleft().run

    def take_part(
        self, leaves: frozenset[int], passes: tuple[int, ...]
    ) -> tuple[UnitPart, OnePart] | None:
        """Return the next run if it is a unit in part, of these leaves and within these passes."""
        if not self.is_part:
            return None
        leaf, inner, run, part = self._runs[0]
        if leaf not in leaves or inner[: len(passes)] != passes:
            return None
        assert part is not None
        self._runs.popleft()
        return part, OnePart(self, leaf, inner, run)

    def go_on(self) -> None:
        """Deal again after a pause."""
        self.has_paused = False

    def begin(self, units: int) -> None:
        self.begun = max(self.begun, units)

    def _locate(self, first: int, stop: int, part: UnitPart | None) -> None:
        for leaf, passes, start, end in self._deal.locate(first, stop):
            ((_, _, one_start, one_end),) = self._deal.locate(first, first + 1)
            run = Run(start, end, one_end - one_start, self._located)
            self._runs.append(_Dealt(leaf, (*self._pass, *passes), run, part))
            units = run.done(end) - run.dealt
            if self.ledger is not None:
                self.ledger.deal(leaf, self._located, units, first)
            self._located += units
            first += units


class WholeUnits:
    """Deals what lies before the next unit in part: that is read apart from the others."""

    def __init__(self, dealer: DealtPositions) -> None:
        self._dealer = dealer

    @property
    def dealt(self) -> int:
        return self._dealer.dealt

    def head(self) -> tuple[int, tuple[int, ...]] | None:
        return None if self._dealer.is_part else self._dealer.head()

    def take(self, leaf: int, passes: tuple[int, ...]) -> Run | None:
        return None if self._dealer.is_part else self._dealer.take(leaf, passes)

    def begin(self, units: int) -> None:
        self._dealer.begin(units)


class OnePart:
    """Deals one unit, which is read alone."""

    def __init__(
        self, dealer: DealtPositions, leaf: int, passes: tuple[int, ...], run: Run
    ) -> None:
        self._dealer = dealer
        self._at = leaf, passes
        self.run = run
        self._is_taken = False

    @property
    def dealt(self) -> int:
        return self.run.dealt + self._is_taken

    def head(self) -> tuple[int, tuple[int, ...]] | None:
        return None if self._is_taken else self._at

    def take(self, leaf: int, passes: tuple[int, ...]) -> Run | None:
        if self.head() != (leaf, passes):
            return None
        self._is_taken = True
        return self.run

    def begin(self, units: int) -> None:
        self._dealer.begin(units)


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
