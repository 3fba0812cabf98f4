"""Unit asking: a task's units, asked of the dispatcher in ranges of a fitting length.

Rule 1. A range that is used up at once is followed by one twice as long, so that millions of rows
        need a few requests, and a portion, which ends with what was dealt, is not cut short; one
        that lasts long is followed by a shorter one, so that workers end together.
Rule 2. A task that is to wait asks again under the same number, soon at first and then less often.
Rule 3. A request that was granted units is counted when they are here: one that is repeated has its
        own number.
"""

from __future__ import annotations

import math

from headrace.service.messages import GetSplitReply
from headrace.waiting import Backoff

__all__ = ["UnitAsking", "next_want"]

_SOON = 0.04
_LATE = 0.1
_MOST = 1 << 24


def next_want(want: int, seconds: float) -> int:
    """Return how many units to ask for after a range of `want` lasted `seconds`."""
    if seconds < _SOON:
        return min(want * 2, _MOST)
    if seconds > _LATE:
        return max(1, want // 2)
    return want


class UnitAsking:
    """What a task has been dealt, and what it asks for."""

    def __init__(self) -> None:
        self.number = 0
        """How many grants were received."""
        self.want = 1
        self.dealt = 0
        """How many units these were."""
        self.is_wanted = False
        """Whether the producer waits for units."""
        self.is_over = False
        """Whether no more units come: none are left, or none are wanted."""
        self.ask_at = math.inf
        """When the dispatcher is to be asked, if it is not being asked."""
        self._granted_at: float | None = None
        self._backoff = Backoff(0.02, longest=0.2)

    @property
    def is_asked(self) -> bool:
        """Whether the dispatcher is being asked."""
        return self.is_wanted and self.ask_at == math.inf

    def need(self, now: float) -> None:
        """Take note that the last range is used up, and another is waited for."""
        if self._granted_at is not None:
            self.want = next_want(self.want, now - self._granted_at)
            self._granted_at = None
        self.is_wanted = True
        self._backoff.reset()
        self.ask_at = now

    def take(self, granted: GetSplitReply, now: float) -> tuple[int, int] | None:
        """Take the answer to request `number`; return the units that came with it, if any did."""
        if granted.start < granted.stop:
            self.number += 1
            self.dealt += granted.stop - granted.start
            self.is_wanted = False
            self._granted_at = now
            return granted.start, granted.stop
        if granted.wait:
            self.ask_at = now + next(self._backoff)
        else:
            self.is_over = True
        return None
