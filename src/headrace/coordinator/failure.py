"""The first error of a function, what is said of the others, and errors of the queue's own."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.coordinator.closure import Closure, fresh
from headrace.coordinator.decided import NEVER
from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    UnavailableError,
    describe_error,
)

__all__ = [
    "CANCELLED",
    "Failure",
    "is_call_off",
    "lost_too_often",
    "took_too_long",
]

CANCELLED = "The corresponding function is cancelled. Please reschedule the function."
"""Of a function that was called off: by its user, or since another one failed."""

DRAIN_SECONDS = 10.0
"""How long functions that run go on after another one failed."""
_MOST_NAMED = 5


@dataclass
class Failure:
    """Why what was scheduled is called off.

    Attributes:
        error: The first; it is raised once.
        since: When it came.
        others: Errors of closures that were under way, in order of arrival.
        cancelled: How many closures were called off.
        is_pressed: Whether those that still ran after a while were given up.
    """

    error: Exception
    since: float
    others: list[Exception] = field(default_factory=list)
    cancelled: int = 0
    is_pressed: bool = False

    @property
    def press_at(self) -> float:
        """When what still runs is given up."""
        return self.since + DRAIN_SECONDS

    @property
    def look_at(self) -> float:
        """When to look again: then, or never."""
        return NEVER if self.is_pressed else self.press_at

    def to_raise(self) -> Exception:
        """Return the first error, with a note of what else went wrong."""
        error = fresh(self.error)
        if self.others:
            named = [describe_error(each).splitlines()[0] for each in self.others[:_MOST_NAMED]]
            rest = len(self.others) - len(named)
            error.add_note(
                f"{len(self.others)} more failed before all was called off: "
                + "; ".join(named)
                + (f"; and {rest} more" if rest else "")
            )
        if self.cancelled:
            error.add_note(
                f"{self.cancelled} that were scheduled were cancelled; schedule them again"
            )
        return error


def is_call_off(error: Exception) -> bool:
    """Whether an error says no more than that a function was called off."""
    return isinstance(error, CancelledError) and str(error) == CANCELLED


def took_too_long(closure: Closure) -> Exception:
    """Return the error of a closure that ran for longer than it may."""
    return DeadlineExceededError(
        f"{closure.name} took longer than its timeout of {closure.timeout:g} s on worker "
        f"{closure.worker}"
    )


def lost_too_often(closure: Closure) -> Exception:
    """Return the error of a closure whose workers were lost again and again."""
    return UnavailableError(
        f"{closure.name} was lost with its worker {closure.losses} times, the last one worker "
        f"{closure.worker}, and may be run again {closure.most_losses} times: perhaps it ends its "
        "worker (memory?); where it does not, give schedule() more `retries`"
    )
