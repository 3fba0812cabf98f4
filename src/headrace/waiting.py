"""Waiting for events that may take long: backoff, deadlines and rate-limited warnings.

backoff = Backoff(0.05, longest=2.0)      # next(backoff) -> 0.05, 0.1, 0.2, ... seconds
warnings = WaitWarningLimiter()          # warnings.should_warn(waited): after 10 s, then once a
                                         #     minute
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

from headrace.errors import CancelledError, DeadlineExceededError, UnavailableError

__all__ = ["FIRST_WARNING_SECONDS", "Backoff", "WaitWarningLimiter", "random_chance", "retry"]

T = TypeVar("T")

FIRST_WARNING_SECONDS = 10.0
"""Seconds of waiting after which a warning is logged."""
_REPEAT_WARNING_SECONDS = 60.0

random_chance = random.SystemRandom().random
"""Return a number in [0, 1) without changing the program's random state."""


class WaitWarningLimiter:
    """Limits warnings about a wait: the first after ten seconds, then one per minute.

    Args:
        first: Seconds of waiting before the first warning; None: ten.

    Attributes:
        next_warning_after: Seconds of waiting after which the next warning is due.
    """

    def __init__(self, first: float | None = None) -> None:
        self._first = first
        self.reset()

    def reset(self) -> None:
        """Start a new wait."""
        self.next_warning_after = FIRST_WARNING_SECONDS if self._first is None else self._first

    def should_warn(self, waited: float) -> bool:
        """Return whether a warning is due; if so, the next one is due a minute later."""
        if waited < self.next_warning_after:
            return False
        self.next_warning_after = waited + _REPEAT_WARNING_SECONDS
        return True


class Backoff(Iterator[float]):
    """Growing pauses between tries, in seconds.

    Args:
        first: The first pause.
        longest: Upper bound of pauses.
        factor: Ratio of each pause to the previous one.
        jitter: Maximum fraction by which each pause is randomly shortened, so that many clients
            of one server do not return at the same instant.
        chance: Returns a random number of 0 <= x < 1.
    """

    def __init__(
        self,
        first: float,
        *,
        longest: float,
        factor: float = 2.0,
        jitter: float = 0.0,
        chance: Callable[[], float] = random_chance,
    ) -> None:
        self._first, self._longest, self._factor = first, longest, factor
        self._jitter, self._chance = jitter, chance
        self.reset()

    def reset(self) -> None:
        """Restart with the first pause."""
        self._next = min(self._first, self._longest)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> float:
        pause = self._next
        self._next = min(pause * self._factor, self._longest)
        return pause * (1 - self._jitter * self._chance()) if self._jitter else pause


def retry(
    call: Callable[[float], T],
    *,
    deadline: float,
    peer: str,
    attempt_timeout: float,
    stop: Callable[[float], bool] | None = None,
    warn: Callable[[str], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    chance: Callable[[], float] = random_chance,
) -> T:
    """Call a server, and repeat the call while the server is unreachable or does not answer.

    Args:
        call: Makes one try, which may be repeated, within the seconds passed to it.
        deadline: Seconds after the first try during which another may start.
        peer: The server, for messages: "the dispatcher at 127.0.0.1:5050".
        attempt_timeout: Seconds for one try, at most the rest of the deadline.
        stop: Waits for a number of seconds, or until the caller gives up; returns whether it has.
            None: only the deadline ends the tries.
        warn: Called with a warning after 1.5 seconds without an answer, then once a minute. None
            disables warnings.
        clock: Returns the time in seconds.
        sleep: Sleeps for a number of seconds, if there is no `stop`.
        chance: As in `Backoff`.

    Raises:
        UnavailableError: If there is no answer by the deadline; the message names the server.
        CancelledError: If `stop` returned True.
        Exception: Any other error of `call`, which is not repeated.
    """
    began = clock()
    backoff = Backoff(0.05, longest=2.0, factor=1.3, jitter=0.2, chance=chance)
    warnings = WaitWarningLimiter(_SILENT_SECONDS)
    for attempts in itertools.count(1):
        if stop is not None and stop(0.0):
            raise CancelledError(f"{peer}: cancelled after {attempts - 1} tries")
        remaining = deadline - (clock() - began)
        try:
            return call(max(0.0, min(attempt_timeout, remaining)))
        except (UnavailableError, DeadlineExceededError) as error:
            pause = next(backoff)
            waited = clock() - began
            if waited + pause >= deadline:
                raise UnavailableError(
                    f"{peer} did not reply within {deadline:g} s ({attempts} tries): is it running "
                    f"at this address? Last error: {error}"
                ) from error
            if warn is not None and warnings.should_warn(waited):
                warn(
                    f"no reply from {peer} for {waited:.0f} s, retrying for {deadline:g} s in "
                    f"total: is it running at this address? Last error: {error}"
                )
        if stop is None:
            sleep(pause)
        else:
            stop(pause)
    raise AssertionError("unreachable")


_SILENT_SECONDS = 1.5
