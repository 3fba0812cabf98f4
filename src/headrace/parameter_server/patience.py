"""Waiting for one parameter server: with a word after ten seconds, then each minute, and an end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace.errors import DataLossError, HeadraceError, NotFoundError, UnavailableError
from headrace.waiting import Backoff, WaitWarnings

__all__ = ["Patience"]

_log = logging.getLogger(__name__)


class Patience:
    """That of one who asked a server for something.

    Args:
        server: What the server is called.
        task: What it was asked to do, for words.
        seconds: So long it may be away, or without what it held.
        pause: Waits for some seconds; raises if nobody is to wait any more.
        began: When the waiting began, by the monotonic clock; None: now.
        why_lost: Returns why what the server held is lost, where it was not started again; else "".
            It takes whether the server has begun again with nothing.
    """

    def __init__(
        self,
        server: str,
        task: str,
        seconds: float,
        pause: Callable[[float], object],
        began: float | None = None,
        why_lost: Callable[[bool], str] | None = None,
    ) -> None:
        self._why_lost = why_lost
        self._server = server
        self._task = task
        self._seconds = seconds
        self._pause = pause
        self._began = time.monotonic() if began is None else began
        self._warnings = WaitWarnings()
        self._backoff = Backoff(0.02, longest=1.0, factor=1.3, jitter=0.2)

    def say(self, what: str) -> None:
        """Log what the server does, where that has lasted."""
        waited = time.monotonic() - self._began
        if self._warnings.is_due(waited):
            _log.warning(
                "%s %s for %.0f s; it was asked to %s",
                self._server,
                what,
                waited,
                self._task,
            )

    def wait(self, error: HeadraceError) -> None:
        """Wait before the next try.

        Args:
            error: What the last try ended with.

        Raises:
            DataLossError: Nobody has restored in time what the server held.
            UnavailableError: It could not be reached in time.
        """
        pause = next(self._backoff)
        if time.monotonic() + pause > self._began + self._seconds:
            began_again = isinstance(error, NotFoundError)
            why_lost = self._why_lost(began_again) if self._why_lost is not None else ""
            if began_again:
                raise DataLossError(
                    f"{why_lost or f'{self._server} was started again'}, and in "
                    f"{self._seconds:g} s nobody restored what it held: {error}. Restore a "
                    "checkpoint; an `hr.CheckpointManager` that is there while training does so by "
                    "itself"
                ) from error
            if why_lost:
                raise DataLossError(
                    f"{why_lost}, and in {self._seconds:g} s the other server has not come back "
                    f"({error}). Start it again: if it still has them, nothing is lost; if it "
                    "ended, restore a checkpoint then, which an `hr.CheckpointManager` that is "
                    "there while training does by itself"
                ) from error
            raise UnavailableError(
                f"{self._server} did not answer for {self._seconds:g} s: is it running, and is "
                f"this its address? The last try: {error}"
            ) from error
        self.say(f"cannot do what it is asked ({error})")
        self._pause(pause)
