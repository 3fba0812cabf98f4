"""Elements that a trainer missed because faster trainers share the cache.

Workers keep the newest elements. A trainer that is too slow resumes at the oldest element in the
window, and the reply contains the number of skipped elements. A warning reports them at once, and
then at most once a minute.
"""

from __future__ import annotations

import math

__all__ = ["LagReporter"]

_WARNING_INTERVAL = 60.0


class LagReporter:
    """Counts skipped elements.

    Args:
        trainer_id: ID of the trainer.
    """

    def __init__(self, trainer_id: str) -> None:
        self._trainer_id = trainer_id
        #: Number of skipped elements, over all workers.
        self.total_skipped: int = 0
        #: Skipped elements by worker that no warning has reported.
        self._unreported: dict[str, int] = {}
        self._warned_at = -math.inf

    def add_skipped(self, count: int, worker_address: str) -> None:
        """Record the number of skipped elements in a reply."""
        if count:
            self.total_skipped += count
            self._unreported[worker_address] = self._unreported.get(worker_address, 0) + count

    def take_warnings(self, now: float) -> list[str]:
        """Return the warnings to log now."""
        if not self._unreported or now - self._warned_at < _WARNING_INTERVAL:
            return []
        self._warned_at = now
        skipped, self._unreported = self._unreported, {}
        by_worker = ", ".join(
            f"{count} of the worker at {address}" for address, count in skipped.items()
        )
        return [
            f"trainer {self._trainer_id!r} skipped {sum(skipped.values())} elements that were "
            f"evicted before it requested them ({by_worker}; {self.total_skipped} in total), "
            "because other trainers of the job are faster. It continues with the oldest elements "
            "in the workers' caches. Increase `cross_trainer_cache_size_bytes` of the workers to "
            "keep more elements"
        ]
