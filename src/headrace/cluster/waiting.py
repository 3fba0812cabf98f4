"""Waiting for the other tasks of a cluster, which start when they like."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.errors import UnavailableError

__all__ = ["wait_for"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_FIRST_DELAY = 0.02
_LONGEST_DELAY = 1.0
_QUIET_SECONDS = 10.0
"""How long something is missing before the log says so."""
_WORDS_SECONDS = 60.0
"""After so many more it says so again."""


def wait_for(
    look: Callable[[], T],
    *,
    what: str,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Look, and look again, less and less often, while something is missing.

    Args:
        look: Returns what is waited for, or raises an UnavailableError that says what is missing.
        what: What is waited for, in words.
        seconds: For how long.
        clock: Tells the time in seconds.
        sleep: Waits so many seconds.

    Raises:
        UnavailableError: Something is still missing; it says what.
        Exception: Whatever else `look` raises.
    """
    began = clock()
    words_at = began + _QUIET_SECONDS
    delay = _FIRST_DELAY
    while True:
        try:
            return look()
        except UnavailableError as error:
            waited = clock() - began
            if waited >= seconds:
                raise UnavailableError(f"no {what} after {seconds:g} s: {error}") from error
            if clock() >= words_at:
                words_at = clock() + _WORDS_SECONDS
                _log.warning(
                    "no %s after %.0f s: %s; it is waited for %g s in all",
                    what,
                    waited,
                    error,
                    seconds,
                )
        sleep(min(delay, max(0.0, began + seconds - clock())))
        delay = min(2 * delay, _LONGEST_DELAY)
