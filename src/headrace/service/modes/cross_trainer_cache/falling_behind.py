"""Falling behind: what a trainer did not get of elements that it shares with faster ones.

Workers keep the newest elements. Whoever comes too late goes on with the oldest that are there, and
the answer says how many were gone; a warning says so at once, and at most once a minute after that.
"""

from __future__ import annotations

import math

__all__ = ["FallingBehind"]

_EVERY_SECONDS = 60.0


class FallingBehind:
    """Counts elements that were gone.

    Args:
        trainer_id: Whose.
    """

    def __init__(self, trainer_id: str) -> None:
        self._trainer_id = trainer_id
        #: Elements that were gone, over all workers.
        self.total = 0
        #: By worker, those of which no warning spoke.
        self._unsaid: dict[str, int] = {}
        self._said_at = -math.inf

    def skipped(self, count: int, worker_address: str) -> None:
        """Take note of elements that were gone when an answer came for them."""
        if count:
            self.total += count
            self._unsaid[worker_address] = self._unsaid.get(worker_address, 0) + count

    def due(self, now: float) -> list[str]:
        """Return what is to be said now."""
        if not self._unsaid or now - self._said_at < _EVERY_SECONDS:
            return []
        self._said_at = now
        unsaid, self._unsaid = self._unsaid, {}
        where = ", ".join(
            f"{count} of the worker at {address}" for address, count in unsaid.items()
        )
        return [
            f"trainer {self._trainer_id!r} fell behind: {sum(unsaid.values())} elements were gone "
            f"when it came for them ({where}; {self.total} in all). Other trainers of the job are "
            "faster: it goes on with the oldest elements that workers keep. A larger "
            "`cross_trainer_cache_size_bytes` of the workers keeps more"
        ]
