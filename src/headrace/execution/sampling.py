"""Samples of other threads at random moments, despite the interpreter lock.

A waiting thread gets the interpreter lock where another thread releases it, as NumPy and
`time.sleep` do. All samples would be taken there. So after a random pause the switch interval is
short, and the lock is taken wherever the other thread is. This takes a few tenths of a millisecond,
so functions that hold the lock for less are found too rarely.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.forks import call_in_children

__all__ = ["interrupt_threads"]

_SWITCH_SECONDS = 2e-5
"""Seconds after which a sample demands the interpreter lock (`sys.setswitchinterval`)."""
_MAX_JITTER_SECONDS = 0.002

_switch_interval_lock = threading.Lock()


@contextmanager
def interrupt_threads(stop: threading.Event) -> Iterator[bool]:
    """Take the interpreter lock at a random moment of the next two milliseconds.

    Args:
        stop: Event that ends the pause.

    Yields:
        Whether the event is set.
    """
    with _switch_interval_lock:
        switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            yield stop.wait(random.random() * _MAX_JITTER_SECONDS)
        finally:
            sys.setswitchinterval(switch_interval)


def _unlock_after_fork() -> None:
    global _switch_interval_lock
    _switch_interval_lock = threading.Lock()


call_in_children(_unlock_after_fork)
