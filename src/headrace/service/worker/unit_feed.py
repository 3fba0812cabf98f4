"""Unit feed: a task's units, asked of the dispatcher in ranges of a fitting length.

A range that is used up at once is followed by one twice as long, so that millions of rows need a
few requests; one that lasts long is followed by a shorter one, so that workers end together. A
task that is to wait asks again under the same number, soon at first and then less often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from headrace.errors import CancelledError
from headrace.service.messages import SplitGranted

__all__ = ["UnitFeed", "next_want", "waits"]

_SOON = 0.01
_LATE = 0.1
_MOST = 1 << 24
_FIRST_WAIT = 0.02
_LONGEST_WAIT = 0.2


def next_want(want: int, seconds: float) -> int:
    """Return how many units to ask for after a range of `want` lasted `seconds`."""
    if seconds < _SOON:
        return min(want * 2, _MOST)
    if seconds > _LATE:
        return max(1, want // 2)
    return want


def waits() -> Iterator[float]:
    """Yield the seconds to wait before asking again, for the first time, the second and so on."""
    seconds = _FIRST_WAIT
    while True:
        yield seconds
        seconds = min(seconds * 2, _LONGEST_WAIT)


class UnitFeed:
    """Deals out the units of one task.

    Args:
        ask: Asks the dispatcher for so many units under a number, and waits for the answer,
            patiently; called from any thread, by one at a time.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        ask: Callable[[int, int], SplitGranted],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        #: No more units; set by `drain` and `close`.
        self._halted = threading.Event()
        self._closed = False
        self._ended = False
        self._number = 0
        self._want = 1
        self._granted_at: float | None = None
        self._dealt = 0
        self.is_alone = False
        """Whether what was dealt last is to be delivered at once: workers died with it before."""

    @property
    def dealt(self) -> int:
        """Number of units that were dealt to the task so far."""
        return self._dealt

    def next_units(self) -> tuple[int, int] | None:
        """Return the next range of units (start, stop), or None: no more comes.

        Raises:
            CancelledError: The task was called off.
        """
        with self._lock:
            if self._granted_at is not None:
                self._want = next_want(self._want, self._clock() - self._granted_at)
                self._granted_at = None
            for seconds in waits():
                if self._closed:
                    raise CancelledError("the task was called off")
                if self._ended or self._halted.is_set():
                    return None
                granted = self._ask(self._number, self._want)
                if not granted.wait:
                    return self._take(granted)
                self._halted.wait(seconds)
        raise AssertionError("unreachable")

    def _take(self, granted: SplitGranted) -> tuple[int, int] | None:
        # Counted only now: a request that failed is repeated under its own number.
        self._number += 1
        if granted.start >= granted.stop:
            self._ended = True
            return None
        self._granted_at = self._clock()
        self._dealt += granted.stop - granted.start
        self.is_alone = granted.alone
        return granted.start, granted.stop

    def drain(self) -> None:
        """Deal out nothing more: from now on there are no units left."""
        self._halted.set()

    def close(self, timeout: float = 0.0) -> None:
        """Deal out nothing more; who asks is refused.

        Args:
            timeout: Seconds to wait for a request that is under way, so that `dealt` counts what
                the dispatcher grants in answer to it.
        """
        self._closed = True
        self._halted.set()
        if self._lock.acquire(timeout=timeout):
            self._lock.release()
