"""Closures: a function with its arguments, on its way to a worker, and what becomes of it."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    UnavailableError,
    describe_error,
)
from headrace.transport.channel import Buffer

__all__ = [
    "CANCELLED",
    "MOST_LOSSES",
    "NEVER",
    "CallOff",
    "Closure",
    "Decided",
    "Failure",
    "How",
    "Payload",
    "Phase",
    "RemoteValueStatus",
    "Result",
    "Round",
    "Send",
    "await_inputs",
    "awaited",
    "call_off",
    "fresh",
    "is_call_off",
    "lost_too_often",
    "took_too_long",
]


MOST_LOSSES = 10
"""How often a function may be lost with its worker, where nobody says how often."""


class RemoteValueStatus(enum.Enum):
    """How far a `RemoteValue` is.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         value = coordinator.schedule(lambda: 1)
    ...         coordinator.join()
    ...         value.status.name
    ...     strategy.close()
    'READY'
    """

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


# --- closures that wait for values of others, and what becomes of them when those are known -------


def await_inputs(closure: Closure) -> Exception | None:
    """Take note of the values that a closure waits for; return the error of one that has one."""
    unready = [result for result in closure.inputs if not result.is_ready]
    closure.missing = len(unready)
    for result in unready:
        result.waiting.append(closure)
    return next((each.error for each in closure.inputs if each.error), None)


def awaited(told: Result) -> Iterator[tuple[Closure, Exception | None]]:
    """Yield the closures that have all values now, or that end with the error of one.

    With a closure that ends, those that wait for its value do, too.
    """
    results = [told]
    while results:
        result = results.pop()
        waiting, result.waiting = result.waiting, []
        for closure in waiting:
            if closure.phase is not Phase.HELD:
                continue
            closure.missing -= 1
            if result.error is not None:
                yield closure, result.error
                results.append(closure.result)
            elif not closure.missing:
                yield closure, None


# --- the first error of a function, what is said of the others, and errors of the queue's own -----

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


# --- what the queue of closures decides: records, no behaviour ------------------------------------

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
