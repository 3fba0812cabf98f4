"""Connection state of one worker, and execution statistics of functions."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.coordinator.closure import Closure, Payload
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.messages import RunReply
from headrace.errors import FailedPreconditionError
from headrace.serving.rates import Rate
from headrace.versions import Versions

__all__ = ["EndedClosure", "ExecutionStats", "WorkerConnection"]


_FIRST_DELAY = 0.05
_LONGEST_DELAY = 1.0
_EXPIRY_SECONDS = 300.0
"""Seconds after which a silent worker that had registered itself is forgotten."""


class EndedClosure(NamedTuple):
    """Closure that has ended.

    Attributes:
        reply: The worker's reply.
        optimizer_steps: Optimizer steps that it took; None if none.
        payload: Its value; None if it is large and must be fetched.
    """

    reply: RunReply
    optimizer_steps: Payload | None
    payload: Payload | None


@dataclass(eq=False)
class WorkerConnection:
    """Connection state of a worker.

    Attributes:
        worker: Number of the worker.
        address: Address at which it listens.
        state_since: Time at which it was last connected or lost.
        session: Number of its session, set when `StartSession` is sent.
        is_connecting: Whether `StartSession` is unanswered.
        is_connected: Whether it has answered `StartSession` and was not lost since.
        is_draining: Whether it is being removed and gets no new closures.
        retry_at: Time of the next `StartSession`.
        reason: Known reason why it is not connected.
        process: Its process, as "host:pid".
        known_functions: Digests of functions that it has loaded.
        in_flight: Closures sent to it that have not ended.
        unfetched: Ended closures, oldest first, that wait until the first one's value is fetched.
        is_fetching: Whether a value is being fetched.
        registered_at: Time of its last registration; None for a configured worker, which never
            expires.
        num_finished: Number of closures whose result or error it has returned.
        num_losses: Number of times it was lost.
        refusal: Error by which it refused the last `StartSession`; None if it did not.
        versions: Versions of its process; None if it was never connected.
    """

    worker: int
    address: str
    state_since: float
    session: int = 0
    is_connecting: bool = False
    is_connected: bool = False
    is_draining: bool = False
    retry_at: float = 0.0
    reason: str = ""
    process: str = ""
    known_functions: set[bytes] = field(default_factory=set)
    in_flight: dict[int, Closure] = field(default_factory=dict)
    unfetched: dict[int, EndedClosure] = field(default_factory=dict)
    is_fetching: bool = False
    registered_at: float | None = None
    num_finished: int = 0
    num_losses: int = 0
    retry_delay: float = _FIRST_DELAY
    refusal: FailedPreconditionError | None = None
    versions: Versions | None = None

    def mark_connected(self, process: str, versions: Versions, now: float) -> None:
        """Record that the worker has answered `StartSession`."""
        self.versions, self.refusal = versions, None
        self.is_connected, self.is_connecting = True, False
        self.state_since, self.process, self.reason = now, process, ""
        self.retry_delay = _FIRST_DELAY

    def mark_lost(self, reason: str, now: float) -> None:
        """Record that the worker is lost, or still unreachable."""
        if self.is_connected:
            self.state_since = now
            self.num_losses += 1
        self.is_connected = self.is_connecting = False
        self.reason, self.refusal = reason, None
        self.known_functions.clear()
        self.in_flight.clear()
        self.unfetched.clear()
        self.is_fetching = False
        self.retry_at = now + self.retry_delay
        self.retry_delay = min(_LONGEST_DELAY, 2 * self.retry_delay)

    def is_expired(self, now: float) -> bool:
        """Return whether the worker has expired; a process that returns registers itself again."""
        if self.is_connected or self.registered_at is None:
            return False
        return now - max(self.registered_at, self.state_since) >= _EXPIRY_SECONDS

    def describe(self, now: float) -> str:
        """Describe the worker and its connection state."""
        name = f"worker {self.worker} ({self.address})"
        if self.is_connected:
            return f"{name} is connected"
        cause = f": {self.reason}" if self.reason else ""
        return f"{name} has not been connected for {now - self.state_since:.0f} s{cause}"


# --------------------------------------------------------------------------------------------------
# Execution statistics: counters, run times, and slow functions

# Pure: no thread or clock.
#
# Rule 1. A call that has run for ten seconds and ten times the function's median is reported once,
#         with its worker. If the function has returned less than three times, the call is reported
#         after a minute, since the first call may compile something.
# Rule 2. Counters start with the coordinator and never decrease.

_SLOW_FACTOR = 10
_MIN_SLOW_SECONDS = 10.0
_FIRST_CALL_SECONDS = 60.0
_MAX_DURATIONS = 64
"""Number of recent calls per function whose durations are kept."""
_MAX_FUNCTIONS = 256
"""Number of functions whose durations are kept."""
_MIN_DURATIONS = 3
"""Minimum number of calls for a median."""
_CHECK_SECONDS = 1.0


class ExecutionStats:
    """Counters and durations of functions.

    Attributes:
        num_returned: Number of calls that have returned or raised.
        num_failed: Number of calls that raised.
        total_seconds: Total run time of all calls.
        num_retried: Number of calls reassigned from lost workers.
        num_workers_lost: Number of worker losses.
        newest_number: Largest number of a function that was sent.
        max_staleness_gap: Maximum distance between a function when it was sent and the oldest
            function that had not ended.
        next_check_at: Time at which `check_slow` is due.
    """

    def __init__(self) -> None:
        self.num_returned: int = 0
        self.num_failed: int = 0
        self.total_seconds: float = 0.0
        self.num_retried: int = 0
        self.num_workers_lost: int = 0
        self.newest_number: int = 0
        self.max_staleness_gap: int = 0
        self.next_check_at: float = 0.0
        self._started_at: float | None = None
        self._rate: Rate | None = None
        self._counted_finished = 0
        #: Seconds of recent calls, by function.
        self._durations: dict[str, deque[float]] = {}
        #: Numbers of running functions that were reported as slow.
        self._reported_slow: set[int] = set()

    def uptime(self, now: float) -> float:
        """Return the seconds since the first check."""
        return 0.0 if self._started_at is None else now - self._started_at

    def rate(self, now: float) -> float:
        """Return the functions finished per second, averaged over about the last ten seconds."""
        return 0.0 if self._rate is None else self._rate.read(now)

    def median_seconds(self, name: str) -> float | None:
        """Return the median run time of a function in seconds; None after too few calls."""
        durations = self._durations.get(name)
        return (
            None
            if durations is None or len(durations) < _MIN_DURATIONS
            else statistics.median(durations)
        )

    # --- inputs -----------------------------------------------------------------------------------

    def record_sent(self, number: int, first_unended: int) -> None:
        """Record that a function was sent when all below `first_unended` had ended."""
        if number > self.newest_number:
            self.newest_number = number
        if number - first_unended > self.max_staleness_gap:
            self.max_staleness_gap = number - first_unended

    def record_returned(self, name: str, seconds: float, *, failed: bool) -> None:
        """Record that a function returned or failed."""
        self.num_returned += 1
        self.num_failed += failed
        self.total_seconds += seconds
        durations = self._durations.get(name)
        if durations is None:
            if len(self._durations) >= _MAX_FUNCTIONS:
                del self._durations[next(iter(self._durations))]
            durations = self._durations[name] = deque(maxlen=_MAX_DURATIONS)
        durations.append(seconds)

    def record_worker_lost(self, in_flight: Iterable[Closure]) -> int:
        """Record a worker loss; return how many of its closures will run again."""
        num_retried = sum(
            each.pinned_worker is None and not each.is_cancelled for each in in_flight
        )
        self.num_workers_lost += 1
        self.num_retried += num_retried
        return num_retried

    def check_slow(
        self, queue: ClosureQueue, connections: Mapping[int, WorkerConnection], now: float
    ) -> list[str]:
        """Update the rate of finished functions; return warnings for newly found slow ones."""
        if self._rate is None:
            self._started_at, self._rate = now, Rate(now)
        self._rate.add(queue.num_finished - self._counted_finished, now)
        self._counted_finished = queue.num_finished
        self.next_check_at = now + _CHECK_SECONDS
        messages: list[str] = []
        running: set[int] = set()
        for closure, started_at in _running_closures(queue):
            running.add(closure.number)
            seconds = now - started_at
            if seconds < _MIN_SLOW_SECONDS or closure.number in self._reported_slow:
                continue
            median = self.median_seconds(closure.name)
            if seconds >= (_FIRST_CALL_SECONDS if median is None else _SLOW_FACTOR * median):
                self._reported_slow.add(closure.number)
                worker = f"worker {closure.worker} ({connections[closure.worker].address})"
                messages.append(_slow_warning(closure.name, worker, seconds, median))
        self._reported_slow &= running
        return messages


def _running_closures(queue: ClosureQueue) -> Iterator[tuple[Closure, float]]:
    for load in queue.worker_pool:
        for closure in load.running_closures():
            if closure.started_at is not None and not closure.is_cancelled:
                yield closure, closure.started_at


def _slow_warning(name: str, worker: str, seconds: float, median: float | None) -> str:
    comparison = (
        f"has returned fewer than {_MIN_DURATIONS} times before"
        if median is None
        else f"usually takes {median:.2g} s"
    )
    return (
        f"{name} has been running on {worker} for {seconds:.0f} s, and {comparison}: it may "
        "hang, or wait for data or for a parameter server; schedule(..., timeout=) limits such "
        "calls"
    )
