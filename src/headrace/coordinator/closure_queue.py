"""Scheduling state machine of closures: assignment to workers, retries and completion.

Rule 1. Closures start in the order of their numbers. A closure that has another closure's value
        as an argument waits for it without blocking later closures. A worker holds at least
        `in_flight` closures, and more if closures are short.
Rule 2. A closure has ended when it has a result or an error, and never runs again. It is done when
        the servers have forgotten its write keys, too (`WriteKeyCleanup`).
Rule 3. A lost worker is fenced first. Then its closures return to the head of the queue with their
        numbers. A closure that was running counts a loss, and fails after too many losses.
Rule 4. With staleness s, closure k starts only after every closure up to k - s - 1 is done. With
        gradient rounds, it starts only when its round is open (`GradientRounds`).
Rule 5. The first error of a function is recorded. Queued closures are cancelled; running closures
        may no longer write, and the queue waits for them. Then the error is raised once, and the
        queue accepts closures again.
Rule 6. The queue never waits for a lost worker: its closures are sent to other workers.

The queue is pure: it takes time as an argument, consumes inputs and returns actions. Closures
pinned to one worker (`schedule_on`) create resources of that worker. The queue does not wait for
them; their errors are raised by the closures that use the resource.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.coordinator.closure import (
    CANCELLED,
    NEVER,
    CancelMode,
    Closure,
    ClosureFailure,
    ClosurePhase,
    ClosureResult,
    Payload,
    QueueActions,
    RoundPush,
    SendClosure,
    cancel_action,
    is_cancellation,
    register_inputs,
    resolve_dependents,
    retries_exhausted_error,
    timeout_error,
)
from headrace.coordinator.worker_pool import WorkerLoad, WorkerPool
from headrace.errors import CancelledError

__all__ = ["ClosureDeadlines", "ClosureQueue", "GradientRounds", "ReadyQueue", "WriteKeyCleanup"]


class ClosureQueue:
    """Closures from `schedule` until they are done.

    Args:
        in_flight: Minimum number of closures that a worker holds at a time.
        threads: Number of closures that a worker runs at a time.
        staleness: Bound of Rule 4; None disables it.
        round_size: Number of closures in a gradient round; None disables rounds.
        max_queued: Maximum number of closures waiting for a worker.
        key_cleanup_delay: Seconds by which key cleanup may be delayed while no caller waits.
    """

    def __init__(
        self,
        *,
        in_flight: int = 2,
        threads: int = 1,
        staleness: int | None = None,
        round_size: int | None = None,
        max_queued: int = 1 << 16,
        key_cleanup_delay: float = 0.0,
    ) -> None:
        self._rounds = None if round_size is None else GradientRounds(round_size)
        self._max_queued = max_queued
        self.unfinished: dict[int, Closure] = {}
        """Closures that are not done, by number; without pinned closures."""
        self._next_number = 1
        self._next_pinned_number = -1
        self._ready = ReadyQueue(staleness, self._rounds)
        self._key_cleanup = WriteKeyCleanup(key_cleanup_delay if staleness is None else 0.0)
        self.worker_pool: WorkerPool = WorkerPool(in_flight, threads)
        """Closures in flight on each connected worker."""
        #: Closures of lost worker sessions, by session, until the session is fenced.
        self._awaiting_fence: dict[int, list[Closure]] = {}
        self._deadlines = ClosureDeadlines()
        self._actions = QueueActions()
        self.failure: ClosureFailure | None = None
        """Error to raise once `is_drained`."""
        self.low_watermark: int = 1
        """Number below which all closures are done."""
        self.num_waiting: int = 0
        """Number of closures not assigned to a worker."""
        self.num_finished: int = 0
        """Number of closures that are done; shows progress."""

    # --- queries --------------------------------------------------------------------------------

    @property
    def is_drained(self) -> bool:
        """Whether all scheduled closures are done."""
        return not self.unfinished

    @property
    def has_capacity(self) -> bool:
        """Whether another closure may be scheduled."""
        return self.num_waiting < self._max_queued

    @property
    def last_number(self) -> int:
        """Number of the most recently scheduled closure."""
        return self._next_number - 1

    @property
    def first_unended(self) -> int:
        """Number of the first closure that has not ended; earlier ones may not be done."""
        return self._key_cleanup.first_unended(self.unfinished, self.last_number)

    def is_done_through(self, number: int) -> bool:
        """Return whether all closures up to and including this number are done."""
        return self.low_watermark > number

    def take_failure(self) -> ClosureFailure | None:
        """Return the error to raise, and reset the queue to accept closures again."""
        failure, self.failure = self.failure, None
        return failure

    # --- inputs from callers --------------------------------------------------------------------

    def schedule(self, closure: Closure, now: float) -> int:
        """Schedule a closure and return its number. Must not be called while there is a failure."""
        assert self.failure is None, (
            "the failure must be raised before another closure is scheduled"
        )
        closure.number, self._next_number = self._next_number, self._next_number + 1
        self.unfinished[closure.number] = closure
        self.num_waiting += 1
        error = register_inputs(closure)
        if error is not None:
            self._end_unsent(closure, error)
            if not is_cancellation(error):
                self._record_failure(error, now)
        elif not closure.num_unready_inputs:
            self._ready.push(closure)
        return closure.number

    def end_round(self) -> int:
        """End the current round with the last scheduled closure; return that closure's number.

        The caller waits for all closures up to this number.
        """
        if self._rounds is not None:
            self._rounds.end_at(self.last_number)
        self._key_cleanup.wait_for(self.last_number)
        return self.last_number

    def schedule_on(self, worker: int, closure: Closure) -> None:
        """Schedule a closure pinned to one worker; no effect if the worker is not connected."""
        closure.number, self._next_pinned_number = (
            self._next_pinned_number,
            self._next_pinned_number - 1,
        )
        closure.pinned_worker = worker
        if (load := self.worker_pool.get(worker)) is not None:
            closure.phase = ClosurePhase.READY
            load.pinned.append(closure)

    def cancel(self, closure: Closure, now: float) -> bool:
        """Cancel a closure, whose result becomes CancelledError; return False if it has one."""
        if closure.result.is_ready:
            return False
        error = CancelledError(CANCELLED)
        if closure.phase in (ClosurePhase.WAITING_FOR_INPUTS, ClosurePhase.READY):
            self._end_unsent(closure, error)
        else:
            self._abandon(closure, error)
        self._handle_dependents(closure.result)
        return True

    # --- inputs from workers --------------------------------------------------------------------

    def worker_connected(self, worker: int, session: int) -> None:
        """Add a worker, or a new session of a worker that was lost."""
        self.worker_pool.add(worker, session)

    def worker_lost(self, worker: int) -> None:
        """Remove a lost worker, and fence its session before its closures are reassigned."""
        if (load := self.worker_pool.remove(worker)) is None:
            return
        for closure in load.in_flight.values():
            closure.phase = (
                ClosurePhase.FENCING if closure.pinned_worker is None else ClosurePhase.DONE
            )
        self._awaiting_fence[load.session] = [
            each for each in load.in_flight.values() if each.pinned_worker is None
        ]
        self._actions.fences.append(load.session)

    def drain_worker(self, worker: int) -> bool:
        """Stop sending closures to a worker; return whether it holds none."""
        if (load := self.worker_pool.get(worker)) is None:
            return True
        self._actions.cancels += load.drain()
        return not load.in_flight

    def closure_returned(
        self,
        session: int,
        number: int,
        payload: Payload | None,
        error: Exception | None,
        *,
        has_written: bool,
        seconds: float,
        now: float,
        optimizer_steps: Any = None,
    ) -> bool:
        """Record how a closure ended; return False if its worker no longer holds it."""
        load = self.worker_pool.get_session(session)
        closure = None if load is None else load.remove(number, now)
        if load is None or closure is None:
            return False
        load.record_duration(seconds)
        closure.may_have_written = closure.may_have_written or has_written
        closure.phase = ClosurePhase.COMPLETING
        self._resolve(closure, payload, error, now)
        if closure.result.error is None:
            closure.optimizer_steps = optimizer_steps
        self._complete(closure)
        return True

    def cancel_answered(self, session: int, number: int, *, is_dropped: bool, now: float) -> None:
        """Record whether a worker dropped a cancelled closure."""
        load = self.worker_pool.get_session(session)
        if load is None:
            return
        if not is_dropped:
            load.mark_started(number, now)
        elif (closure := load.remove(number, now)) is None:
            return
        elif closure.is_cancelled or closure.pinned_worker is not None:
            self._resolve_cancelled(closure)
            self._complete(closure)
        else:
            self._requeue(closure)

    # --- inputs from servers --------------------------------------------------------------------

    def worker_fenced(self, session: int, now: float, error: Exception | None = None) -> None:
        """Handle the fence of a worker session, or the error of the request to fence it."""
        for closure in self._awaiting_fence.pop(session, ()):
            closure.num_losses += closure.started_at is not None
            # Also for a closure that seemed to wait: the message that it started may be lost.
            closure.may_have_written = True
            if closure.is_cancelled:
                self._resolve_cancelled(closure)
            elif error is not None:
                self._resolve(closure, None, error, now)
            elif closure.num_losses > closure.max_losses:
                self._resolve(closure, None, retries_exhausted_error(closure), now)
            else:
                self._requeue(closure)
                continue
            self._complete(closure)

    def write_keys_forgotten(
        self, numbers: Iterable[int], now: float, error: Exception | None = None
    ) -> None:
        """Handle a write-key cleanup by the servers, or the error of the request."""
        for number in numbers:
            closure = self.unfinished.get(number)
            if closure is not None and closure.phase is ClosurePhase.COMPLETING:
                self._finish(closure)
        if error is not None:
            self._record_failure(error, now)

    def round_pushed(self, now: float, error: Exception | None = None) -> None:
        """Handle the push of a round to the servers, or its error."""
        for closure in () if self._rounds is None else self._rounds.round_pushed():
            self._clean_up_keys(closure)
        if error is not None:
            self._record_failure(error, now)

    # --- actions --------------------------------------------------------------------------------

    def take_actions(self, now: float) -> QueueActions:
        """Return the actions to run now and the time until the next call."""
        self._expire_timeouts(now)
        self._abandon_after_drain(now)
        while self._rounds is not None and (complete := self._rounds.take_complete()) is not None:
            if complete.optimizer_steps:
                self._actions.round_push = complete
                break
            self.round_pushed(now)
        self._dispatch(now)
        actions, self._actions = self._actions, QueueActions()
        at_once = self.failure is not None
        actions.key_cleanups = self._key_cleanup.take(now, self.first_unended, at_once=at_once)
        drain_at = NEVER if self.failure is None else self.failure.wake_at
        wake_at = min(
            self._deadlines.next_at,
            self.worker_pool.next_recall_at(),
            drain_at,
            self._key_cleanup.due_at,
        )
        actions.wake_in = max(0.0, wake_at - now)
        return actions

    def _dispatch(self, now: float) -> None:
        for load in self.worker_pool:
            while load.pinned:
                self._send(load.pinned.popleft(), load, now)
        while (closure := self._ready.peek(self.low_watermark)) is not None:
            if (chosen := self.worker_pool.choose_least_busy()) is None:
                return
            self._ready.pop()
            self.num_waiting -= 1
            self._send(closure, chosen, now)
        self._actions.cancels += self.worker_pool.recall_waiting(now)

    def _send(self, closure: Closure, load: WorkerLoad, now: float) -> None:
        closure.phase = ClosurePhase.SENT
        closure.worker, closure.session, closure.is_recalled = load.worker, load.session, False
        closure.started_at = None
        closure.num_attempts += 1
        load.send(closure, now)
        self._actions.sends.append(SendClosure(closure, load.worker, load.session))
        if closure.timeout is not None:
            self._deadlines.add(closure, now)

    def _expire_timeouts(self, now: float) -> None:
        for closure in self._deadlines.pop_expired(now):
            error = timeout_error(closure)
            self._abandon(closure, error)
            self._handle_dependents(closure.result)
            self._record_failure(error, now)

    def _abandon_after_drain(self, now: float) -> None:
        if self.failure is not None and now >= self.failure.wake_at:
            self.failure.is_drain_over = True
            for closure in [c for c in self.unfinished.values() if c.phase is ClosurePhase.SENT]:
                self._abandon(closure, CancelledError(CANCELLED))

    # --- transitions of a closure ---------------------------------------------------------------

    def _requeue(self, closure: Closure) -> None:
        self.num_waiting += 1
        self._ready.push(closure)

    def _end_unsent(self, closure: Closure, error: Exception) -> None:
        """End a closure that is not assigned to a worker."""
        self.num_waiting -= 1
        closure.result.resolve(None, error)
        self._complete(closure)

    def _abandon(self, closure: Closure, error: Exception) -> None:
        """End a closure that was sent to a worker; the worker's answer frees its slot."""
        closure.is_cancelled = True
        closure.may_have_written = True
        closure.result.resolve(None, error)
        if closure.phase is ClosurePhase.SENT:
            self._actions.cancels.append(cancel_action(closure, CancelMode.ABANDON))

    def _resolve(
        self, closure: Closure, payload: Payload | None, error: Exception | None, now: float
    ) -> None:
        if closure.result.resolve(payload, error):
            self._handle_dependents(closure.result)
            if error is not None and closure.pinned_worker is None:
                self._record_failure(error, now)

    def _resolve_cancelled(self, closure: Closure) -> None:
        if closure.result.resolve(None, CancelledError(CANCELLED)):
            self._handle_dependents(closure.result)

    def _handle_dependents(self, resolved: ClosureResult) -> None:
        """Continue closures that waited for a result, and transitively their dependents."""
        for closure, error in resolve_dependents(resolved):
            if error is None:
                self._ready.push(closure)
            else:
                self._end_unsent(closure, error)

    def _record_failure(self, error: Exception, now: float) -> None:
        """Record the error of a function; the first one cancels all other closures."""
        failure = self.failure
        if failure is not None:
            if not is_cancellation(error):
                failure.later_errors.append(error)
            return
        self.failure = failure = ClosureFailure(error, now)
        self.end_round()
        for closure in list(self.unfinished.values()):
            if closure.phase in (ClosurePhase.WAITING_FOR_INPUTS, ClosurePhase.READY):
                self._end_unsent(closure, CancelledError(CANCELLED))
                failure.num_cancelled += 1
            elif closure.phase is ClosurePhase.FENCING:
                closure.is_cancelled = True
            elif closure.phase is ClosurePhase.SENT and not closure.is_cancelled:
                closure.is_cancelled = True
                self._actions.cancels.append(cancel_action(closure, CancelMode.REJECT_WRITES))

    def _complete(self, closure: Closure) -> None:
        if closure.pinned_worker is not None:
            closure.phase = ClosurePhase.DONE
        elif self._rounds is not None:
            closure.phase = ClosurePhase.COMPLETING
            self._rounds.closure_ended(closure)
        else:
            self._clean_up_keys(closure)

    def _clean_up_keys(self, closure: Closure) -> None:
        """Make servers forget a closure's write keys, if there are any, then finish it."""
        closure.call_spec, closure.inputs, closure.optimizer_steps = None, (), None
        if closure.may_have_written:
            closure.phase = ClosurePhase.COMPLETING
            self._key_cleanup.add(closure)
        else:
            self._finish(closure)

    def _finish(self, closure: Closure) -> None:
        closure.phase = ClosurePhase.DONE
        del self.unfinished[closure.number]
        self.num_finished += 1
        while self.low_watermark < self._next_number and self.low_watermark not in self.unfinished:
            self.low_watermark += 1


# --- ready closures, ordered by number regardless of arrival order --------------------------------


class ReadyQueue:
    """Heap of closures that wait for a worker; skips closures that are no longer READY.

    Args:
        staleness: Maximum number of unfinished earlier closures when a closure starts; None
            disables the limit.
        rounds: Gradient rounds, which decide which closures may start; None disables rounds.
    """

    def __init__(self, staleness: int | None, rounds: GradientRounds | None) -> None:
        self._staleness = staleness
        self._rounds = rounds
        self._heap: list[tuple[int, Closure]] = []

    def push(self, closure: Closure) -> None:
        """Add a closure, and set its phase to READY."""
        closure.phase = ClosurePhase.READY
        heapq.heappush(self._heap, (closure.number, closure))

    def peek(self, low_watermark: int) -> Closure | None:
        """Return the next closure, or None if none may start.

        Args:
            low_watermark: Number below which all closures are done.
        """
        heap = self._heap
        while heap:
            closure = heap[0][1]
            if closure.phase is ClosurePhase.READY:
                return closure if self._may_start(closure.number, low_watermark) else None
            heapq.heappop(heap)
        return None

    def _may_start(self, number: int, low_watermark: int) -> bool:
        if self._staleness is not None and low_watermark < number - self._staleness:
            return False
        return self._rounds is None or self._rounds.may_start(number)

    def pop(self) -> None:
        """Remove the closure that `peek` returned."""
        heapq.heappop(self._heap)


# --- write keys of ended closures, and when to make servers forget them. Pure ---------------------

# Rule 1. While no caller waits, keys are cleaned up in batches: one request per closure would cost
#         more than a short function.
# Rule 2. A caller waits if `join` or `done` asked for numbers up to one (`wait_for`), and all of
#         those have ended. With bounded staleness no cleanup is delayed, since the next closure
#         may wait for it.
# Rule 3. A cancelled closure may still write until the cleanup makes servers reject its writes, so
#         its cleanup is immediate. So is cleanup after an error, and of many closures.

_MAX_PENDING_KEYS = 256
"""Number of pending closures that triggers a cleanup; limits what servers remember."""


class WriteKeyCleanup:
    """Numbers of closures that have ended and whose write keys servers still hold.

    Args:
        delay: Maximum seconds before a cleanup; 0 makes every cleanup immediate.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._numbers: list[int] = []
        self._smallest_number = 0
        self._is_urgent = delay <= 0
        self.due_at: float = NEVER
        """Time of the next cleanup at the latest."""
        #: Ascending numbers; for each, a caller waits until all closures up to it are done.
        self._awaited_numbers: deque[int] = deque()
        self._first_unended = 1

    def wait_for(self, number: int) -> None:
        """Record that a caller waits until all closures up to this number are done."""
        if not self._awaited_numbers or number > self._awaited_numbers[-1]:
            self._awaited_numbers.append(number)

    def add(self, closure: Closure) -> None:
        """Add an ended closure whose keys must be forgotten."""
        number = closure.number
        self._smallest_number = min(self._smallest_number, number) if self._numbers else number
        self._numbers.append(number)
        self._is_urgent = self._is_urgent or closure.is_cancelled

    def first_unended(self, unfinished: Mapping[int, Closure], last_number: int) -> int:
        """Return the number of the first closure that has not ended; `last_number` + 1 if all have.

        Args:
            unfinished: Closures that are not done. An ended closure never runs again.
            last_number: Number of the most recently scheduled closure.
        """
        first = self._first_unended
        while first <= last_number:
            closure = unfinished.get(first)
            if closure is not None and closure.phase is not ClosurePhase.COMPLETING:
                break
            first += 1
        self._first_unended = first
        return first

    def take(self, now: float, first_unended: int, *, at_once: bool) -> list[int]:
        """Return the closures whose keys servers should forget now.

        Args:
            now: Time in seconds.
            first_unended: Number of the first closure that has not ended.
            at_once: Whether a caller waits for all closures.
        """
        if not self._numbers:
            return []
        if self.due_at == NEVER:
            self.due_at = now + self._delay
        while self._awaited_numbers and self._awaited_numbers[0] < min(
            first_unended, self._smallest_number
        ):
            self._awaited_numbers.popleft()  # all have ended, and their keys were cleaned up
        if not (
            at_once
            or self._is_urgent
            or (self._awaited_numbers and self._awaited_numbers[0] < first_unended)
            or now >= self.due_at
            or len(self._numbers) >= _MAX_PENDING_KEYS
        ):
            return []
        numbers, self._numbers = self._numbers, []
        self.due_at, self._is_urgent = NEVER, self._delay <= 0
        return numbers


# --- timeouts of running closures -----------------------------------------------------------------


class ClosureDeadlines:
    """Running attempts, ordered by the time at which their timeout must be checked."""

    def __init__(self) -> None:
        #: (time of the check, closure number, attempt, closure).
        self._heap: list[tuple[float, int, int, Closure]] = []

    @property
    def next_at(self) -> float:
        """Time of the next check."""
        return self._heap[0][0] if self._heap else NEVER

    def add(self, closure: Closure, now: float) -> None:
        """Track an attempt that was just sent."""
        assert closure.timeout is not None
        entry = (now + closure.timeout, closure.number, closure.num_attempts, closure)
        heapq.heappush(self._heap, entry)

    def pop_expired(self, now: float) -> list[Closure]:
        """Return closures that exceeded their timeout.

        Time that a closure waits for a thread of its worker does not count.
        """
        expired: list[Closure] = []
        while self._heap and self._heap[0][0] <= now:
            _, number, attempt, closure = heapq.heappop(self._heap)
            if (
                closure.phase is not ClosurePhase.SENT
                or closure.num_attempts != attempt
                or closure.is_cancelled
            ):
                continue
            assert closure.timeout is not None
            deadline = closure.timeout + (now if closure.started_at is None else closure.started_at)
            if deadline <= now:
                expired.append(closure)
            else:
                heapq.heappush(self._heap, (deadline, number, attempt, closure))
        return expired


# --- gradient rounds: membership and completion. Pure ---------------------------------------------

#     closures 1 2 3 | 4 5 6 | 7            rounds of 3; `join` ended the last one early
#
# Rule 1. A closure may start when its round is open: the previous round is complete, and servers
#         have applied its mean.
# Rule 2. A round has `size` consecutive numbers, or fewer if ended early. It is complete when all
#         of them have ended, successfully or not.


class GradientRounds:
    """Gradient rounds of consecutive closures; one round is open at a time.

    Args:
        size: Number of closures in a round.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        #: First number of the open round, which ends at `_last_number`.
        self._first_number = 1
        #: Numbers of closures that end a round early.
        self._early_ends: set[int] = set()
        #: Ended closures of this round and later ones.
        self._ended: dict[int, Closure] = {}
        #: Number below which all closures have ended.
        self._next_unended = 1
        #: Closures of the round whose mean is being pushed to servers; empty if none is.
        self._pushing: list[Closure] = []

    @property
    def _last_number(self) -> int:
        """Number of the last closure of the open round."""
        return min([self._first_number + self._size - 1, *self._early_ends])

    def may_start(self, number: int) -> bool:
        """Return whether a closure may be sent to a worker."""
        return number <= self._last_number and not self._pushing

    def end_at(self, number: int) -> None:
        """End a round at this number; the next number begins another round."""
        if number >= self._first_number:
            self._early_ends.add(number)

    def closure_ended(self, closure: Closure) -> None:
        """Record that a closure has ended or will never be sent."""
        self._ended[closure.number] = closure
        while self._next_unended in self._ended:
            self._next_unended += 1

    def take_complete(self) -> RoundPush | None:
        """Return the completed round once, or None. `round_pushed` must follow."""
        last = self._last_number
        if self._pushing or self._next_unended <= last:
            return None
        closures = [self._ended.pop(number) for number in range(self._first_number, last + 1)]
        self._pushing = closures
        steps = [each.optimizer_steps for each in closures if each.optimizer_steps is not None]
        # The round is written with the write key of its last closure.
        closures[-1].may_have_written |= bool(steps)
        return RoundPush(last, steps)

    def round_pushed(self) -> list[Closure]:
        """Return the closures of the pushed round, and open the next round."""
        closures, self._pushing = self._pushing, []
        self._first_number = self._last_number + 1
        self._early_ends = {each for each in self._early_ends if each >= self._first_number}
        return closures
