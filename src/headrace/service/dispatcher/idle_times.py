"""Times of last use, kept in memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

__all__ = ["IdleTimes"]


class IdleTimes:
    """Time at which each idle key was last used, or first seen idle."""

    def __init__(self) -> None:
        self._last_used: dict[Hashable, float] = {}

    def watch(self, idle: Iterable[Hashable], now: float) -> None:
        """Watch exactly the keys that are idle now."""
        self._last_used = {key: self._last_used.get(key, now) for key in idle}

    def record_use(self, key: Hashable, now: float) -> None:
        """Record a use."""
        if key in self._last_used:
            self._last_used[key] = now

    def idle_seconds(self, key: Hashable, now: float) -> float:
        """Return the seconds since the last use; 0 if the key is not watched."""
        return now - self._last_used.get(key, now)

    def exclude_pause(self, pause: float, now: float) -> None:
        """Exclude `pause` seconds in which this process received nothing."""
        self._last_used = {
            key: min(now, used_at + pause) for key, used_at in self._last_used.items()
        }
