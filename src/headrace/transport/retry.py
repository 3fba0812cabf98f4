"""Asking again: for requests that may be repeated, until an answer comes or patience ends."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from headrace.errors import CancelledError, DeadlineExceededError, UnavailableError

__all__ = ["RetryPolicy", "delays", "random_chance", "retry"]

T = TypeVar("T")

random_chance = random.SystemRandom().random
"""A number in [0, 1) that leaves Python's random state, which is the program's, as it is."""

_QUIET_SECONDS = 1.5
"""How long nobody answers before the caller is warned."""
_WORDS_SECONDS = 60.0
"""After so many more it is warned again."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to try, and how patiently."""

    deadline: float = 30.0
    """Seconds from the first try after which no other begins."""
    first_delay: float = 0.05
    """Seconds between the first try and the second."""
    backoff: float = 1.3
    """Each delay is so many times the one before."""
    max_delay: float = 2.0
    """Seconds that no delay exceeds."""
    jitter: float = 0.2
    """Each delay is shortened by a random part of itself, at most this, so that many clients of
    one server do not come back at the same instant."""

    def __post_init__(self) -> None:
        for name in ("deadline", "first_delay", "max_delay"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")
        if not self.backoff >= 1:
            raise ValueError(f"backoff={self.backoff} must be at least 1")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter={self.jitter} must be between 0 and 1")


def delays(policy: RetryPolicy, chance: Callable[[], float]) -> Iterator[float]:
    """Yield the seconds to wait before the second try, the third, and so on, without end.

    Args:
        policy: See `RetryPolicy`; its deadline plays no part here.
        chance: Returns a number of 0 <= x < 1 for each delay.
    """
    delay = min(policy.first_delay, policy.max_delay)
    while True:
        yield delay * (1 - policy.jitter * chance())
        delay = min(delay * policy.backoff, policy.max_delay)


def retry(
    ask: Callable[[float], T],
    policy: RetryPolicy,
    *,
    whom: str,
    attempt_timeout: float,
    stop: Callable[[float], bool] | None = None,
    say: Callable[[str], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    chance: Callable[[], float] = random_chance,
) -> T:
    """Ask, and ask again while the peer cannot be reached or does not answer.

    Args:
        ask: Makes one try, of something that may be repeated, in the seconds that it is given.
        policy: How long to try.
        whom: Who is asked, for the error: "the dispatcher at 127.0.0.1:5050".
        attempt_timeout: Seconds that one try may take, at most the rest of the deadline.
        stop: Waits so many seconds, or until the caller gives up; says whether it has. None:
            nothing but the deadline ends the tries.
        say: Takes a warning when there was no answer for 1.5 seconds, and once a minute from then
            on. None: nobody waits for this call who would want to know.
        clock: Tells the time in seconds.
        sleep: Waits so many seconds, where there is no `stop`.
        chance: See `delays`.

    Raises:
        UnavailableError: No answer by the deadline; says who, how long, and what would do.
        CancelledError: `stop` said so.
        Exception: Whatever else `ask` raises; it is not repeated.
    """
    began = clock()
    waits = delays(policy, chance)
    words_at = began + _QUIET_SECONDS
    for tries in itertools.count(1):
        if stop is not None and stop(0.0):
            raise CancelledError(f"{whom}: called off after {tries - 1} tries")
        left = policy.deadline - (clock() - began)
        try:
            return ask(max(0.0, min(attempt_timeout, left)))
        except (UnavailableError, DeadlineExceededError) as error:
            wait = next(waits)
            if clock() - began + wait >= policy.deadline:
                raise UnavailableError(
                    f"{whom} did not answer for {policy.deadline:g} s ({tries} tries): is it "
                    f"running, and is this its address? The last try: {error}"
                ) from error
            if say is not None and clock() >= words_at:
                say(
                    f"{whom} has not answered for {clock() - began:.0f} s, and is asked for "
                    f"{policy.deadline:g} s in all: is it running, and is this its address? "
                    f"The last try: {error}"
                )
                words_at = clock() + _WORDS_SECONDS
        if stop is None:
            sleep(wait)
        else:
            stop(wait)
    raise AssertionError("unreachable")
