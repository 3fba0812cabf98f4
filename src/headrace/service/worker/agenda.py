"""An agenda: what is to be done now, what was asked of the dispatcher, and when to look again.

What a session consists of writes into it; the session hands it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.service.messages import DispatcherRequest, GetPlan, TaskDefinition
from headrace.service.ranges import Ranges
from headrace.service.worker.portion import Answer
from headrace.waiting import FIRST_WARNING, Backoff, WaitWarnings

__all__ = ["Actions", "Agenda", "Calls", "Grant", "Start"]


R = TypeVar("R")

_OWN_LATENESS = 2.0

"""Seconds after the time that it named at which the session notices that it is called late."""


class Agenda(Generic[R]):
    """What is to be done.

    Args:
        calls: Calls to the dispatcher that are not answered.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.actions: Actions[R] = Actions()
        self._due_at = math.inf
        #: When it asked to act again, at the latest.
        self._expected = math.inf

    def ask(self, message: DispatcherRequest, now: float) -> None:
        """Call the dispatcher, unless it is being asked the same."""
        if self.calls.ask(message, now):
            self.actions.calls.append(message)
            self.at(self.calls.next_at)

    def at(self, time: float) -> None:
        """Look again at a time, or before."""
        self._due_at = min(self._due_at, time)

    def is_due(self, now: float) -> bool:
        """Whether it is time to look; if so, those who want to look again say so again."""
        if now - self._expected > _OWN_LATENESS:
            self.calls.forgive(now - self._expected, now)
            self._expected = now
        if now < self._due_at:
            return False
        self._due_at = math.inf
        return True

    def take(self, now: float) -> Actions[R]:
        """Return what is to be done now."""
        actions, self.actions = self.actions, Actions()
        actions.wake_in = max(0.0, self._due_at - now)
        self._expected = now + actions.wake_in
        return actions


# --- what a worker's session wants done: calls, answers, and what its producers are to do ---------


@dataclass(frozen=True, kw_only=True)
class Start:
    """A producer to start: it opens the plan and makes portions, with room for the first one."""

    producer: int
    """Its number: another one for each producer of a session, whatever its task's number is."""
    definition: TaskDefinition
    plan: bytes
    """The pickled plan, as written."""
    cost_plan: bytes = b""
    """That of the cost function; empty: it has none."""
    portion_bytes: int | None = None
    """How large its portions of several elements may be; None: as is usual."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a producer gets that asked for units."""

    producer: int
    units: tuple[int, int] | None = None
    """(start, stop); None: no more units come."""
    rows: Ranges = ()
    """Not empty: it is one unit, and only these of its elements are wanted."""
    is_alone: bool = False
    """What comes of them is to be delivered at once: workers died with these units before."""
    is_pause: bool = False
    """No units now, but later; what steps of the plan hold is to be delivered."""
    done: int = field(default=0, compare=False)
    """Of what was dealt before, the dispatcher knows that the first so many are done."""


@dataclass
class Actions(Generic[R]):
    """What is to be done now. For one producer, in the order in which the fields stand here."""

    calls: list[DispatcherRequest] = field(default_factory=list)
    """Requests to the dispatcher, to be sent in this order; the session repeats them itself."""
    answers: list[tuple[R, Answer]] = field(default_factory=list)
    """Requests of clients, each with what answers it: once each, in any order."""
    starts: list[Start] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    """Producers that may make one more portion."""
    most: dict[int, int] = field(default_factory=dict)
    """Of those, how many elements that may have at most, where that is bounded."""
    grants: list[Grant] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """Producers that are to wait for units, which others are to have first."""
    cuts: list[int] = field(default_factory=list)
    """Producers that make no more portions, and end."""
    closes: list[int] = field(default_factory=list)
    """Producers whose portions nobody wants any more; nothing that they say is heard."""
    warnings: list[str] = field(default_factory=list)
    wake_in: float = math.inf
    """Seconds after which to act again, if nothing happens before."""
    over: bool = False
    """The worker has left: nothing is to be done any more, except for what stands here."""


# --- calls to the dispatcher that are not answered: each is made again until it is ----------------

# Rule 1. A call that was lost with its connection is made again after a delay, which grows; one
# that
#         is not answered at all is made again after a second, as every request may be repeated.
# Rule 2. A call that was not answered for as long as the worker bears it is given up.
# Rule 3. If something waits for an answer and none came for ten seconds, that is worth a warning,
#         and then once a minute. Time in which the worker itself did not run does not count.
# Rule 4. The same holds for a call that is lost again and again while others are answered.
# Rule 5. Each wait before a call is made again is longer by a random part of itself, at most a
# half:
#         the dispatcher that a thousand workers lost at once does not hear them all at once.

_ANSWER_SECONDS = 1.0

_PLAN_SECONDS = 10.0

_JITTER = 0.5


@dataclass
class _Call:
    since: float
    again_at: float
    backoff: Backoff = field(default_factory=lambda: Backoff(0.05, longest=1.0, factor=1.3))
    losses: int = 0
    warnings: WaitWarnings = field(default_factory=WaitWarnings)


class Calls:
    """The calls that wait for an answer.

    Args:
        patience: Seconds after which an unanswered call is given up.
        now: The time, in seconds of a steady clock; so is every other `now`.
        chance: Returns a number of 0 <= x < 1 for each wait.
    """

    def __init__(self, patience: float, now: float, chance: Callable[[], float]) -> None:
        self._patience = patience
        self._chance = chance
        self._open: dict[DispatcherRequest, _Call] = {}
        #: When something was last answered.
        self._heard = now
        #: When a silence that was worth a warning ended.
        self._resumed = now
        self._warnings = WaitWarnings()

    def ask(self, message: DispatcherRequest, now: float) -> bool:
        """Take note of a call that is made now; False: it waits for its answer already."""
        if message in self._open:
            return False
        self._open[message] = _Call(since=now, again_at=now + self._drawn(_seconds(message)))
        return True

    def of(self, *kinds: type) -> list[DispatcherRequest]:
        """Return the calls of some kinds that wait for their answers."""
        return [message for message in self._open if isinstance(message, kinds)]

    def answered(self, message: DispatcherRequest, now: float) -> bool:
        """Take note of an answer; False: nobody waits for it (any more)."""
        self.heard(now)
        return self._open.pop(message, None) is not None

    def heard(self, now: float) -> None:
        """Take note that the dispatcher answers."""
        if now - self._silent_since >= FIRST_WARNING:
            self._resumed = now
        self._heard = now
        self._warnings.reset()

    def lost(self, message: DispatcherRequest, now: float) -> int:
        """Take note that no answer will come; return how often that was the case."""
        call = self._open.get(message)
        if call is None:
            return 0
        call.again_at = now + self._drawn(next(call.backoff))
        call.losses += 1
        return call.losses

    def forget(self, of_no_use: Callable[[DispatcherRequest], bool] = lambda _: True) -> None:
        """Make no longer those calls of which this is true."""
        for message in [message for message in self._open if of_no_use(message)]:
            del self._open[message]

    def due(self, now: float) -> list[DispatcherRequest]:
        """Return the calls that are to be made again now."""
        again = []
        for message, call in self._open.items():
            if call.again_at <= now:
                call.again_at = now + self._drawn(_seconds(message))
                again.append(message)
        return again

    def give_up(self, now: float) -> list[DispatcherRequest]:
        """Return the calls that were not answered for too long; they are not made again."""
        hopeless = [m for m, call in self._open.items() if now - call.since >= self._patience]
        for message in hopeless:
            del self._open[message]
        return hopeless

    @property
    def next_at(self) -> float:
        """When there is something to be done next: to make a call again, to give up, to warn."""
        # One that is lost again and again is made again every other second at least: its warning
        # is seen then.
        times = [min(c.again_at, c.since + self._patience) for c in self._open.values()]
        return min([*times, self._silent_since + self._warnings.due_after], default=math.inf)

    def silence_to_warn_of(self, now: float) -> float:
        """Return the seconds without an answer if that is worth a warning, else 0.0."""
        silence = now - self._silent_since
        return silence if self._warnings.is_due(silence) else 0.0

    def refusal_to_warn_of(self, now: float) -> tuple[DispatcherRequest, float] | None:
        """Return a call that was lost again and again while others were answered, and the seconds.

        None: there is none that is worth a warning now.
        """
        if now - self._silent_since >= FIRST_WARNING:
            return None
        for message, call in self._open.items():
            seconds = now - max(call.since, self._resumed)
            if call.losses and call.warnings.is_due(seconds):
                return message, seconds
        return None

    @property
    def _silent_since(self) -> float:
        """Since when something waits and nothing was answered; infinite if nothing waits."""
        first = min((call.since for call in self._open.values()), default=math.inf)
        return max(self._heard, first)

    def forgive(self, pause: float, now: float) -> None:
        """Leave a time in which the worker did not run out of all waiting."""
        self._heard = min(now, self._heard + pause)
        self._resumed = min(now, self._resumed + pause)
        for call in self._open.values():
            call.since = min(now, call.since + pause)

    def _drawn(self, seconds: float) -> float:
        return seconds * (1 + _JITTER * self._chance())


def _seconds(message: DispatcherRequest) -> float:
    return _PLAN_SECONDS if isinstance(message, GetPlan) else _ANSWER_SECONDS
