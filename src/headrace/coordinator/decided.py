"""What the queue of closures decides: records, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from headrace.coordinator.closure import Closure

__all__ = ["NEVER", "CallOff", "Decided", "How", "Round", "Send", "call_off"]

NEVER = float("inf")


class How(Enum):
    """How a closure is called off at its worker. One that has not begun is dropped in any case."""

    RECALL = "recall"
    """One that has begun goes on."""
    REFUSE = "refuse"
    """One that has begun may write no more."""
    ABANDON = "abandon"
    """One that has begun may write no more, and its thread is replaced."""


class Send(NamedTuple):
    """Send a closure to this life of a worker."""

    closure: Closure
    worker: int
    session: int


@dataclass(frozen=True, slots=True)
class CallOff:
    """Call a closure off at a worker."""

    number: int
    worker: int
    session: int
    how: How


def call_off(closure: Closure, how: How) -> CallOff:
    """Return what calls a closure off at the worker that has it."""
    return CallOff(closure.number, closure.worker, closure.session, how)


@dataclass(frozen=True, slots=True)
class Round:
    """Push the mean of what these closures took as steps.

    Attributes:
        last: Number of the last closure of the round.
        steps: Of each that took any, in the order of their numbers; the queue does not look at it.
    """

    last: int
    steps: list[Any]


@dataclass
class Decided:
    """What is to be done.

    Attributes:
        sends: In this order.
        calls_off: After that.
        settles: Closures whose keys servers may forget.
        fences: Lives of workers whose writes servers are to refuse.
        round: What is to be pushed to servers; None: nothing.
        wake_in: Seconds after which to look again.
    """

    sends: list[Send] = field(default_factory=list)
    calls_off: list[CallOff] = field(default_factory=list)
    settles: list[int] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    round: Round | None = None
    wake_in: float = NEVER
