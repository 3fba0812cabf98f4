"""One worker, as the coordinator sees it: whether it is there, and what it was sent."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.coordinator.closure import Closure, Payload
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.messages import Ran
from headrace.errors import FailedPreconditionError
from headrace.serving.rates import Rate
from headrace.versions import Versions

__all__ = ["Contact", "Ended", "Watch"]


_FIRST_DELAY = 0.05
_LONGEST_DELAY = 1.0
_FORGET_SECONDS = 300.0
"""For so long a worker that announced itself is remembered when nothing is heard of it."""


class Ended(NamedTuple):
    """A closure that has ended.

    Attributes:
        ran: How.
        steps: Of optimizers, that it took; None: none.
        payload: Its value; None: it is large, and has to be taken.
    """

    ran: Ran
    steps: Payload | None
    payload: Payload | None


@dataclass(eq=False)
class Contact:
    """A worker.

    Attributes:
        worker: Its number.
        address: Where it listens.
        since: Since when it is there, or is not.
        session: Number of its life, from the greeting on.
        is_asked: Whether it was greeted and has not answered.
        is_there: Whether it has answered the greeting, and was not lost since.
        is_leaving: Whether it gets nothing more.
        retry_at: When it is greeted again.
        reason: Why it is not there, as far as is known.
        process: Which process it is.
        functions: Digests of functions that it has.
        sent: Closures that it was sent and has not answered.
        ended: Those that have ended, the oldest first, while the value of the first is taken.
        is_taking: Whether it is on its way.
        announced_at: When it announced itself last; None: it was named, and is waited for.
        finished: Closures that it has answered.
        losses: How often it was lost.
        refusal: Why it refused the last greeting; None: it did not.
        versions: Of its process; None: it was never there.
    """

    worker: int
    address: str
    since: float
    session: int = 0
    is_asked: bool = False
    is_there: bool = False
    is_leaving: bool = False
    retry_at: float = 0.0
    reason: str = ""
    process: str = ""
    functions: set[bytes] = field(default_factory=set)
    sent: dict[int, Closure] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    is_taking: bool = False
    announced_at: float | None = None
    finished: int = 0
    losses: int = 0
    delay: float = _FIRST_DELAY
    refusal: FailedPreconditionError | None = None
    versions: Versions | None = None

    def came(self, process: str, versions: Versions, now: float) -> None:
        """Take note that it has answered the greeting."""
        self.versions, self.refusal = versions, None
        self.is_there, self.is_asked = True, False
        self.since, self.process, self.reason = now, process, ""
        self.delay = _FIRST_DELAY

    def went(self, reason: str, now: float) -> None:
        """Take note that it is lost, or still not there."""
        if self.is_there:
            self.since = now
            self.losses += 1
        self.is_there = self.is_asked = False
        self.reason, self.refusal = reason, None
        self.functions.clear()
        self.sent.clear()
        self.ended.clear()
        self.is_taking = False
        self.retry_at = now + self.delay
        self.delay = min(_LONGEST_DELAY, 2 * self.delay)

    def is_forgotten(self, now: float) -> bool:
        """Whether nobody will come back here: one that does announces itself."""
        if self.is_there or self.announced_at is None:
            return False
        return now - max(self.announced_at, self.since) >= _FORGET_SECONDS

    def words(self, now: float) -> str:
        """Say who it is, and how it is."""
        name = f"worker {self.worker} ({self.address})"
        if self.is_there:
            return f"{name} is there"
        why = f": {self.reason}" if self.reason else ""
        return f"{name} has not been there for {now - self.since:.0f} s{why}"


# --------------------------------------------------------------------------------------------------
# What the coordinator has seen so far: how much was done, how long it takes, what takes too long

# Pure: no thread or clock.
#
# Rule 1. A function that runs for ten times as long as it does in the median, and for ten seconds,
#         is named once, with its worker. One that has returned less than three times is named after
#         a minute: the first call may compile something.
# Rule 2. What is counted begins with the coordinator, and never falls.

_TIMES = 10
_LEAST_SECONDS = 10.0
_FIRST_SECONDS = 60.0
_REMEMBERED = 64
"""Calls of each function whose seconds are kept."""
_FUNCTIONS = 256
"""Functions of which calls are kept."""
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
