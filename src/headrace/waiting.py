"""Waiting for something that may take long: pauses between tries, a deadline, warnings.

backoff = Backoff(0.05, longest=2.0)      # next(backoff) -> 0.05, 0.1, 0.2, ... seconds
warnings = WaitWarnings()                 # warnings.is_due(waited): after 10 s, then each minute
retry(call, deadline=30.0, whom="the dispatcher at 127.0.0.1:5050", attempt_timeout=5.0)
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

from headrace.errors import CancelledError, DeadlineExceededError, UnavailableError

__all__ = ["FIRST_WARNING", "Backoff", "WaitWarnings", "random_chance", "retry"]

T = TypeVar("T")

FIRST_WARNING = 10.0
"""Seconds of waiting after which a warning is logged."""
_NEXT_WARNING = 60.0

random_chance = random.SystemRandom().random
"""A number in [0, 1) that leaves Python's random state, which is the program's, as it is."""


class WaitWarnings:
    """Decides when a wait is logged: after ten seconds, then once a minute.

    Args:
        first: Seconds of waiting before the first warning; None: ten.

    Attributes:
        due_after: Seconds of waiting after which the next warning is due.
    """

    def __init__(self, first: float | None = None) -> None:
        self._first = first
        self.reset()

    def reset(self) -> None:
        """Start over, for another wait."""
        self.due_after = FIRST_WARNING if self._first is None else self._first

    def is_due(self, waited: float) -> bool:
        """Return whether a warning is due; if so, the next one is due a minute later."""
        if waited < self.due_after:
            return False
        self.due_after = waited + _NEXT_WARNING
        return True


class Backoff(Iterator[float]):
    """The pauses between tries, in seconds: each is longer than the one before.

    Args:
        first: The first pause.
        longest: The pause that is not exceeded.
        factor: How many times longer each pause is than the one before.
        jitter: Each pause is shortened by a random part of itself, at most this part, so that many
            clients of one server do not come back at the same instant.
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
        """Begin with the first pause again."""
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
    whom: str,
    attempt_timeout: float,
    stop: Callable[[float], bool] | None = None,
    warn: Callable[[str], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    chance: Callable[[], float] = random_chance,
) -> T:
    """Call a server, and call again while it cannot be reached or does not answer.

    Args:
        call: Makes one try, which may be repeated, within the seconds that it is given.
        deadline: Seconds from the first try after which no other begins.
        whom: The server, for messages: "the dispatcher at 127.0.0.1:5050".
        attempt_timeout: Seconds for one try, at most the rest of the deadline.
        stop: Waits for a number of seconds, or until the caller gives up; returns whether it has.
            None: only the deadline ends the tries.
        warn: Takes a warning after 1.5 seconds without an answer, and once a minute from then on.
            None: no warnings.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds, if there is no `stop`.
        chance: As for `Backoff`.

    Raises:
        UnavailableError: No answer by the deadline; the message names the server.
        CancelledError: `stop` returned True.
        Exception: Whatever else `call` raises; it is not repeated.
    """
    began = clock()
    backoff = Backoff(0.05, longest=2.0, factor=1.3, jitter=0.2, chance=chance)
    warnings = WaitWarnings(_QUIET_SECONDS)
    for tries in itertools.count(1):
        if stop is not None and stop(0.0):
            raise CancelledError(f"{whom}: called off after {tries - 1} tries")
        left = deadline - (clock() - began)
        try:
            return call(max(0.0, min(attempt_timeout, left)))
        except (UnavailableError, DeadlineExceededError) as error:
            pause = next(backoff)
            waited = clock() - began
            if waited + pause >= deadline:
                raise UnavailableError(
                    f"{whom} did not answer for {deadline:g} s ({tries} tries): is it running, and "
                    f"is this its address? The last try: {error}"
                ) from error
            if warn is not None and warnings.is_due(waited):
                warn(
                    f"{whom} has not answered for {waited:.0f} s, and is called for "
                    f"{deadline:g} s in all: is it running, and is this its address? "
                    f"The last try: {error}"
                )
        if stop is None:
            sleep(pause)
        else:
            stop(pause)
    raise AssertionError("unreachable")


_QUIET_SECONDS = 1.5
