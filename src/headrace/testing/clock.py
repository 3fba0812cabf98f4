"""Clock that advances only on request."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """Replacement for `time.monotonic`: call it for the time, `advance` it to let time pass.

    >>> clock = hr.testing.ManualClock(100.0)
    >>> clock.advance(2.5)
    102.5
    >>> clock()
    102.5

    Attributes:
        now: Current time of the clock, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now: float = now

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now

    def advance(self, seconds: float) -> float:
        """Advance the clock by `seconds`; return the new time.

        Raises:
            ValueError: If `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(
                f"seconds={seconds!r} must be at least 0: a clock does not run backwards"
            )
        self.now += seconds
        return self.now
