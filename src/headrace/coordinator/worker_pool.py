"""Closures in flight on each worker, as the queue tracks them.

A worker runs closures in the order in which they were sent, on a fixed number of threads: the
first `threads` of its closures run, the others wait.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator

from headrace.coordinator.closure import NEVER, CancelAction, CancelMode, Closure, cancel_action

__all__ = ["WorkerLoad", "WorkerPool"]


_TARGET_SECONDS = 10e-3
"""Seconds of work to keep queued at a worker, so that it does not idle."""
_MAX_WINDOW = 64
_MIN_SECONDS = 2e-5
_SMOOTHING = 0.2


class WorkerLoad:
    """Load of one worker session.

    Args:
        worker: Number of the worker.
        session: Number of the session.
        in_flight: Minimum number of closures to keep in flight, if available.
        threads: Number of closures that the worker runs at a time.
    """

    def __init__(self, worker: int, session: int, in_flight: int, threads: int) -> None:
        self.worker = worker
        self.session = session
        self.threads = threads
        self._min_in_flight = max(in_flight, threads)
        #: Closures sent and not answered, oldest first.
        self.in_flight: dict[int, Closure] = {}
        #: Closures pinned to this worker that were not sent.
        self.pinned: deque[Closure] = deque()
        self.is_draining: bool = False
        #: Value of the pool's turn counter when it was last chosen; makes workers take turns.
        self.last_turn = 0
        self._mean_seconds: float | None = None
        self.window: int = self._min_in_flight
        """Maximum number of closures in flight; grows if closures are short."""

    @property
    def has_capacity(self) -> bool:
        """Whether another closure may be sent."""
        return not self.is_draining and len(self.in_flight) < self.window

    @property
    def busy_since(self) -> float:
        """Start time of the oldest running closure; 0.0 if none runs."""
        return next((each.started_at for each in self.in_flight.values() if each.started_at), 0.0)

    def record_duration(self, seconds: float) -> None:
        """Update the mean run time; a single long closure counts at once."""
        mean = self._mean_seconds
        if mean is not None and seconds <= 10 * mean:
            seconds = mean + _SMOOTHING * (seconds - mean)
        self._mean_seconds = seconds
        target_in_flight = int(_TARGET_SECONDS / max(seconds, _MIN_SECONDS)) * self.threads
        self.window = max(self._min_in_flight, min(_MAX_WINDOW, target_in_flight))

    def send(self, closure: Closure, now: float) -> None:
        """Record that a closure is sent."""
        self.in_flight[closure.number] = closure
        if len(self.in_flight) <= self.threads:
            closure.started_at = now

    def mark_started(self, number: int, now: float) -> None:
        """Record that the worker reported a closure as running."""
        closure = self.in_flight.get(number)
        if closure is not None and closure.started_at is None:
            closure.started_at = now

    def remove(self, number: int, now: float) -> Closure | None:
        """Remove and return a closure; return None if it is not in flight."""
        closure = self.in_flight.pop(number, None)
        if closure is not None and self.in_flight:
            for each in self.running_closures():
                if each.started_at is None:
                    each.started_at = now
        return closure

    def drain(self) -> list[CancelAction]:
        """Stop accepting closures; return the recalls of all in flight, once."""
        if self.is_draining:
            return []
        self.is_draining = True
        self.pinned.clear()
        return [cancel_action(closure, CancelMode.RECALL) for closure in self.in_flight.values()]

    def running_closures(self) -> list[Closure]:
        """Return the closures that run, as far as known."""
        return list(itertools.islice(self.in_flight.values(), self.threads))

    def find_recallable(self) -> Closure | None:
        """Return the last closure in the run order, if it waits and may run elsewhere."""
        for closure in reversed(self.in_flight.values()):
            if (
                closure.pinned_worker is None
                and not closure.is_cancelled
                and not closure.is_recalled
            ):
                return closure if closure.started_at is None else None
        return None


# --- connected workers and the choice of the next one ---------------------------------------------

_MOST_BUSY = (sys.maxsize, 0)
_RECALL_SECONDS = 0.05
"""Seconds that a closure waits behind another before it is recalled for an idle worker."""


class WorkerPool:
    """Worker loads by worker number and by session number.

    Args:
        in_flight: Minimum number of closures that a worker holds at a time.
        threads: Number of closures that a worker runs at a time.
    """

    def __init__(self, in_flight: int, threads: int) -> None:
        self._in_flight = in_flight
        self._threads = threads
        self._by_worker: dict[int, WorkerLoad] = {}
        self._by_session: dict[int, WorkerLoad] = {}
        self._num_turns = 0

    def __iter__(self) -> Iterator[WorkerLoad]:
        return iter(self._by_worker.values())

    def add(self, worker: int, session: int) -> None:
        """Add a worker, or a new session of a worker that was lost."""
        load = WorkerLoad(worker, session, self._in_flight, self._threads)
        self._by_worker[worker] = self._by_session[session] = load

    def remove(self, worker: int) -> WorkerLoad | None:
        """Remove a worker; return its load, or None if it is not connected."""
        load = self._by_worker.pop(worker, None)
        if load is not None:
            del self._by_session[load.session]
        return load

    def get(self, worker: int) -> WorkerLoad | None:
        """Return the load of a worker, or None if it is not connected."""
        return self._by_worker.get(worker)

    def get_session(self, session: int) -> WorkerLoad | None:
        """Return the load of a session, or None if it has ended."""
        return self._by_session.get(session)

    def choose_least_busy(self) -> WorkerLoad | None:
        """Return the worker for the next closure, or None if none has capacity."""
        chosen: WorkerLoad | None = None
        least = _MOST_BUSY
        for load in self._by_worker.values():
            if load.has_capacity:
                # Among equally loaded workers, the one chosen least recently.
                busy = len(load.in_flight), load.last_turn
                if busy < least:
                    chosen, least = load, busy
        if chosen is None:
            return None
        self._num_turns += 1
        chosen.last_turn = self._num_turns
        return chosen

    def recall_waiting(self, now: float) -> list[CancelAction]:
        """Recall closures that wait at busy workers, at most one per idle worker."""
        idle = sum(map(_is_idle, self._by_worker.values()))
        found: list[CancelAction] = []
        for load in self._by_worker.values() if idle else ():
            closure = load.find_recallable()
            waits = closure is not None and load.busy_since + _RECALL_SECONDS <= now
            if closure is not None and waits and len(found) < idle:
                closure.is_recalled = True
                found.append(cancel_action(closure, CancelMode.RECALL))
        return found

    def next_recall_at(self) -> float:
        """Return the time at which a closure may next be recalled."""
        if not any(map(_is_idle, self._by_worker.values())):
            return NEVER
        waiting = [load for load in self._by_worker.values() if load.find_recallable() is not None]
        return min((load.busy_since + _RECALL_SECONDS for load in waiting), default=NEVER)


def _is_idle(load: WorkerLoad) -> bool:
    return not load.in_flight and load.has_capacity
