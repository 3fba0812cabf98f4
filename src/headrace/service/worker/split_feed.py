"""Split feed: a task's splits, asked of the dispatcher in ranges of a fitting length.

A range that is used up at once is followed by one twice as long, so that millions of rows need a
few requests; one that lasts long is followed by a shorter one, so that workers end together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from headrace.errors import CancelledError
from headrace.service.messages import GetSplit, SplitGranted

__all__ = ["SplitFeed", "next_want"]

_SOON = 0.01
_LATE = 0.1
_MOST = 1 << 24


def next_want(want: int, seconds: float) -> int:
    """Return how many indices to ask for after a range of `want` lasted `seconds`."""
    if seconds < _SOON:
        return min(want * 2, _MOST)
    if seconds > _LATE:
        return max(1, want // 2)
    return want


class SplitFeed:
    """Deals out the sources of one task (`execution.context.SplitProvider`).

    Args:
        task_id: The task.
        ask: Sends a request to the dispatcher and waits for the answer, patiently; may be called
            from any thread, by one at a time.
        stopped: Set when the task is called off.
    """

    def __init__(
        self, task_id: int, ask: Callable[[GetSplit], SplitGranted], stopped: threading.Event
    ) -> None:
        self._task_id = task_id
        self._ask = ask
        self._stopped = stopped
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}
        self._wants: dict[int, int] = {}
        self._granted_at: dict[int, float] = {}

    def next_split(self, source: int, repetition: tuple[int, ...]) -> tuple[int, int] | None:
        with self._lock:
            if self._stopped.is_set():
                raise CancelledError(f"task {self._task_id} was called off")
            number = self._numbers.get(source, 0)
            want = self._wants.get(source, 1)
            if source in self._granted_at:
                want = next_want(want, time.monotonic() - self._granted_at[source])
            granted = self._ask(
                GetSplit(
                    task_id=self._task_id,
                    source=source,
                    repetition=repetition,
                    number=number,
                    want=want,
                )
            )
            # Counted only now: a request that failed is repeated under its own number.
            self._numbers[source] = number + 1
            self._wants[source] = want
            self._granted_at[source] = time.monotonic()
        return None if granted.start == granted.stop else (granted.start, granted.stop)
