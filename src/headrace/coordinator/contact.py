"""One worker, as the coordinator sees it: whether it is there, and what it was sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.coordinator.closure import Closure, Payload
from headrace.coordinator.messages import Ran
from headrace.errors import FailedPreconditionError
from headrace.versions import Versions

__all__ = ["Contact", "Ended"]

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
