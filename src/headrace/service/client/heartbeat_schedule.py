"""Heartbeats to the dispatcher, and the consumer's wait.

Rule 1. A heartbeat is sent every second, or less often if the dispatcher asks for a longer interval
    because it has many clients, and one at a time. It is sent at once if something is urgent, and
    more often while the client waits for a decision of the dispatcher.
Rule 2. A client that did not run for half its lease consumes nothing until the dispatcher has
    replied to a heartbeat that was sent after the pause.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from headrace.service.client.task_reader import TaskReader
from headrace.waiting import Backoff, WaitWarningLimiter

__all__ = [
    "CALL_TIMEOUT",
    "HEARTBEAT_SECONDS",
    "ConsumerWait",
    "HeartbeatSchedule",
    "describe_missing",
]


HEARTBEAT_SECONDS = 1.0

CALL_TIMEOUT = 2.0
"""Seconds to wait for a reply."""


class HeartbeatSchedule:
    """Schedule of the calls to the dispatcher.

    Args:
        now: Current time in seconds of a monotonic clock, as every other `now`.
    """

    def __init__(self, now: float) -> None:
        self.lease_seconds: float = math.inf
        """Seconds without a heartbeat after which this client expires."""
        self._interval = HEARTBEAT_SECONDS
        self._last_reply_at = now
        self._next_heartbeat_at = now + HEARTBEAT_SECONDS
        self._backoff = Backoff(0.02, longest=HEARTBEAT_SECONDS)
        #: When the unanswered heartbeat was sent; None if there is none.
        self._sent_at: float | None = None
        self._is_urgent = False
        #: Number of heartbeats that must be answered before elements may be consumed (rule 2).
        self._pending_renewals = 0

    @property
    def may_be_expired(self) -> bool:
        """Whether the lease of this client may have expired."""
        return self._pending_renewals > 0

    def silence(self, now: float) -> float:
        """Return the seconds of silence; 0.0 if no longer than usual."""
        seconds = now - self._last_reply_at
        return seconds if seconds > self._interval + 2 * CALL_TIMEOUT else 0.0

    # --- inputs -----------------------------------------------------------------------------------

    def expedite(self) -> None:
        """Call the dispatcher as soon as possible."""
        self._is_urgent = True

    def reply_received(self, now: float, interval: float) -> None:
        """Record a heartbeat reply and the interval, in seconds, that the dispatcher asks for."""
        self._interval = interval
        self._pending_renewals = max(0, self._pending_renewals - 1)
        self._is_urgent = self._is_urgent or self._pending_renewals > 0
        self._last_reply_at, self._sent_at = now, None

    def reply_lost(self, now: float) -> None:
        """Record that no reply arrived."""
        self._sent_at = None
        self._next_heartbeat_at = now + HEARTBEAT_SECONDS

    def schedule_next(self, now: float, *, is_waiting: bool) -> None:
        """Schedule the next heartbeat.

        Args:
            now: Current time.
            is_waiting: Whether a decision of the dispatcher is awaited; the interval is short at
                first and grows.
        """
        if is_waiting:
            self._next_heartbeat_at = now + next(self._backoff)
        else:
            self._next_heartbeat_at = now + self._interval
            self._backoff.reset()

    def note_pause(self, pause: float) -> bool:
        """Record a pause of this process in seconds; return whether the lease may have expired."""
        if self._pending_renewals or not pause > self.lease_seconds / 2:
            return False
        # A reply to a heartbeat from before the pause does not renew the lease.
        self._pending_renewals = 1 if self._sent_at is None else 2
        self._is_urgent = True
        return True

    def exclude_pause(self, pause: float, now: float) -> None:
        """Exclude `pause` seconds in which this client did not run."""
        self._last_reply_at = min(now, self._last_reply_at + pause)

    # --- sending ----------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Return whether to send a heartbeat now, with all pending reports."""
        if self._sent_at is not None and now - self._sent_at > CALL_TIMEOUT:
            self.reply_lost(now)
        return self._sent_at is None and (self._is_urgent or now >= self._next_heartbeat_at)

    def heartbeat_sent(self, now: float) -> None:
        """Record that a heartbeat was sent."""
        self._sent_at, self._is_urgent = now, False

    def seconds_until_due(self, now: float) -> float:
        """Return the seconds after which to check again."""
        if self._sent_at is not None:
            return self._sent_at + CALL_TIMEOUT - now + 0.001
        return max(0.0, self._next_heartbeat_at - now)


# --- the consumer's wait: its start, its warnings and its end -------------------------------------

# Rule. A wait of ten seconds logs a description of the missing elements, then once a minute. It
# fails only if no worker could deliver for `timeout` seconds. Time in which this process did not
# run does not count.

_ALIVE_SECONDS = 60.0
"""Seconds since the last reply within which the dispatcher is assumed able to list workers."""

_MAX_NAMED = 3

_ASSIGN_SECONDS = 5.0
"""Seconds without a task after which the dispatcher is assumed to have none to offer. It reassigns
the remaining splits of a lost task to workers that had finished, once clients have reported what
they received of it.
"""


class ConsumerWait:
    """Start of the consumer's wait, and of the time in which no worker could deliver.

    Args:
        timeout: Seconds without a worker that could deliver, after which waiting fails.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._started_at: float | None = None
        self._warnings = WaitWarningLimiter()
        #: Since when no worker could deliver, and since when there has been no task.
        self._no_worker_since: float | None = None
        self._idle_since: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the consumer waits."""
        return self._started_at is not None

    def seconds(self, now: float) -> float:
        """Return the seconds that the consumer has waited."""
        return 0.0 if self._started_at is None else now - self._started_at

    # --- inputs -----------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Start a wait for the next element at `now`."""
        self._started_at = now
        self._warnings.reset()

    def end(self) -> None:
        """End the wait."""
        self._started_at = None

    def worker_available(self) -> None:
        """Record that a worker can deliver."""
        self._no_worker_since = None

    def no_worker_available(self, now: float) -> None:
        """Record that no worker can deliver."""
        if self._no_worker_since is None:
            self._no_worker_since = now

    def exclude_pause(self, pause: float, now: float) -> None:
        """Leave out `pause` seconds in which this client did not run."""
        if self._started_at is not None:
            # The wait may be shorter than the pause: a delivery can have restarted it.
            self._started_at += min(pause, now - self._started_at)
        if self._no_worker_since is not None:
            self._no_worker_since = min(now, self._no_worker_since + pause)
        if self._idle_since is not None:
            self._idle_since = min(now, self._idle_since + pause)

    def set_idle(self, now: float, *, is_idle: bool) -> None:
        """Record whether there is no task to read from."""
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    # --- results ----------------------------------------------------------------------------------

    def is_idle_for_long(self, now: float) -> bool:
        """Return whether there has been no task for longer than it takes to assign one."""
        return self._idle_since is not None and now - self._idle_since >= _ASSIGN_SECONDS

    def has_timed_out(self, now: float) -> bool:
        """Return whether the wait has failed: no worker could deliver for `timeout` seconds."""
        if self._started_at is None or self._no_worker_since is None:
            return False
        return now >= max(self._started_at, self._no_worker_since) + self._timeout

    def should_warn(self, now: float) -> bool:
        """Return whether to log a warning; if so, schedule the next one."""
        return self._started_at is not None and self._warnings.should_warn(now - self._started_at)

    def seconds_until_check(self, now: float) -> float:
        """Return the seconds until the next warning or the timeout; infinity without a wait."""
        if self._started_at is None:
            return math.inf
        times = [self._started_at + self._warnings.next_warning_after]
        if self._no_worker_since is not None:
            times.append(max(self._started_at, self._no_worker_since) + self._timeout)
        return max(0.0, min(times) - now)


def describe_missing(
    dispatcher: str,
    silence: float,
    tasks: Collection[TaskReader],
    awaited_clients: Sequence[str],
    now: float,
    skipped_workers: Sequence[str] = (),
    *,
    listed_workers: Sequence[str] = (),
    is_idle: bool = True,
    has_shards: bool = False,
    journal_problem: str = "",
) -> str:
    """Return a description of what delays the next element.

    Args:
        dispatcher: Address of the dispatcher.
        silence: Seconds since its last reply, or 0.0 if that is not long.
        tasks: Tasks that are being read.
        awaited_clients: Unresponsive clients of the same job, if only they delay the end.
        now: Current time.
        skipped_workers: Addresses of workers that this client must not read.
        listed_workers: Addresses of workers that have a task according to the dispatcher.
        is_idle: Whether there has been no task for a long time.
        has_shards: Whether each worker has a shard that no other worker reads at the same time.
        journal_problem: Why the dispatcher cannot record assignments; empty if it can.
    """
    parts = []
    if silence and not journal_problem:
        parts.append(
            f"no reply from the dispatcher at {dispatcher} for {silence:.0f} s (is it running at "
            "this address?)"
        )
    if journal_problem:
        parts.append(f"the dispatcher at {dispatcher} cannot assign splits: {journal_problem}")
    unreachable = [task for task in tasks if task.connection_error]
    parts += [
        f"the worker at {task.address.worker_address} has been unreachable for "
        f"{now - task.disconnected_at:.0f} s ({task.connection_error})"
        for task in unreachable[:_MAX_NAMED]
    ]
    connected = [task for task in tasks if not task.connection_error]
    if connected:
        names = ", ".join(task.address.worker_address for task in connected[:_MAX_NAMED])
        more = f" and {len(connected) - _MAX_NAMED} more" if len(connected) > _MAX_NAMED else ""
        cause = (
            "they may be waiting for the dispatcher"
            if silence or journal_problem
            else "a function of the dataset may be slow or blocked"
        )
        parts.append(f"connected to {names}{more}, no data received: {cause}")
    if awaited_clients:
        parts.append(
            f"no heartbeat from {' and '.join(awaited_clients[:_MAX_NAMED])} of the same job: "
            "elements that were sent there but not consumed are redelivered once the client "
            "expires (`client_timeout_ms` of the dispatcher)"
        )
    elif not tasks and skipped_workers:
        parts.append(
            f"the only workers ({', '.join(skipped_workers[:_MAX_NAMED])}) run in other processes "
            'and have the tag COLOCATED, so target_workers="AUTO" skips them; use "ANY" to read '
            "them, or start a worker without that tag"
        )
    elif not tasks and listed_workers:
        # A silent dispatcher may have learned of it since.
        unreported = "" if silence else ", but the dispatcher still lists them as running"
        parts.append(
            f"the tasks of {', '.join(listed_workers[:_MAX_NAMED])} have ended for this client"
            f"{unreported}"
        )
    elif not tasks and not is_idle:
        if not silence:
            parts.append(
                "the last worker was lost or has finished; the dispatcher is reassigning the "
                "remaining splits"
            )
    elif not tasks and silence <= _ALIVE_SECONDS and has_shards:
        parts.append(
            "all shards of the registered workers were read, and another shard has no worker; "
            "start one for the unassigned slot in `worker_addresses` of the dispatcher at "
            f"{dispatcher}"
        )
    elif not tasks and silence <= _ALIVE_SECONDS:
        parts.append(
            f"no worker is registered with the dispatcher at {dispatcher}; start one, "
            f"for example with `headrace worker --dispatcher {dispatcher}`"
        )
    return "; ".join(parts)
