"""What one worker has to do, as the queue sees it.

A worker takes closures in the order in which they were sent, on so many threads: the first of those
that it has run, the others wait.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator

from headrace.coordinator.closure import NEVER, CallOff, Closure, How, call_off

__all__ = ["Load", "Roster"]


_WORTH_SECONDS = 10e-3
"""Seconds of work that a worker should have in hand, so that it waits for nobody."""
_MOST = 64
_SHORTEST = 2e-5
_WEIGHT = 0.2


class Load:
    """One life of a worker.

    Args:
        worker: Its number.
        session: The number of this life.
        in_flight: How many closures it has at least, where there are as many.
        threads: How many it runs at a time.
    """

    def __init__(self, worker: int, session: int, in_flight: int, threads: int) -> None:
        self.worker = worker
        self.session = session
        self.threads = threads
        self._in_flight = max(in_flight, threads)
        #: Sent and not answered, the oldest first.
        self.running: dict[int, Closure] = {}
        #: Closures for this worker alone that wait to be sent.
        self.private: deque[Closure] = deque()
        self.is_leaving = False
        #: Counts what was sent to any worker, so that they take turns.
        self.turn = 0
        self._seconds: float | None = None
        self.window = self._in_flight
        """How many closures it may have: more than asked for where they are short."""

    @property
    def has_room(self) -> bool:
        """Whether it may be sent another one."""
        return not self.is_leaving and len(self.running) < self.window

    @property
    def since(self) -> float:
        """Since when the first that it has runs; 0.0: it has none."""
        return next((each.begun_at for each in self.running.values() if each.begun_at), 0.0)

    def took(self, seconds: float) -> None:
        """Take note of how long a closure ran; one long one counts at once."""
        mean = self._seconds
        if mean is not None and seconds <= 10 * mean:
            seconds = mean + _WEIGHT * (seconds - mean)
        self._seconds = seconds
        enough = int(_WORTH_SECONDS / max(seconds, _SHORTEST)) * self.threads
        self.window = max(self._in_flight, min(_MOST, enough))

    def send(self, closure: Closure, now: float) -> None:
        """Take note of a closure that is sent."""
        self.running[closure.number] = closure
        if len(self.running) <= self.threads:
            closure.begun_at = now

    def begins(self, number: int, now: float) -> None:
        """Take note that a closure has a thread, as the worker says."""
        closure = self.running.get(number)
        if closure is not None and closure.begun_at is None:
            closure.begun_at = now

    def remove(self, number: int, now: float) -> Closure | None:
        """Take note that it does not have a closure any more; None: it had none of this number."""
        closure = self.running.pop(number, None)
        if closure is not None and self.running:
            for each in self.first():
                if each.begun_at is None:
                    each.begun_at = now
        return closure

    def leave(self) -> list[CallOff]:
        """Get nothing more; return what calls back what waits here, once."""
        if self.is_leaving:
            return []
        self.is_leaving = True
        self.private.clear()
        return [call_off(closure, How.RECALL) for closure in self.running.values()]

    def first(self) -> list[Closure]:
        """Return those that run, as far as is known from here."""
        return list(itertools.islice(self.running.values(), self.threads))

    def last_to_wait(self) -> Closure | None:
        """Return the closure that would run last, if it waits and may run elsewhere."""
        for closure in reversed(self.running.values()):
            if closure.home is None and not closure.is_off and not closure.is_recalled:
                return closure if closure.begun_at is None else None
        return None


# --- the workers that are there, and which of them is next ----------------------------------------

_MOST_BUSY = (sys.maxsize, 0)
_RECALL_SECONDS = 0.05
"""For so long a closure waits behind another one before it is asked back for an idle worker."""


class Roster:
    """Loads, by the number of the worker and by the number of its life.

    Args:
        in_flight: Closures that a worker has at a time, at least.
        threads: Closures that a worker runs at a time.
    """

    def __init__(self, in_flight: int, threads: int) -> None:
        self._in_flight = in_flight
        self._threads = threads
        self._loads: dict[int, Load] = {}
        self._lives: dict[int, Load] = {}
        self._turns = 0

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def add(self, worker: int, session: int) -> None:
        """Take in a worker, or another life of one that was lost."""
        load = Load(worker, session, self._in_flight, self._threads)
        self._loads[worker] = self._lives[session] = load

    def remove(self, worker: int) -> Load | None:
        """Let go of a worker; return what it had, or None if it was not there."""
        load = self._loads.pop(worker, None)
        if load is not None:
            del self._lives[load.session]
        return load

    def of(self, worker: int) -> Load | None:
        """Return what a worker has; None: it is not there."""
        return self._loads.get(worker)

    def living(self, session: int) -> Load | None:
        """Return what a worker has in this life; None: it is over."""
        return self._lives.get(session)

    def least_busy(self) -> Load | None:
        """Return who gets a closure now; None: nobody has room."""
        chosen: Load | None = None
        least = _MOST_BUSY
        for load in self._loads.values():
            if load.has_room:
                # Of those with as much to do, the one that has waited longest.
                busy = len(load.running), load.turn
                if busy < least:
                    chosen, least = load, busy
        if chosen is None:
            return None
        self._turns += 1
        chosen.turn = self._turns
        return chosen

    def recall(self, now: float) -> list[CallOff]:
        """Ask back closures that wait at busy workers, as many as there are idle workers."""
        idle = sum(map(_is_idle, self._loads.values()))
        found: list[CallOff] = []
        for load in self._loads.values() if idle else ():
            closure = load.last_to_wait()
            waits = closure is not None and load.since + _RECALL_SECONDS <= now
            if closure is not None and waits and len(found) < idle:
                closure.is_recalled = True
                found.append(call_off(closure, How.RECALL))
        return found

    def next_look(self) -> float:
        """Return when there may be something to be asked back."""
        if not any(map(_is_idle, self._loads.values())):
            return NEVER
        waiting = [load for load in self._loads.values() if load.last_to_wait() is not None]
        return min((load.since + _RECALL_SECONDS for load in waiting), default=NEVER)


def _is_idle(load: Load) -> bool:
    return not load.running and load.has_room
