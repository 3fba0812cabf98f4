"""Which closures make a round, and when it is complete. Pure.

    closures 1 2 3 | 4 5 6 | 7            rounds of 3; the last one is cut by `join`

Rule 1. A closure may begin when its round is open: the round before is complete, and its mean is on
        the servers.
Rule 2. A round has `size` numbers in a row, or fewer where it was cut: it is complete when all of
        them have ended, however they ended.
"""

from __future__ import annotations

from headrace.coordinator.closure import Closure
from headrace.coordinator.decided import Round

__all__ = ["Rounds"]


class Rounds:
    """Rounds of closures, one after another.

    Args:
        size: How many closures make one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        #: The round that is open has the numbers from here to `_last`.
        self._first = 1
        #: Where rounds are cut: numbers of closures that end one.
        self._cuts: set[int] = set()
        #: Closures that have ended, in this round and later ones.
        self._ended: dict[int, Closure] = {}
        #: All numbers below this one have ended.
        self._next = 1
        #: Those of a round whose mean is on its way to the servers; none: there is no such round.
        self._pushing: list[Closure] = []

    @property
    def _last(self) -> int:
        """The last number of the open round."""
        return min([self._first + self._size - 1, *self._cuts])

    def may_begin(self, number: int) -> bool:
        """Whether a closure may be sent to a worker."""
        return number <= self._last and not self._pushing

    def cut(self, last: int) -> None:
        """End the round that has this number with it; the next number begins another."""
        if last >= self._first:
            self._cuts.add(last)

    def end(self, closure: Closure) -> None:
        """Take note that a closure has ended, or never will be sent."""
        self._ended[closure.number] = closure
        while self._next in self._ended:
            self._next += 1

    def take(self) -> Round | None:
        """Return the round that is complete, once; None: there is none. See `pushed`."""
        last = self._last
        if self._pushing or self._next <= last:
            return None
        closures = [self._ended.pop(number) for number in range(self._first, last + 1)]
        self._pushing = closures
        steps = [each.steps for each in closures if each.steps is not None]
        # The round is written with the keys of its last closure.
        closures[-1].wrote |= bool(steps)
        return Round(last, steps)

    def pushed(self) -> list[Closure]:
        """Take note that the mean of that round is on the servers: return its closures."""
        closures, self._pushing = self._pushing, []
        self._first = self._last + 1
        self._cuts = {each for each in self._cuts if each >= self._first}
        return closures
