"""Leaving: how far a worker is with it, what it has not delivered, and what is said of that.

STAYING ── DRAINING ── SETTLING ── HANDING_BACK ── SAYING_SO ── OVER

draining       what there is is delivered, until nothing is left or time is up
settling       answers about units that were asked for are waited for: they are handed back, too
handing back   what nobody was given; ends of tasks that were not heard of are said as well
saying so      the worker has left: what was not handed back by then is lost
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.service.messages import ReturnSplits
from headrace.service.worker.hand_out import Left
from headrace.waiting import WaitWarnings

__all__ = ["Leaving", "Phase", "Undelivered"]

_SETTLE_SECONDS = 0.2
_LEAVE_SECONDS = 0.7


class Phase(enum.IntEnum):
    """How far a worker is with leaving."""

    STAYING = 0
    DRAINING = 1
    SETTLING = 2
    HANDING_BACK = 3
    SAYING_SO = 4
    OVER = 5


@dataclass(frozen=True, kw_only=True)
class Undelivered:
    """What the tasks of a worker had not delivered when it stopped."""

    units: int = 0
    """Units of which nothing was given to anybody."""
    elements: int = 0
    """Elements that were produced and that nobody was given."""
    unacknowledged: int = 0
    """Elements that were sent, and may have arrived."""

    @classmethod
    def of(cls, left: Iterable[Left], words: Iterable[ReturnSplits]) -> Undelivered:
        """Add up what tasks left, and what is handed back."""
        left = list(left)
        return cls(
            units=sum(stop - start for word in words for start, stop in word.splits),
            elements=sum(each.elements for each in left),
            unacknowledged=sum(each.unacknowledged for each in left),
        )


class Leaving:
    """How a worker leaves.

    Args:
        address: The worker's, for messages.
        dispatcher: The dispatcher's address, for messages.
    """

    def __init__(self, address: str, dispatcher: str) -> None:
        self._address = address
        self._dispatcher = dispatcher
        self.phase = Phase.STAYING
        self.until = math.inf
        """When the phase ends: draining, settling, or all of the others."""
        self._began = math.inf
        self._wait_warnings = WaitWarnings()
        self._left = Undelivered()
        self._drained = False
        self.is_hopeless = False
        """Whether nobody is there who could take back anything."""

    @property
    def is_wished(self) -> bool:
        """Whether the worker is to leave: it takes nothing more."""
        return self.phase > Phase.STAYING

    @property
    def has_begun(self) -> bool:
        """Whether it hands out nothing more."""
        return self.phase > Phase.DRAINING

    @property
    def is_over(self) -> bool:
        """Whether the worker has left."""
        return self.phase is Phase.OVER

    def drain(self, seconds: float, now: float) -> None:
        """Begin to deliver what there is, for so many seconds at most."""
        self.phase, self._drained = Phase.DRAINING, True
        self.until, self._began = now + seconds, now

    def settle(self, now: float) -> None:
        """Begin to leave."""
        self.phase, self._began = Phase.SETTLING, now
        self.until = now + _SETTLE_SECONDS

    def hand_back(self, left: Undelivered) -> None:
        """Begin to hand back what was left."""
        self.phase, self._left = Phase.HANDING_BACK, left
        self.until = self._began + _LEAVE_SECONDS

    def is_due(self, now: float) -> bool:
        """Whether the time for the phase is up."""
        return now >= self.until or (self.is_hopeless and self.has_begun)

    @property
    def next_at(self) -> float:
        """When there is something to be done next."""
        if self.phase is not Phase.DRAINING:
            return self.until
        return min(self.until, self._began + self._wait_warnings.due_after)

    def end(self) -> list[str]:
        """Take note that the worker has left; return what is to be said of losses."""
        heard = self.phase is Phase.SAYING_SO
        self.phase, self.until = Phase.OVER, math.inf
        left, warnings = self._left, []
        if left.units and not heard:
            warnings.append(
                f"the worker at {self._address} leaves, and {left.units} units of its tasks are "
                f"lost: the dispatcher at {self._dispatcher} did not answer when they were to be "
                "handed back"
            )
        if self._drained and (left.units or left.elements or left.unacknowledged):
            handed_back = " and were handed back" if left.units and heard else ""
            warnings.append(
                f"the worker at {self._address} leaves before everything was delivered: "
                f"{left.units} units were not delivered{handed_back}, {left.elements} elements "
                f"had been produced and were asked for by nobody, {left.unacknowledged} were sent "
                "and not acknowledged"
            )
        return warnings

    def wait_to_warn_of(self, tasks: int, now: float) -> list[str]:
        """Return what is to be said of a drain that takes long: so many tasks are not settled."""
        waited = now - self._began
        if not self._wait_warnings.is_due(waited):
            return []
        return [
            f"the worker at {self._address} is to leave, and has waited {waited:.0f} s "
            f"for the clients of {tasks} task{'' if tasks == 1 else 's'} to take what there is; in "
            f"{self.until - now:.0f} s it leaves in any case"
        ]
