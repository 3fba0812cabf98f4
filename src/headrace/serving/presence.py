"""Presence: who was heard from when, and which silence counts as silence.

Times are in seconds of any steady clock. None of this outlives the process: after a restart
everybody is taken as heard from just now, since nobody could have spoken to one that was not there.

Rule 1. Time in which this process itself did not run is nobody's silence.
Rule 2. What was sent during such a pause is heard before anybody is declared gone: the tick that
        notices the pause does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self, TypeVar

__all__ = ["Pulse", "Stamps"]

K = TypeVar("K")

_SLACK = 0.1
"""Seconds, or one interval if that is less, by which a tick may come later than after twice its
interval; more is a pause."""


class Stamps(dict[K, float]):
    """When each of whom was last heard from, or each thing last happened."""

    @classmethod
    def of(cls, known: Iterable[K], now: float) -> Self:
        """Take everybody as heard from now."""
        return cls((who, now) for who in known)

    def hear(self, who: object, now: float) -> bool:
        """Take note of a word from somebody; return whether it is somebody known."""
        if who not in self:
            return False
        self[who] = now  # type: ignore[index]
        return True

    def silent(self, now: float, seconds: float) -> list[K]:
        """Return who was not heard from for longer than so many seconds."""
        return [who for who, heard in self.items() if now - heard > seconds]

    def forgive(self, pause: float, now: float) -> None:
        """Take `pause` seconds, in which nobody could be heard, off everybody's silence."""
        for who, heard in self.items():
            self[who] = min(now, heard + pause)


class Pulse:
    """Notices when this process did not run.

    Args:
        interval: Seconds between two beats, as they should be.
        now: The time of the first.
    """

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._last = now

    def beat(self, now: float) -> float:
        """Return for how long nobody could be heard before this beat: 0.0 if it came in time."""
        since, self._last = now - self._last, now
        return since if since > 2 * self._interval + min(self._interval, _SLACK) else 0.0
