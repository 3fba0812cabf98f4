"""Contact with the dispatcher: when it is asked, and whether it still counts this client in.

Rule 1. It is asked once a second, or as seldom as it wishes where there are many clients, and one
        question at a time; at once where something is urgent, and more often while the client waits
        for what only the dispatcher can say.
Rule 2. A client that did not run for half the time after which it counts as gone uses nothing
        before the dispatcher has answered a heartbeat from after that pause.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from headrace.service.client.task import Task
from headrace.waiting import Backoff, WaitWarnings

__all__ = ["CALL_SECONDS", "HEARTBEAT_SECONDS", "Contact", "Waiting", "describe_missing"]


HEARTBEAT_SECONDS = 1.0

CALL_SECONDS = 2.0

"""How long an answer is waited for."""


class Contact:
    """When the dispatcher is asked.

    Args:
        now: The time, in seconds of a steady clock; so is every other `now`.
    """

    def __init__(self, now: float) -> None:
        self.lease = math.inf
        """Seconds of silence after which this client counts as gone."""
        self._interval = HEARTBEAT_SECONDS
        self._heard = now
        self._beat_at = now + HEARTBEAT_SECONDS
        self._backoff = Backoff(0.02, longest=HEARTBEAT_SECONDS)
        #: When the heartbeat was sent that is not answered.
        self._asked_at: float | None = None
        self._urgent = False
        #: Heartbeats that must be answered before anything is used (rule 2).
        self._renewals = 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether this client may count as gone."""
        return self._renewals > 0

    def silence(self, now: float) -> float:
        """Return for how many seconds it has not answered; 0.0: no longer than is usual."""
        seconds = now - self._heard
        return seconds if seconds > self._interval + 2 * CALL_SECONDS else 0.0

    # --- what happens ---------------------------------------------------------------------------

    def hurry(self) -> None:
        """Ask soon, whatever the rhythm is."""
        self._urgent = True

    def answered(self, now: float, interval: float) -> None:
        """Take note of the answer to a heartbeat, and of how long it wishes not to be asked."""
        self._interval = interval
        self._renewals = max(0, self._renewals - 1)
        self._urgent = self._urgent or self._renewals > 0
        self._heard, self._asked_at = now, None

    def unheard(self, now: float) -> None:
        """Take note that no answer came."""
        self._asked_at = None
        self._beat_at = now + HEARTBEAT_SECONDS

    def rest(self, now: float, *, waits: bool) -> None:
        """Let time pass until the next heartbeat.

        Args:
            now: The time.
            waits: Something waits for a verdict: soon at first, then more and more patiently.
        """
        if waits:
            self._beat_at = now + next(self._backoff)
        else:
            self._beat_at = now + self._interval
            self._backoff.reset()

    def doubt(self, pause: float) -> bool:
        """Take note that this client did not run for so long; return whether it may be gone now."""
        if self._renewals or not pause > self.lease / 2:
            return False
        # The answer to a heartbeat from before the pause says nothing.
        self._renewals = 1 if self._asked_at is None else 2
        self._urgent = True
        return True

    def forgive(self, pause: float, now: float) -> None:
        """Leave out `pause` seconds in which this client did not run."""
        self._heard = min(now, self._heard + pause)

    # --- asking ---------------------------------------------------------------------------------

    def may_ask(self, now: float) -> bool:
        """Whether the dispatcher is to be asked now, with everything that it should know."""
        if self._asked_at is not None and now - self._asked_at > CALL_SECONDS:
            self.unheard(now)
        return self._asked_at is None and (self._urgent or now >= self._beat_at)

    def asked(self, now: float) -> None:
        """Take note that it was asked."""
        self._asked_at, self._urgent = now, False

    def next_in(self, now: float) -> float:
        """Return the seconds after which to look again."""
        if self._asked_at is not None:
            return self._asked_at + CALL_SECONDS - now + 0.001
        return max(0.0, self._beat_at - now)


# --- waiting: since when the consumer waits for an element, and what is said of it ----------------

# Rule. A wait of ten seconds says what is missing, then once a minute. It ends in an error only if
#       for `timeout` seconds there was nobody who could deliver. Time in which this client itself
#       did
#       not run does not count.

_ALIVE_SECONDS = 60.0

"""A dispatcher that was heard from within so many seconds counts as one that may list workers."""

_MOST_NAMED = 3

_DEAL_SECONDS = 5.0

"""Without a task for so long: the dispatcher has none to give. What is left of a lost one it deals
anew, to workers that had finished theirs, once it knows what came of it."""


class Waiting:
    """Since when the consumer waits, and since when nobody could deliver.

    Args:
        timeout: Seconds without anybody who could deliver, after which waiting is an error.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._since: float | None = None
        self._warnings = WaitWarnings()
        #: Since when there has been nobody who could deliver, and since when no task.
        self._helpless_since: float | None = None
        self._idle_since: float | None = None

    @property
    def is_going_on(self) -> bool:
        """Whether the consumer waits."""
        return self._since is not None

    def seconds(self, now: float) -> float:
        """Return for how long the consumer has waited."""
        return 0.0 if self._since is None else now - self._since

    # --- what happens ---------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Take note that the consumer waits for the next element, from now on."""
        self._since = now
        self._warnings.reset()

    def end(self) -> None:
        """Take note that the consumer does not wait."""
        self._since = None

    def helped(self) -> None:
        """Take note that somebody can deliver."""
        self._helpless_since = None

    def helpless(self, now: float) -> None:
        """Take note that nobody can deliver."""
        if self._helpless_since is None:
            self._helpless_since = now

    def forgive(self, pause: float, now: float) -> None:
        """Leave out `pause` seconds in which this client did not run."""
        if self._since is not None:
            # Less where what came meanwhile has begun the wait again.
            self._since += min(pause, now - self._since)
        if self._helpless_since is not None:
            self._helpless_since = min(now, self._helpless_since + pause)
        if self._idle_since is not None:
            self._idle_since = min(now, self._idle_since + pause)

    def idle(self, now: float, *, is_so: bool) -> None:
        """Take note of whether there is no task to read from."""
        if not is_so:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    # --- what follows ---------------------------------------------------------------------------

    def is_idle_for_long(self, now: float) -> bool:
        """Whether there has been no task to read from for longer than it takes to deal one."""
        return self._idle_since is not None and now - self._idle_since >= _DEAL_SECONDS

    def is_hopeless(self, now: float) -> bool:
        """Whether to wait no more: too long with nobody who could deliver."""
        if self._since is None or self._helpless_since is None:
            return False
        return now >= max(self._since, self._helpless_since) + self._timeout

    def is_worth_a_warning(self, now: float) -> bool:
        """Whether to say what is missing; not again for a while after that."""
        return self._since is not None and self._warnings.is_due(now - self._since)

    def next_in(self, now: float) -> float:
        """Return the seconds after which to look again, while it goes on."""
        if self._since is None:
            return math.inf
        times = [self._since + self._warnings.due_after]
        if self._helpless_since is not None:
            times.append(max(self._since, self._helpless_since) + self._timeout)
        return max(0.0, min(times) - now)


def describe_missing(
    dispatcher: str,
    silence: float,
    tasks: Collection[Task],
    others: Sequence[str],
    now: float,
    passed_over: Sequence[str] = (),
    *,
    listed: Sequence[str] = (),
    is_idle: bool = True,
    has_shares: bool = False,
    journal_problem: str = "",
) -> str:
    """Return what stands between the consumer and the next element.

    Args:
        dispatcher: Its address.
        silence: Seconds for which it has not answered, if that is long.
        tasks: Those that are read.
        others: Clients of the same job that are not heard, where only that keeps it from its end.
        now: The time.
        passed_over: Addresses of workers that it is not to read.
        listed: Addresses of workers of which the dispatcher says that they have a task.
        is_idle: Whether there has been no task for long, where there is none.
        has_shares: Whether each worker has a share that no other reads meanwhile.
        journal_problem: Why the dispatcher cannot record what it assigns, if it cannot.
    """
    parts = []
    if silence and not journal_problem:
        parts.append(
            f"the dispatcher at {dispatcher} has not answered for {silence:.0f} s (is it "
            "running, and is this its address?)"
        )
    if journal_problem:
        parts.append(f"the dispatcher at {dispatcher} assigns nothing: {journal_problem}")
    lost = [task for task in tasks if task.problem]
    parts += [
        f"the worker at {task.address.worker_address} cannot be reached since "
        f"{now - task.problem_since:.0f} s ({task.problem})"
        for task in lost[:_MOST_NAMED]
    ]
    working = [task for task in tasks if not task.problem]
    if working:
        names = ", ".join(task.address.worker_address for task in working[:_MOST_NAMED])
        more = f" and {len(working) - _MOST_NAMED} more" if len(working) > _MOST_NAMED else ""
        cause = (
            "they may be waiting for the dispatcher"
            if silence or journal_problem
            else "a function of the dataset may take long, or wait for something"
        )
        parts.append(f"connected to {names}{more}, from which nothing comes: {cause}")
    if others:
        parts.append(
            f"{' and '.join(others[:_MOST_NAMED])} of the same job cannot be heard: what "
            "was sent there and not used comes here once it counts as gone "
            "(`client_timeout_ms` of the dispatcher)"
        )
    elif not tasks and passed_over:
        parts.append(
            f"the only workers ({', '.join(passed_over[:_MOST_NAMED])}) are in other processes and "
            'tagged COLOCATED, so that target_workers="AUTO" leaves them to those; use "ANY" to '
            "read them, or start a worker without that tag"
        )
    elif not tasks and listed:
        # Of a silent dispatcher it is not known what it has heard since.
        unheard = "" if silence else ", and the dispatcher has not heard of that from there"
        parts.append(f"nothing more comes from {', '.join(listed[:_MOST_NAMED])}{unheard}")
    elif not tasks and not is_idle:
        if not silence:
            parts.append(
                "the last worker that it was read from is gone or has finished, and what is left "
                "is dealt to others"
            )
    elif not tasks and silence <= _ALIVE_SECONDS and has_shares:
        parts.append(
            "the shares of all workers that are there were read, and another one has no worker: "
            f"start one for the empty place in `worker_addresses` of the dispatcher at {dispatcher}"
        )
    elif not tasks and silence <= _ALIVE_SECONDS:
        parts.append(
            f"no worker is registered with the dispatcher at {dispatcher}; start one, "
            f"for example with `headrace worker --dispatcher {dispatcher}`"
        )
    return "; ".join(parts)
