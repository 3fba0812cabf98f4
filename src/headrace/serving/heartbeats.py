"""Liveness of peers: time of the last message from each, corrected for pauses of this process.

Times are seconds of any monotonic clock. Nothing outlives the process: after a restart all peers
count as heard from just now, since none could reach a process that was not running.

Rule 1. Time in which this process did not run counts as silence of no peer.
Rule 2. Messages sent during such a pause are handled before any peer is declared lost: the tick
        that detects the pause does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self, TypeVar

__all__ = ["LastHeard", "PauseDetector"]

K = TypeVar("K")

_MAX_TICK_DELAY = 0.1
"""Seconds, or one interval if that is less, by which a tick may be later than two intervals; more
counts as a pause."""


class LastHeard(dict[K, float]):
    """Time of the last message by peer, or of the last occurrence by key."""

    @classmethod
    def all_at(cls, known: Iterable[K], now: float) -> Self:
        """Return a mapping in which all peers were heard from now."""
        return cls((peer, now) for peer in known)

    def record(self, peer: object, now: float) -> bool:
        """Record a message from a peer; return whether the peer is known."""
        if peer not in self:
            return False
        self[peer] = now  # type: ignore[index]
        return True

    def expired(self, now: float, timeout: float) -> list[K]:
        """Return the peers that were silent for longer than `timeout` seconds."""
        return [peer for peer, last_heard in self.items() if now - last_heard > timeout]

    def extend(self, pause: float, now: float) -> None:
        """Subtract a pause of `pause` seconds of this process from the silence of all peers."""
        for peer, last_heard in self.items():
            self[peer] = min(now, last_heard + pause)


class PauseDetector:
    """Detects pauses of this process.

    Args:
        interval: Intended seconds between two ticks.
        now: Time of the first tick.
    """

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._last = now

    def measure_pause(self, now: float) -> float:
        """Return the seconds for which this process was paused before this tick; 0.0 if none."""
        since, self._last = now - self._last, now
        return since if since > 2 * self._interval + min(self._interval, _MAX_TICK_DELAY) else 0.0
