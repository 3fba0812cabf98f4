"""Which closures have ended whose keys servers still have, and when servers are told. Pure.

Rule 1. While nobody waits for it, servers are told of several ends at a time: a request to each of
        them costs more than a short function does.
Rule 2. Somebody waits where `join` or `done` asked for numbers up to one (`wait_for`), and all of
        those have ended. Where staleness is bounded, the next closure may wait: nothing is held
        back.
Rule 3. A closure that was called off may still write, and servers refuse that when they are told:
        so they are told at once. So they are after an error, and of many ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from headrace.coordinator.closure import Closure, Phase
from headrace.coordinator.decided import NEVER

__all__ = ["Settling"]

_MOST = 256
"""Of so many ends servers are told at once: what they remember stays small."""


class Settling:
    """Numbers of closures that have ended, until servers are told.

    Args:
        within: Seconds after which servers are told in any case; 0: at once.
    """

    def __init__(self, within: float) -> None:
        self._within = within
        self._numbers: list[int] = []
        self._least = 0
        self._is_urgent = within <= 0
        self.due = NEVER
        """When servers are told in any case."""
        #: Rising: somebody waits until all closures up to each of these are over.
        self._awaited: deque[int] = deque()
        self._first = 1

    def wait_for(self, number: int) -> None:
        """Take note that somebody waits until all closures up to this one are over."""
        if not self._awaited or number > self._awaited[-1]:
            self._awaited.append(number)

    def add(self, closure: Closure) -> None:
        """Have servers told of a closure, sooner or later."""
        number = closure.number
        self._least = min(self._least, number) if self._numbers else number
        self._numbers.append(number)
        self._is_urgent = self._is_urgent or closure.is_off

    def first(self, unsettled: Mapping[int, Closure], last: int) -> int:
        """Return the first closure that has not ended, of those up to `last`; `last` + 1: all have.

        Args:
            unsettled: Closures that are not over. What has ended never runs again.
            last: The number that was scheduled last.
        """
        first = self._first
        while first <= last:
            closure = unsettled.get(first)
            if closure is not None and closure.phase is not Phase.SETTLING:
                break
            first += 1
        self._first = first
        return first

    def take(self, now: float, first: int, *, at_once: bool) -> list[int]:
        """Return what servers are to be told now.

        Args:
            now: In seconds.
            first: The first closure that has not ended.
            at_once: Whether somebody waits for all there is.
        """
        if not self._numbers:
            return []
        if self.due == NEVER:
            self.due = now + self._within
        while self._awaited and self._awaited[0] < min(first, self._least):
            self._awaited.popleft()  # all of those have ended, and servers know
        if not (
            at_once
            or self._is_urgent
            or (self._awaited and self._awaited[0] < first)
            or now >= self.due
            or len(self._numbers) >= _MOST
        ):
            return []
        numbers, self._numbers = self._numbers, []
        self.due, self._is_urgent = NEVER, self._within <= 0
        return numbers
