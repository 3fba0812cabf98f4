"""Requests of a task for splits, in ranges of adaptive length.

Rule 1. A range that is consumed quickly is followed by one twice as long, so that millions of rows
    need few requests, and batches, which end with the assigned splits, are not cut short. A range
    that lasts long is followed by a shorter one, so that workers end at about the same time.
Rule 2. A task that must wait asks again under the same number, soon at first and then less often.
Rule 3. A request is counted when its splits arrive, so a repeated request keeps its number.
"""

from __future__ import annotations

import math

from headrace.service.messages import GetSplitReply
from headrace.waiting import Backoff

__all__ = ["SplitRequests", "next_request_size"]

_FAST_SECONDS = 0.04
_SLOW_SECONDS = 0.1
_MAX_REQUEST_SIZE = 1 << 24


def next_request_size(size: int, seconds: float) -> int:
    """Return the number of splits to request after a range of `size` lasted `seconds`."""
    if seconds < _FAST_SECONDS:
        return min(size * 2, _MAX_REQUEST_SIZE)
    if seconds > _SLOW_SECONDS:
        return max(1, size // 2)
    return size


class SplitRequests:
    """Splits assigned to a task, and its next request."""

    def __init__(self) -> None:
        self.assignment_number: int = 0
        """Number of assignments received."""
        self.request_size: int = 1
        self.num_assigned: int = 0
        """Number of splits in these assignments."""
        self.is_needed: bool = False
        """Whether the producer waits for splits."""
        self.is_exhausted: bool = False
        """Whether this was the last assignment: none are left, or none are needed."""
        self.request_at: float = math.inf
        """When to send the next request; infinity while one is pending."""
        self._granted_at: float | None = None
        self._backoff = Backoff(0.02, longest=0.2)

    @property
    def is_pending(self) -> bool:
        """Whether a request is pending."""
        return self.is_needed and self.request_at == math.inf

    def splits_needed(self, now: float) -> None:
        """Record that the last range is consumed and another one is needed."""
        if self._granted_at is not None:
            self.request_size = next_request_size(self.request_size, now - self._granted_at)
            self._granted_at = None
        self.is_needed = True
        self._backoff.reset()
        self.request_at = now

    def reply_received(self, reply: GetSplitReply, now: float) -> tuple[int, int] | None:
        """Handle the reply to request `assignment_number`; return the assigned splits, if any."""
        if reply.start < reply.stop:
            self.assignment_number += 1
            self.num_assigned += reply.stop - reply.start
            self.is_needed = False
            self._granted_at = now
            return reply.start, reply.stop
        if reply.wait:
            self.request_at = now + next(self._backoff)
        else:
            self.is_exhausted = True
        return None
