"""Calling again: for requests that may be repeated, until an answer comes or patience ends."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from headrace.errors import CancelledError, DeadlineExceededError, UnavailableError
from headrace.transport.channel import Buffer, Channel

__all__ = ["RetryPolicy", "call_with_retry", "delays"]


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


def call_with_retry(
    channel: Channel,
    message: msgspec.Struct,
    policy: RetryPolicy,
    *,
    attempt_timeout: float,
    buffers: Sequence[Buffer] = (),
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] | None = None,
    chance: Callable[[], float] = random.random,
) -> tuple[msgspec.Struct, Sequence[Buffer]]:
    """Call, and call again while the peer cannot be reached or does not answer.

    Args:
        channel: Where to call; no other request may be unanswered on it.
        message: A request that may be repeated.
        policy: How long to try.
        attempt_timeout: Seconds that one try may take, at most the rest of the deadline.
        buffers: Raw memory that goes with each try.
        stop: When it is set, no other try begins.
        clock: Tells the time in seconds.
        sleep: Waits so many seconds; by default it waits for `stop`, too.
        chance: See `delays`.

    Raises:
        UnavailableError: No answer by the deadline; says who, how long, and what would do.
        CancelledError: `stop` was set.
        HeadraceError: What the peer's handler answered with; such a call is not repeated.
    """
    pause = sleep or (stop.wait if stop is not None else time.sleep)
    began = clock()
    waits = delays(policy, chance)
    for tries in itertools.count(1):
        if stop is not None and stop.is_set():
            raise CancelledError(
                f"{type(message).__name__} to {channel.address} was called off after "
                f"{tries - 1} tries"
            )
        left = policy.deadline - (clock() - began)
        try:
            return channel.call(message, buffers, timeout=max(0.0, min(attempt_timeout, left)))
        except (UnavailableError, DeadlineExceededError) as error:
            wait = next(waits)
            if clock() - began + wait >= policy.deadline:
                raise UnavailableError(
                    f"nobody answered {type(message).__name__} at {channel.address} for "
                    f"{policy.deadline:g} s ({tries} tries): is it running, and is this its "
                    f"address? The last try: {error}"
                ) from error
        pause(wait)
    raise AssertionError("unreachable")
