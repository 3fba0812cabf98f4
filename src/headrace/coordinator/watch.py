"""What the coordinator has seen so far: how much was done, how long it takes, what takes too long.

Pure: no thread or clock.

Rule 1. A function that runs for ten times as long as it does in the median, and for ten seconds, is
        named once, with its worker. One that has returned less than three times is named after a
        minute: the first call may compile something.
Rule 2. What is counted begins with the coordinator, and never falls.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from headrace.coordinator.closure import Closure
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.contact import Contact
from headrace.serving.rates import Rate

__all__ = ["Watch"]

_TIMES = 10
_LEAST_SECONDS = 10.0
_FIRST_SECONDS = 60.0
_REMEMBERED = 64
"""Calls of each function whose seconds are kept,"""
_FUNCTIONS = 256
"""for so many functions."""
_ENOUGH = 3
"""So many calls have a median."""
_LOOK_SECONDS = 1.0


class Watch:
    """Counts what becomes of functions.

    Attributes:
        returned: Calls that have returned or raised.
        failed: Those that raised.
        seconds: For which they ran, in all.
        retried: Calls that were taken back from workers that were lost.
        workers_lost: How often a worker was lost.
        newest: The largest number of a function that was sent.
        largest_gap: By how many functions the oldest one that had not ended was behind one that
            was sent, at most.
        next_look: When `look` is due.
    """

    def __init__(self) -> None:
        self.returned = 0
        self.failed = 0
        self.seconds = 0.0
        self.retried = 0
        self.workers_lost = 0
        self.newest = 0
        self.largest_gap = 0
        self.next_look = 0.0
        self._since: float | None = None
        self._rate: Rate | None = None
        self._counted = 0
        #: Seconds of the last calls, by function.
        self._took: dict[str, deque[float]] = {}
        #: Numbers of those that were named, as long as they run.
        self._named: set[int] = set()

    def up(self, now: float) -> float:
        """Return for how many seconds it has watched."""
        return 0.0 if self._since is None else now - self._since

    def rate(self, now: float) -> float:
        """Return how many functions were over per second, in the last ten seconds or so."""
        return 0.0 if self._rate is None else self._rate.read(now)

    def usual(self, name: str) -> float | None:
        """Return how many seconds a function takes in the median; None: too few have returned."""
        took = self._took.get(name)
        return None if took is None or len(took) < _ENOUGH else statistics.median(took)

    # --- events -----------------------------------------------------------------------------------

    def sent(self, number: int, first: int) -> None:
        """Take note that a function was sent while all below `first` had ended."""
        if number > self.newest:
            self.newest = number
        if number - first > self.largest_gap:
            self.largest_gap = number - first

    def ended(self, name: str, seconds: float, *, failed: bool) -> None:
        """Take note that a worker has answered."""
        self.returned += 1
        self.failed += failed
        self.seconds += seconds
        took = self._took.get(name)
        if took is None:
            if len(self._took) >= _FUNCTIONS:
                del self._took[next(iter(self._took))]
            took = self._took[name] = deque(maxlen=_REMEMBERED)
        took.append(seconds)

    def lost(self, sent: Iterable[Closure]) -> int:
        """Take note that a worker is lost with what it had; return how much of it runs again."""
        again = sum(each.home is None and not each.is_off for each in sent)
        self.workers_lost += 1
        self.retried += again
        return again

    def look(self, queue: ClosureQueue, contacts: Mapping[int, Contact], now: float) -> list[str]:
        """Take note of how many are over; name what takes too long and was not named yet."""
        if self._rate is None:
            self._since, self._rate = now, Rate(now)
        self._rate.add(queue.finished - self._counted, now)
        self._counted = queue.finished
        self.next_look = now + _LOOK_SECONDS
        words: list[str] = []
        running: set[int] = set()
        for closure, begun_at in _running(queue):
            running.add(closure.number)
            seconds = now - begun_at
            if seconds < _LEAST_SECONDS or closure.number in self._named:
                continue
            usual = self.usual(closure.name)
            if seconds >= (_FIRST_SECONDS if usual is None else _TIMES * usual):
                self._named.add(closure.number)
                where = f"worker {closure.worker} ({contacts[closure.worker].address})"
                words.append(_overdue(closure.name, where, seconds, usual))
        self._named &= running
        return words


def _running(queue: ClosureQueue) -> Iterator[tuple[Closure, float]]:
    for load in queue.loads:
        for closure in load.first():
            if closure.begun_at is not None and not closure.is_off:
                yield closure, closure.begun_at


def _overdue(name: str, where: str, seconds: float, usual: float | None) -> str:
    others = "has hardly returned before" if usual is None else f"takes {usual:.2g} s in the median"
    return (
        f"{name} has been running on {where} for {seconds:.0f} s, and {others}: it may hang, or "
        "wait for data or for a parameter server; schedule(..., timeout=) ends such calls"
    )
