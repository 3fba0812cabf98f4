"""Actions to execute now, unanswered calls to the dispatcher, and the time of the next check.

The parts of a worker's core add actions; the core returns them to its runner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.service.messages import DispatcherRequest, GetPlan, TaskDefinition
from headrace.service.ranges import Ranges
from headrace.service.worker.result_batch import BatchReply
from headrace.waiting import FIRST_WARNING_SECONDS, Backoff, WaitWarningLimiter

__all__ = ["PendingActions", "PendingCalls", "SplitGrant", "StartProducer", "WorkerActions"]


R = TypeVar("R")

_MAX_WAKE_DELAY = 2.0
"""Seconds of delay after the planned wake time that count as a pause of the process."""


class PendingActions(Generic[R]):
    """Collects the actions to execute.

    Args:
        pending_calls: Unanswered calls to the dispatcher.
    """

    def __init__(self, pending_calls: PendingCalls) -> None:
        self.pending_calls = pending_calls
        self.actions: WorkerActions[R] = WorkerActions()
        self._next_check_at = math.inf
        #: Time at which the last `act` of the core asked to be called again.
        self._expected_wake_at = math.inf

    def call_dispatcher(self, message: DispatcherRequest, now: float) -> None:
        """Call the dispatcher, unless the same call is pending."""
        if self.pending_calls.add(message, now):
            self.actions.calls.append(message)
            self.check_at(self.pending_calls.next_deadline)

    def check_at(self, time: float) -> None:
        """Check again at this time or earlier."""
        self._next_check_at = min(self._next_check_at, time)

    def is_check_due(self, now: float) -> bool:
        """Return whether a check is due; if so, the parts must register their next checks again."""
        if now - self._expected_wake_at > _MAX_WAKE_DELAY:
            self.pending_calls.exclude_pause(now - self._expected_wake_at, now)
            self._expected_wake_at = now
        if now < self._next_check_at:
            return False
        self._next_check_at = math.inf
        return True

    def take_actions(self, now: float) -> WorkerActions[R]:
        """Return the actions to execute now."""
        actions, self.actions = self.actions, WorkerActions()
        actions.wake_in = max(0.0, self._next_check_at - now)
        self._expected_wake_at = now + actions.wake_in
        return actions


# --- actions of a worker's core: calls, replies, and commands for its producers -------------------


@dataclass(frozen=True, kw_only=True)
class StartProducer:
    """A producer to start: it opens the plan and makes batches, with room for the first one."""

    producer: int
    """Number of the producer, unique within the core, unlike task ids."""
    definition: TaskDefinition
    plan: bytes
    """The pickled plan, as written."""
    cost_plan: bytes = b""
    """The pickled plan of the cost function; empty if there is none."""
    max_batch_bytes: int | None = None
    """Maximum bytes of a batch with several elements; None for the default."""


@dataclass(frozen=True, kw_only=True)
class SplitGrant:
    """Reply to a producer that requested splits."""

    producer: int
    splits: tuple[int, int] | None = None
    """Range (start, stop) of splits; None after the last assignment."""
    ordinals: Ranges = ()
    """If not empty, the range is one split and only these ordinals are needed."""
    deliver_at_once: bool = False
    """Whether to deliver results at once, because workers died while processing these splits."""
    is_pause: bool = False
    """Whether splits will be assigned later; elements held by steps of the plan must be delivered
    now.
    """
    num_done: int = field(default=0, compare=False)
    """Number of previously assigned splits that the dispatcher knows to be done."""


@dataclass
class WorkerActions(Generic[R]):
    """Actions to execute now. Those for one producer are in the order of the fields."""

    calls: list[DispatcherRequest] = field(default_factory=list)
    """Requests to the dispatcher, to be sent in this order; the core repeats them."""
    replies: list[tuple[R, BatchReply]] = field(default_factory=list)
    """Clients' requests with their replies, each once, in any order."""
    starts: list[StartProducer] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    """Producers that may make one more batch."""
    max_elements: dict[int, int] = field(default_factory=dict)
    """Maximum number of elements of that batch, for producers with a limit."""
    grants: list[SplitGrant] = field(default_factory=list)
    deferrals: list[int] = field(default_factory=list)
    """Producers that must wait for splits because others have priority."""
    stops: list[int] = field(default_factory=list)
    """Producers that must end without making another batch."""
    cancellations: list[int] = field(default_factory=list)
    """Producers whose batches are no longer needed; their output is ignored."""
    warnings: list[str] = field(default_factory=list)
    wake_in: float = math.inf
    """Seconds after which to act again if nothing happens before."""
    is_finished: bool = False
    """Whether the worker has stopped: there is nothing to do after these actions."""


# --- unanswered calls to the dispatcher: each is repeated until it is answered --------------------

# Rule 1. A call that was lost with its connection is repeated after a growing delay; one that is
#     not answered is repeated after a second, because all requests are idempotent.
# Rule 2. A call that is not answered within the worker's timeout is abandoned.
# Rule 3. If a call is pending and no reply arrived for ten seconds, a warning is logged, then one
#     per minute. Time in which the worker itself did not run does not count.
# Rule 4. The same applies to a call that fails repeatedly while others are answered.
# Rule 5. Each delay before a repetition is lengthened by a random part of at most half of it, so
#     that a thousand workers that lost the dispatcher at once do not call it at once.

_RETRY_SECONDS = 1.0

_PLAN_RETRY_SECONDS = 10.0

_JITTER = 0.5


@dataclass
class _Call:
    started_at: float
    retry_at: float
    backoff: Backoff = field(default_factory=lambda: Backoff(0.05, longest=1.0, factor=1.3))
    failures: int = 0
    warnings: WaitWarningLimiter = field(default_factory=WaitWarningLimiter)


class PendingCalls:
    """Unanswered calls.

    Args:
        timeout: Seconds after which an unanswered call is abandoned.
        now: Current time in seconds of a monotonic clock, as every other `now`.
        random: Returns a number 0 <= x < 1 for each delay.
    """

    def __init__(self, timeout: float, now: float, random: Callable[[], float]) -> None:
        self._timeout = timeout
        self._random = random
        self._pending: dict[DispatcherRequest, _Call] = {}
        #: Time of the last reply to any call.
        self._last_reply_at = now
        #: When the last silence that caused a warning ended.
        self._silence_ended_at = now
        self._warnings = WaitWarningLimiter()

    def add(self, message: DispatcherRequest, now: float) -> bool:
        """Add a call that is made now; return False if the same call is pending."""
        if message in self._pending:
            return False
        self._pending[message] = _Call(
            started_at=now, retry_at=now + self._with_jitter(_retry_interval(message))
        )
        return True

    def pending_of(self, *kinds: type) -> list[DispatcherRequest]:
        """Return the pending calls of some types."""
        return [message for message in self._pending if isinstance(message, kinds)]

    def resolve(self, message: DispatcherRequest, now: float) -> bool:
        """Record a reply; return False if its call is not pending."""
        self.note_reply(now)
        return self._pending.pop(message, None) is not None

    def note_reply(self, now: float) -> None:
        """Record that the dispatcher replied."""
        if now - self._silence_started_at >= FIRST_WARNING_SECONDS:
            self._silence_ended_at = now
        self._last_reply_at = now
        self._warnings.reset()

    def note_failure(self, message: DispatcherRequest, now: float) -> int:
        """Record that a call failed; return how often it has failed."""
        call = self._pending.get(message)
        if call is None:
            return 0
        call.retry_at = now + self._with_jitter(next(call.backoff))
        call.failures += 1
        return call.failures

    def discard(self, predicate: Callable[[DispatcherRequest], bool] = lambda _: True) -> None:
        """Remove the calls that satisfy the predicate."""
        for message in [message for message in self._pending if predicate(message)]:
            del self._pending[message]

    def take_retries(self, now: float) -> list[DispatcherRequest]:
        """Return the calls to repeat now."""
        retries = []
        for message, call in self._pending.items():
            if call.retry_at <= now:
                call.retry_at = now + self._with_jitter(_retry_interval(message))
                retries.append(message)
        return retries

    def take_expired(self, now: float) -> list[DispatcherRequest]:
        """Remove and return the calls that were not answered within the timeout."""
        expired = [
            message
            for message, call in self._pending.items()
            if now - call.started_at >= self._timeout
        ]
        for message in expired:
            del self._pending[message]
        return expired

    @property
    def next_deadline(self) -> float:
        """Time of the next repetition, timeout or warning."""
        # A call that fails repeatedly is repeated at least every two seconds; its warning is
        # checked then.
        times = [
            min(call.retry_at, call.started_at + self._timeout) for call in self._pending.values()
        ]
        return min(
            [*times, self._silence_started_at + self._warnings.next_warning_after], default=math.inf
        )

    def silence_to_report(self, now: float) -> float:
        """Return the seconds without a reply if a warning is due, else 0.0."""
        silence = now - self._silence_started_at
        return silence if self._warnings.should_warn(silence) else 0.0

    def failing_call_to_report(self, now: float) -> tuple[DispatcherRequest, float] | None:
        """Return a call that fails repeatedly while others are answered, and for how many seconds.

        None if no warning is due.
        """
        if now - self._silence_started_at >= FIRST_WARNING_SECONDS:
            return None
        for message, call in self._pending.items():
            seconds = now - max(call.started_at, self._silence_ended_at)
            if call.failures and call.warnings.should_warn(seconds):
                return message, seconds
        return None

    @property
    def _silence_started_at(self) -> float:
        """Since when a call is pending without any reply; infinity if none is pending."""
        first = min((call.started_at for call in self._pending.values()), default=math.inf)
        return max(self._last_reply_at, first)

    def exclude_pause(self, pause: float, now: float) -> None:
        """Exclude a pause of the process from all waiting times."""
        self._last_reply_at = min(now, self._last_reply_at + pause)
        self._silence_ended_at = min(now, self._silence_ended_at + pause)
        for call in self._pending.values():
            call.started_at = min(now, call.started_at + pause)

    def _with_jitter(self, seconds: float) -> float:
        return seconds * (1 + _JITTER * self._random())


def _retry_interval(message: DispatcherRequest) -> float:
    return _PLAN_RETRY_SECONDS if isinstance(message, GetPlan) else _RETRY_SECONDS
