"""Waits that say what they wait for, once they have lasted long."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from threading import Condition

__all__ = ["LongWait"]

_SHORTEST = 0.01
_FIRST = 10.0
_AGAIN = 60.0

_logger = logging.getLogger("headrace")


class LongWait:
    """One wait without progress: after 10 s, and then each minute, a warning names its object.

    Args:
        awaited: What is waited for, for the warning: the step and where the user wrote it.
        clock: Gives the time in seconds.
        warn: Called with each warning.
    """

    __slots__ = ("_awaited", "_clock", "_due", "_start", "_warn")

    def __init__(
        self,
        awaited: str,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = _logger.warning,
    ) -> None:
        self._awaited = awaited
        self._clock = clock
        self._warn = warn
        self._start = clock()
        self._due = self._start + _FIRST

    def wait(self, changed: Condition) -> None:
        """Wait on a condition that is held; return when it was notified, or now and then.

        It is held afterwards whatever happens.
        """
        try:
            changed.wait(max(0.0, self._due - self._clock()))
        except BaseException:
            # A signal at the moment when the lock is taken again leaves it free. Whoever holds the
            # condition would fail to release it, and hide the interruption.
            with contextlib.suppress(RuntimeError):
                changed.release()
            changed.acquire()
            raise
        self.look()

    def wait_and_look(self, changed: Condition) -> None:
        """Wait in the same way, but return after as long as was waited so far, too.

        For what may be there without a notice: it is then found at most twice as late.
        """
        now = self._clock()
        changed.wait(max(0.0, min(self._due - now, max(now - self._start, _SHORTEST))))
        self.look()

    def look(self) -> None:
        """Warn if it is time to."""
        now = self._clock()
        if now >= self._due:
            self._due = now + _AGAIN
            self._warn(
                f"waiting for {self._awaited}: nothing has come for {now - self._start:.0f} s"
            )
