"""Draining of a worker: its phases, what was not delivered, and the warnings about it.

ACTIVE ── DRAINING ── AWAITING_SPLITS ── RETURNING_SPLITS ── UNREGISTERING ── STOPPED

DRAINING          buffered output is delivered, until nothing is left or the deadline
AWAITING_SPLITS   pending split requests are answered, because their splits are returned as well
RETURNING_SPLITS  undelivered splits are returned; unreported ends of tasks are reported as well
UNREGISTERING     the dispatcher removes the worker; splits not returned by now are lost
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.service.messages import ReturnSplits
from headrace.service.worker.delivery_policy import UndeliveredOutput
from headrace.waiting import WaitWarningLimiter

__all__ = ["DrainPhase", "DrainState", "UndeliveredTotals"]

_AWAIT_SPLITS_SECONDS = 0.2
_RETURN_SPLITS_SECONDS = 0.7


class DrainPhase(enum.IntEnum):
    """Phases of a worker's shutdown."""

    ACTIVE = 0
    DRAINING = 1
    AWAITING_SPLITS = 2
    RETURNING_SPLITS = 3
    UNREGISTERING = 4
    STOPPED = 5


@dataclass(frozen=True, kw_only=True)
class UndeliveredTotals:
    """Output that the tasks of a worker had not delivered when it stopped."""

    splits: int = 0
    """Number of splits without delivered elements."""
    elements: int = 0
    """Number of elements that were produced and not requested."""
    unacknowledged: int = 0
    """Number of elements that were sent and may have arrived."""

    @classmethod
    def add_up(
        cls, outputs: Iterable[UndeliveredOutput], returns: Iterable[ReturnSplits]
    ) -> UndeliveredTotals:
        """Add up the undelivered output of tasks and the returned splits."""
        outputs = list(outputs)
        return cls(
            splits=sum(stop - start for each in returns for start, stop in each.splits),
            elements=sum(each.elements for each in outputs),
            unacknowledged=sum(each.unacknowledged for each in outputs),
        )


class DrainState:
    """State of a worker's shutdown.

    Args:
        address: Address of the worker, for messages.
        dispatcher: Address of the dispatcher, for messages.
    """

    def __init__(self, address: str, dispatcher: str) -> None:
        self._address = address
        self._dispatcher = dispatcher
        self.phase: DrainPhase = DrainPhase.ACTIVE
        self.deadline: float = math.inf
        """End of the phase: of DRAINING, of AWAITING_SPLITS, or of all later phases."""
        self._started_at = math.inf
        self._wait_warnings = WaitWarningLimiter()
        self._undelivered = UndeliveredTotals()
        self._was_drained = False
        self.is_dispatcher_unreachable = False
        """Whether no dispatcher can be reached to return splits to."""

    @property
    def is_requested(self) -> bool:
        """Whether shutdown has begun: the worker accepts nothing more."""
        return self.phase > DrainPhase.ACTIVE

    @property
    def has_stopped_delivery(self) -> bool:
        """Whether the worker delivers nothing more."""
        return self.phase > DrainPhase.DRAINING

    @property
    def is_stopped(self) -> bool:
        """Whether the worker has stopped."""
        return self.phase is DrainPhase.STOPPED

    def drain(self, seconds: float, now: float) -> None:
        """Start to deliver buffered output, for at most `seconds`."""
        self.phase, self._was_drained = DrainPhase.DRAINING, True
        self.deadline, self._started_at = now + seconds, now

    def await_splits(self, now: float) -> None:
        """Start to wait for pending split requests."""
        self.phase, self._started_at = DrainPhase.AWAITING_SPLITS, now
        self.deadline = now + _AWAIT_SPLITS_SECONDS

    def return_splits(self, undelivered: UndeliveredTotals) -> None:
        """Start to return the undelivered splits."""
        self.phase, self._undelivered = DrainPhase.RETURNING_SPLITS, undelivered
        self.deadline = self._started_at + _RETURN_SPLITS_SECONDS

    def is_phase_over(self, now: float) -> bool:
        """Return whether the time for the phase has passed."""
        return now >= self.deadline or (
            self.is_dispatcher_unreachable and self.has_stopped_delivery
        )

    @property
    def next_check_at(self) -> float:
        """Time of the next deadline or warning."""
        if self.phase is not DrainPhase.DRAINING:
            return self.deadline
        return min(self.deadline, self._started_at + self._wait_warnings.next_warning_after)

    def finish(self) -> list[str]:
        """Record that the worker has stopped; return warnings about lost output."""
        has_returned_splits = self.phase is DrainPhase.UNREGISTERING
        self.phase, self.deadline = DrainPhase.STOPPED, math.inf
        undelivered, warnings = self._undelivered, []
        if undelivered.splits and not has_returned_splits:
            warnings.append(
                f"worker {self._address} stopped: {undelivered.splits} undelivered splits lost, "
                f"because dispatcher {self._dispatcher} did not acknowledge their return"
            )
        if self._was_drained and undelivered != UndeliveredTotals():
            returned = " (returned)" if undelivered.splits and has_returned_splits else ""
            warnings.append(
                f"worker {self._address} stopped before its output was delivered: "
                f"{undelivered.splits} splits undelivered{returned}, {undelivered.elements} "
                f"produced elements not requested, {undelivered.unacknowledged} elements sent and "
                "not acknowledged"
            )
        return warnings

    def drain_warnings(self, tasks: int, now: float) -> list[str]:
        """Return the warnings about a long drain with this number of unfinished tasks."""
        waited = now - self._started_at
        if not self._wait_warnings.should_warn(waited):
            return []
        limit = (
            "it waits for them"
            if self.deadline == math.inf
            else f"it stops in {self.deadline - now:.0f} s in any case"
        )
        return [
            f"worker {self._address} has been draining for {waited:.0f} s: clients of {tasks} "
            f"task{'' if tasks == 1 else 's'} have not yet requested or acknowledged all output; "
            f"{limit}"
        ]
