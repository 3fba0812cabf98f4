"""Rates: amounts per second, averaged over about the last ten seconds."""

from __future__ import annotations

import math

__all__ = ["Rate"]

_TIME_CONSTANT = 5.0
"""Seconds after which the weight of an amount has fallen to 1/e."""


class Rate:
    """Exponentially weighted mean, which decays to zero without input.

    Args:
        now: Start of counting, in seconds of a monotonic clock.
    """

    __slots__ = ("_at", "_started_at", "_value")

    def __init__(self, now: float) -> None:
        self._started_at = self._at = now
        self._value = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add an amount."""
        self._value = (
            self._value * math.exp((self._at - now) / _TIME_CONSTANT) + amount / _TIME_CONSTANT
        )
        self._at = now

    def read(self, now: float) -> float:
        """Return the amount per second."""
        value = self._value * math.exp((self._at - now) / _TIME_CONSTANT)
        # If counting started recently, normalize by the elapsed time, of at least one second.
        return value / -math.expm1(
            (self._started_at - max(now, self._started_at + 1.0)) / _TIME_CONSTANT
        )
