"""Closures: a function with its arguments, on its way to a worker, and what becomes of it."""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.transport.channel import Buffer

__all__ = ["MOST_LOSSES", "Closure", "Payload", "Phase", "RemoteValueStatus", "Result", "fresh"]


MOST_LOSSES = 10
"""How often a function may be lost with its worker, where nobody says how often."""


class RemoteValueStatus(enum.Enum):
    """How far a `RemoteValue` is."""

    NOT_READY = "NOT_READY"
    """The function has not returned yet."""
    ABORTED = "ABORTED"
    """What a worker held for itself is lost with it, and is made again when it is back."""
    READY = "READY"
    """The value is here, or the error in its place."""


class Payload(NamedTuple):
    """A value on its way: pickled, with the memory of its arrays beside it."""

    data: bytes
    buffers: Sequence[Buffer] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


class Result:
    """What a closure returned, as soon as that is known. It is told once, and never changes.

    Attributes:
        status: How far it is.
        payload: The value, still packed; None before, and where there is an error.
        error: What is raised in place of a value.
        waiting: Closures that have it as an argument.
    """

    __slots__ = ("error", "payload", "status", "waiting")

    def __init__(self) -> None:
        self.status = RemoteValueStatus.NOT_READY
        self.payload: Payload | None = None
        self.error: Exception | None = None
        self.waiting: list[Closure] = []

    @property
    def is_ready(self) -> bool:
        """Whether there is a value or an error."""
        return self.status is RemoteValueStatus.READY

    def tell(self, payload: Payload | None, error: Exception | None = None) -> bool:
        """Set value or error; False: it was told before, and stays."""
        if self.status is RemoteValueStatus.READY:
            return False
        self.payload, self.error = payload, error
        self.status = RemoteValueStatus.READY
        return True


class Phase(enum.Enum):
    """Where a closure is."""

    HELD = "held"
    """It waits for values of other closures."""
    READY = "ready"
    """It waits for a worker."""
    SENT = "sent"
    """A worker has it."""
    FENCED = "fenced"
    """Its worker is lost; servers are told to take no more writes of it."""
    SETTLING = "settling"
    """It has ended; its round is waited for, and servers are told to forget its keys."""
    OVER = "over"
    """Nothing of it is left."""


@dataclass(slots=True, eq=False)
class Closure:
    """One call that was scheduled.

    Attributes:
        name: Of the function, for words.
        work: What a worker needs; the queue does not look at it.
        inputs: Results of other closures that are arguments of it.
        timeout: Seconds that one attempt may take; None: any number.
        retries: How often it may be lost with a worker; None: `MOST_LOSSES`.
        number: Its place in the order of all, from 1; negative: it belongs to one worker.
        home: Number of that worker.
        session: Which life of a worker has it; 0: none.
        worker: Number of that worker, or of the last one.
        begun_at: Since when it runs there; None: it waits for a thread, as far as is known.
        attempt: How often it was sent.
        losses: How often it was lost while it ran.
        wrote: Whether an attempt may have written to a server.
        steps: Of optimizers, that it took and its round pushes; None: none.
        is_off: Whether it is called off: it is not sent again.
        is_recalled: Whether its worker was asked for it back.
        missing: How many of its inputs are not ready.
    """

    name: str
    work: Any = None
    inputs: tuple[Result, ...] = ()
    timeout: float | None = None
    retries: int | None = None
    number: int = 0
    home: int | None = None
    phase: Phase = Phase.HELD
    result: Result = field(default_factory=Result)
    session: int = 0
    worker: int = -1
    begun_at: float | None = None
    attempt: int = 0
    losses: int = 0
    wrote: bool = False
    steps: Any = None
    is_off: bool = False
    is_recalled: bool = False
    missing: int = 0

    @property
    def most_losses(self) -> int:
        """How often it may be lost."""
        return MOST_LOSSES if self.retries is None else self.retries


def fresh(error: Exception) -> Exception:
    """Return a copy of an error, to be raised once: with a traceback of its own."""
    made = copy.copy(error)
    made.__cause__ = error.__cause__
    made.__traceback__ = None
    return made
