"""A counter of errors that the iterators of one plan share."""

from __future__ import annotations

import threading

from headrace.forks import call_in_children

__all__ = ["ErrorCounter"]


class ErrorCounter:
    """Number of errors that all `ignore_errors` of a plan have dropped; they run on any thread."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def count(self) -> int:
        """Number of errors."""
        return self._count

    def add(self, count: int) -> None:
        """Add to the number; `count` may be negative."""
        with _lock:
            self._count += count


_lock = threading.Lock()


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


call_in_children(_unlock)
