"""The workers that are there, and which of them is next."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from headrace.coordinator.decided import NEVER, CallOff, How, call_off
from headrace.coordinator.load import Load

__all__ = ["Roster"]

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
