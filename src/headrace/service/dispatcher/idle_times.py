"""When what is watched was last used: for one run of the dispatcher's process."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

__all__ = ["IdleTimes"]


class IdleTimes:
    """When each of some idle things was last used, or first seen idle."""

    def __init__(self) -> None:
        self._last_used: dict[Hashable, float] = {}

    def watch(self, idle: Iterable[Hashable], now: float) -> None:
        """Watch what is idle now, and nothing else."""
        self._last_used = {each: self._last_used.get(each, now) for each in idle}

    def record_use(self, key: Hashable, now: float) -> None:
        """Take note of a use."""
        if key in self._last_used:
            self._last_used[key] = now

    def idle_seconds(self, key: Hashable, now: float) -> float:
        """Return for how many seconds it has been idle."""
        return now - self._last_used.get(key, now)

    def exclude_pause(self, pause: float, now: float) -> None:
        """Leave out `pause` seconds in which nobody could be heard."""
        self._last_used = {each: min(now, at + pause) for each, at in self._last_used.items()}
