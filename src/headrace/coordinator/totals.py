"""What a worker has done for all coordinators that it had."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

__all__ = ["Totals"]


@dataclass(eq=False)
class Totals:
    """Counts, from the worker's start on.

    Attributes:
        greetings: How often a coordinator took the worker.
        ended: Functions that returned or raised.
        failed: Those that raised.
        abandoned: Functions that were given up while they ran.
        seconds: For which functions ran.
        is_greeted: Whether a coordinator has the worker now.
        running: Functions that run now, for that one.
        waiting: Functions that wait for a thread.
    """

    greetings: int = 0
    ended: int = 0
    failed: int = 0
    abandoned: int = 0
    seconds: float = 0.0
    is_greeted: bool = False
    running: int = 0
    waiting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def ran(self, seconds: float, *, failed: bool) -> None:
        """Take note that a function has returned or raised."""
        with self._lock:
            self.ended += 1
            self.failed += failed
            self.seconds += seconds
