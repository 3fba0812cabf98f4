"""The world of a simulation: time, chance, and processes that may pause, die and start again.

Rule 1. Nothing happens outside `World.run`, one event after another; chance has one seed.
Rule 2. What a process does belongs to one life of it. A paused process does it when it goes on, in
        any order of timers and messages; one that died never does.
Rule 3. What happens is noted, and the story is told when a promise is broken.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

__all__ = ["BrokenPromiseError", "Process", "World"]

_REMEMBERED = 200_000
_AT_ONCE = 100_000
"""Events in a millisecond that are taken for a loop without end."""
_TICK = 1e-9
"""Seconds by which a clock goes on in any case while somebody sleeps."""


class BrokenPromiseError(AssertionError):
    """Something that was promised does not hold."""


class _Event(NamedTuple):
    at: float
    number: int
    process: Process | None
    life: int
    is_timer: bool
    action: Callable[[], None]


class World:
    """Virtual time and everything that happens in it.

    Args:
        seed: Of all chance.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.happened = 0
        self._events: list[_Event] = []
        self._numbered = 0
        self._story: deque[tuple[float, str, str, tuple[object, ...]]] = deque(maxlen=_REMEMBERED)

    def at(
        self,
        delay: float,
        action: Callable[[], None],
        process: Process | None = None,
        *,
        is_timer: bool = False,
    ) -> None:
        """Let something happen after a delay, to a process in its present life or to nobody."""
        life = 0 if process is None else process.life
        self._numbered += 1
        event = _Event(self.now + delay, self._numbered, process, life, is_timer, action)
        heapq.heappush(self._events, event)

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen that is due until then, or until `stop` says so."""
        since, at_once = self.now, 0
        while self._events and self._events[0].at <= until and not stop():
            event = heapq.heappop(self._events)
            self.now = max(self.now, event.at)
            if self.now > since + 0.001:
                since, at_once = self.now, 0
            at_once += 1
            if at_once > _AT_ONCE:
                raise BrokenPromiseError(f"time goes on: {_AT_ONCE} events in a millisecond")
            process = event.process
            if process is not None:
                if event.life != process.life or not process.is_up:
                    continue
                if process.is_paused:
                    process.held.append(event)
                    continue
            self.happened += 1
            event.action()
        if not stop():
            self.now = max(self.now, until)

    def note(self, who: str, what: str, *values: object) -> None:
        """Remember what happened to somebody."""
        self._story.append((self.now, who, what, values))

    def story(self, of: Collection[str] = (), last: int = 60) -> list[str]:
        """Tell the last events of some, or of all."""
        chosen = [each for each in self._story if not of or any(name in each[1] for name in of)]
        return [
            f"{at:10.4f}  {who:24} {what} {' '.join(map(str, values))}"
            for at, who, what, values in chosen[-last:]
        ]


class Process:
    """Something that lives in the world; a role says what it does.

    Args:
        world: Where it lives.
        name: What it is called in the story.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.is_up = False
        self.paused_at: float | None = None
        #: When the last pause of this life ended, and how long the longest was.
        self.went_on_at = self.longest_pause = 0.0
        self.held: list[_Event] = []
        self._alarm = math.inf

    @property
    def is_paused(self) -> bool:
        return self.paused_at is not None

    @property
    def is_running(self) -> bool:
        return self.is_up and not self.is_paused

    def begin(self) -> None:
        """Start a new life."""
        assert not self.is_up, self.name
        self.is_up = True
        self.life += 1
        self.paused_at, self.went_on_at, self.longest_pause = None, self.world.now, 0.0
        self._alarm = math.inf
        self.note("starts")

    def die(self, why: str = "dies") -> None:
        """End this life at once."""
        if self.is_up:
            self.note(why)
            self.is_up, self.paused_at = False, None
            self.held.clear()

    def pause(self, seconds: float) -> None:
        """Do nothing for a while; what happens meanwhile is done afterwards."""
        if self.is_up and not self.is_paused:
            self.note("pauses for", f"{seconds:.3f} s")
            self.paused_at = self.world.now
            life = self.life
            self.world.at(seconds, lambda: self._go_on(life))

    def _go_on(self, life: int) -> None:
        if self.life != life or self.paused_at is None:
            return
        self.longest_pause = max(self.longest_pause, self.world.now - self.paused_at)
        self.paused_at, self.went_on_at = None, self.world.now
        self.note("goes on")
        held, self.held = self.held, []
        if self.world.chance.random() < 0.5:
            # What is due by the clock may be done before what has arrived is read.
            held.sort(key=lambda event: not event.is_timer)
        for event in held:
            self.world.at(0.0, event.action, self, is_timer=event.is_timer)

    def note(self, what: str, *values: object) -> None:
        self.world.note(self.name, what, *values)

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Do something after a delay, if this life lasts."""
        self.world.at(delay, action, self, is_timer=True)

    def wake_in(self, seconds: float) -> None:
        """Call `woken` after so many seconds, or before if that was asked for earlier."""
        delay = max(0.0, seconds) + _TICK
        due = self.world.now + delay
        if due < self._alarm and seconds < math.inf:
            self._alarm = due
            self.later(delay, lambda: self._ring(due))

    def _ring(self, due: float) -> None:
        if due == self._alarm:
            self._alarm = math.inf
            self.woken()

    def woken(self) -> None:
        """Do what is due."""
