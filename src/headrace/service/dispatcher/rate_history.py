"""Rates in the most recent intervals, for a plot."""

from __future__ import annotations

from collections import deque

__all__ = ["RateHistory"]

_SECONDS = 3.0
_INTERVALS = 40


class RateHistory:
    """Counts by interval, including those without any.

    Args:
        now: Start of counting, in seconds of a monotonic clock.
    """

    __slots__ = ("_counts", "_interval", "_started_at")

    def __init__(self, now: float) -> None:
        self._started_at = now
        self._interval = 0
        self._counts: deque[float] = deque([0.0], maxlen=_INTERVALS)

    def add(self, amount: float, now: float) -> None:
        """Count an amount."""
        self._advance(now)
        self._counts[-1] += amount

    def read(self, now: float) -> tuple[float, ...]:
        """Return the amount per second in each completed interval, oldest first."""
        self._advance(now)
        return tuple(count / _SECONDS for count in self._counts)[:-1]

    def _advance(self, now: float) -> None:
        interval = int((now - self._started_at) // _SECONDS)
        passed = interval - self._interval
        if passed > 0:
            self._counts.extend([0.0] * min(passed, _INTERVALS))
            self._interval = interval
