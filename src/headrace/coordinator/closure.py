"""Closures, their results and the actions that the closure queue decides."""

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
    "DEFAULT_RETRIES",
    "NEVER",
    "CancelAction",
    "CancelMode",
    "Closure",
    "ClosureFailure",
    "ClosurePhase",
    "ClosureResult",
    "Payload",
    "QueueActions",
    "RemoteValueStatus",
    "RoundPush",
    "SendClosure",
    "cancel_action",
    "copy_error",
    "is_cancellation",
    "register_inputs",
    "resolve_dependents",
    "retries_exhausted_error",
    "timeout_error",
]


DEFAULT_RETRIES = 10
"""Default maximum number of times that a function is rerun after its worker was lost."""


class RemoteValueStatus(enum.Enum):
    """Status of a `RemoteValue`.

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
    """The worker that held the resource was lost; it is recreated when the worker returns."""
    READY = "READY"
    """The value is available, or the error in its place."""


class Payload(NamedTuple):
    """Value in transit: pickled, with its array memory in separate buffers."""

    data: bytes
    buffers: Sequence[Buffer] = ()

    @property
    def nbytes(self) -> int:
        """Total number of bytes."""
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


class ClosureResult:
    """Result of a closure. It is set once and never changes.

    Attributes:
        status: Status of the result.
        payload: Packed value; None before it is known, and if there is an error.
        error: Error to raise in place of a value.
        dependents: Closures that have it as an argument.
    """

    __slots__ = ("dependents", "error", "payload", "status")

    def __init__(self) -> None:
        self.status: RemoteValueStatus = RemoteValueStatus.NOT_READY
        self.payload: Payload | None = None
        self.error: Exception | None = None
        self.dependents: list[Closure] = []

    @property
    def is_ready(self) -> bool:
        """Whether there is a value or an error."""
        return self.status is RemoteValueStatus.READY

    def resolve(self, payload: Payload | None, error: Exception | None = None) -> bool:
        """Set a value or an error; return False if the result is already set."""
        if self.status is RemoteValueStatus.READY:
            return False
        self.payload, self.error = payload, error
        self.status = RemoteValueStatus.READY
        return True


class ClosurePhase(enum.Enum):
    """Phase of a closure."""

    WAITING_FOR_INPUTS = "waiting_for_inputs"
    """Waits for values of other closures."""
    READY = "ready"
    """Waits for a worker."""
    SENT = "sent"
    """Assigned to a worker."""
    FENCING = "fencing"
    """Its worker is lost, and servers have not yet confirmed that they reject its writes."""
    COMPLETING = "completing"
    """Ended; waits for its round, and for servers to forget its write keys."""
    DONE = "done"
    """Complete."""


@dataclass(slots=True, eq=False)
class Closure:
    """Scheduled call of a function.

    Attributes:
        name: Name of the function, for messages.
        call_spec: Call to send to a worker; opaque to the queue.
        inputs: Results of other closures that are its arguments.
        timeout: Maximum seconds of one attempt; None disables the limit.
        retries: Number of times that it may be lost with a worker; None uses `DEFAULT_RETRIES`.
        number: Position in scheduling order, from 1; negative for a pinned closure.
        pinned_worker: Number of the only worker that may run it; None for any worker.
        session: Worker session that it was sent to; 0 if none.
        worker: Number of the worker that it was last sent to.
        started_at: Start time on the worker; None if it is not known to have a thread.
        num_attempts: Number of times it was sent.
        num_losses: Number of times it was lost while running.
        may_have_written: Whether an attempt may have written to a server.
        optimizer_steps: Optimizer steps that it took and its round pushes; None if none.
        is_cancelled: Whether it is cancelled and must not be sent again.
        is_recalled: Whether its worker was asked to return it.
        num_unready_inputs: Number of inputs that are not ready.
    """

    name: str
    call_spec: Any = None
    inputs: tuple[ClosureResult, ...] = ()
    timeout: float | None = None
    retries: int | None = None
    number: int = 0
    pinned_worker: int | None = None
    phase: ClosurePhase = ClosurePhase.WAITING_FOR_INPUTS
    result: ClosureResult = field(default_factory=ClosureResult)
    session: int = 0
    worker: int = -1
    started_at: float | None = None
    num_attempts: int = 0
    num_losses: int = 0
    may_have_written: bool = False
    optimizer_steps: Any = None
    is_cancelled: bool = False
    is_recalled: bool = False
    num_unready_inputs: int = 0

    @property
    def max_losses(self) -> int:
        """Number of times it may be lost."""
        return DEFAULT_RETRIES if self.retries is None else self.retries


def copy_error(error: Exception) -> Exception:
    """Return a copy of an error to raise once, without the original's traceback."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    copied.__traceback__ = None
    return copied


# --- closures that wait for the values of other closures ------------------------------------------


def register_inputs(closure: Closure) -> Exception | None:
    """Register a closure with its unready inputs; return the error of an input, if any."""
    unready = [result for result in closure.inputs if not result.is_ready]
    closure.num_unready_inputs = len(unready)
    for result in unready:
        result.dependents.append(closure)
    return next((each.error for each in closure.inputs if each.error), None)


def resolve_dependents(resolved: ClosureResult) -> Iterator[tuple[Closure, Exception | None]]:
    """Yield closures whose inputs are now all ready (with None) or failed (with the error).

    The error of a closure propagates to the closures that wait for its value.
    """
    results = [resolved]
    while results:
        result = results.pop()
        waiting, result.dependents = result.dependents, []
        for closure in waiting:
            if closure.phase is not ClosurePhase.WAITING_FOR_INPUTS:
                continue
            closure.num_unready_inputs -= 1
            if result.error is not None:
                yield closure, result.error
                results.append(closure.result)
            elif not closure.num_unready_inputs:
                yield closure, None


# --- the first error of a function, cancellation, and errors of the queue -------------------------

CANCELLED = "The corresponding function is cancelled. Please reschedule the function."
"""Message of a cancellation, by the user or because another function failed."""

DRAIN_SECONDS = 10.0
"""Seconds that running functions may continue after another one failed."""

_MAX_LISTED = 5


@dataclass
class ClosureFailure:
    """Failure that cancels all scheduled closures.

    Attributes:
        error: First error; raised once.
        failed_at: Time of the first error.
        later_errors: Errors of closures that were running, in order of arrival.
        num_cancelled: Number of cancelled closures.
        is_drain_over: Whether closures that still ran after the drain period were abandoned.
    """

    error: Exception
    failed_at: float
    later_errors: list[Exception] = field(default_factory=list)
    num_cancelled: int = 0
    is_drain_over: bool = False

    @property
    def drain_deadline(self) -> float:
        """Time at which running closures are abandoned."""
        return self.failed_at + DRAIN_SECONDS

    @property
    def wake_at(self) -> float:
        """Time of the next check: the drain deadline, or NEVER once it has passed."""
        return NEVER if self.is_drain_over else self.drain_deadline

    def build_error(self) -> Exception:
        """Return the first error with notes about later errors and cancelled functions."""
        error = copy_error(self.error)
        if self.later_errors:
            listed = [
                describe_error(each).splitlines()[0] for each in self.later_errors[:_MAX_LISTED]
            ]
            num_unlisted = len(self.later_errors) - len(listed)
            error.add_note(
                f"{len(self.later_errors)} more functions failed before all were cancelled: "
                + "; ".join(listed)
                + (f"; and {num_unlisted} more" if num_unlisted else "")
            )
        if self.num_cancelled:
            error.add_note(
                f"{self.num_cancelled} scheduled functions were cancelled; schedule them again"
            )
        return error


def is_cancellation(error: Exception) -> bool:
    """Return whether an error only reports that a function was cancelled."""
    return isinstance(error, CancelledError) and str(error) == CANCELLED


def timeout_error(closure: Closure) -> Exception:
    """Return the error of a closure that exceeded its timeout."""
    return DeadlineExceededError(
        f"{closure.name} took longer than its timeout of {closure.timeout:g} s on worker "
        f"{closure.worker}"
    )


def retries_exhausted_error(closure: Closure) -> Exception:
    """Return the error of a closure that was lost with its workers too often."""
    return UnavailableError(
        f"{closure.name} was lost with its worker {closure.num_losses} times, last with worker "
        f"{closure.worker}, but `retries` allows {closure.max_losses}: the function may "
        "terminate its worker (out of memory?); if not, increase `retries` of schedule()"
    )


# --- actions of the closure queue: records without behaviour --------------------------------------

NEVER = float("inf")


class CancelMode(Enum):
    """Effect of a cancellation on a running closure; a closure not yet started is dropped."""

    RECALL = "recall"
    """Let it run."""
    REJECT_WRITES = "reject_writes"
    """Reject its further writes."""
    ABANDON = "abandon"
    """Reject its further writes, and replace its thread."""


class SendClosure(NamedTuple):
    """Send a closure to a worker session."""

    closure: Closure
    worker: int
    session: int


@dataclass(frozen=True, slots=True)
class CancelAction:
    """Cancel a closure at a worker."""

    number: int
    worker: int
    session: int
    mode: CancelMode


def cancel_action(closure: Closure, mode: CancelMode) -> CancelAction:
    """Return the action that cancels a closure at its worker."""
    return CancelAction(closure.number, closure.worker, closure.session, mode)


@dataclass(frozen=True, slots=True)
class RoundPush:
    """Push the mean of the optimizer steps of a round.

    Attributes:
        last_number: Number of the last closure of the round.
        optimizer_steps: Steps of each closure that took any, in closure order; opaque to the
            queue.
    """

    last_number: int
    optimizer_steps: list[Any]


@dataclass
class QueueActions:
    """Actions to run.

    Attributes:
        sends: Closures to send, in this order.
        cancels: Cancellations to send after that.
        key_cleanups: Numbers of closures whose write keys servers may forget.
        fences: Worker sessions whose writes servers must reject.
        round_push: Round to push to servers; None if there is none.
        wake_in: Seconds until the next call of `take_actions`.
    """

    sends: list[SendClosure] = field(default_factory=list)
    cancels: list[CancelAction] = field(default_factory=list)
    key_cleanups: list[int] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    round_push: RoundPush | None = None
    wake_in: float = NEVER
