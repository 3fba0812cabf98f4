"""When what is watched was last used: for one run of the dispatcher's process."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

__all__ = ["LastUse"]


class LastUse:
    """When each of some idle things was last used, or first seen idle."""

    def __init__(self) -> None:
        self._at: dict[Hashable, float] = {}

    def watch(self, idle: Iterable[Hashable], now: float) -> None:
        """Watch what is idle now, and nothing else."""
        self._at = {each: self._at.get(each, now) for each in idle}

    def use(self, what: Hashable, now: float) -> None:
        """Take note of a use."""
        if what in self._at:
            self._at[what] = now

    def since(self, what: Hashable, now: float) -> float:
        """Return for how many seconds it has been idle."""
        return now - self._at.get(what, now)

    def forgive(self, pause: float, now: float) -> None:
        """Leave out `pause` seconds in which nobody could be heard."""
        self._at = {each: min(now, at + pause) for each, at in self._at.items()}
