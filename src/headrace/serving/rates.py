"""Rates: how much of something there was per second, in the last ten seconds or so."""

from __future__ import annotations

import math

__all__ = ["Rate"]

_MEMORY = 5.0
"""Seconds after which what was counted weighs a third."""


class Rate:
    """A mean over the past that forgets with time; it falls to nothing by itself.

    Args:
        now: When counting begins, in seconds of a steady clock.
    """

    __slots__ = ("_at", "_began", "_value")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._value = 0.0

    def add(self, amount: float, now: float) -> None:
        """Count an amount."""
        self._value = self._value * math.exp((self._at - now) / _MEMORY) + amount / _MEMORY
        self._at = now

    def read(self, now: float) -> float:
        """Return the amount per second."""
        value = self._value * math.exp((self._at - now) / _MEMORY)
        # Of a past that is shorter than the memory, the part that was not there is left out; of
        # the first moment, a second is taken.
        return value / -math.expm1((self._began - max(now, self._began + 1.0)) / _MEMORY)
