"""Samples of other threads at random moments, despite the interpreter lock.

A waiting thread gets the interpreter lock where another thread releases it, as NumPy and
`time.sleep` do. All samples would be taken there. So after a random pause the switch interval is
short, and the lock is taken wherever the other thread is. This takes a few tenths of a millisecond,
so functions that hold the lock for less are found too rarely.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headrace.forks import call_in_children

__all__ = ["frames_of_threads", "interrupt_threads"]

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


@contextmanager
def frames_of_threads() -> Iterator[dict[int, FrameType]]:
    """Provide the innermost frame of each thread, for reading while the threads run.

    Before Python 3.12, the garbage collector may run while CPython creates the frame object of a
    call. If it runs Python code, such as a finalizer, other threads continue; the call may return,
    and the object then refers to memory that was freed. Reading it can end the process. So the
    collector is paused until the end of the block; afterwards, frame objects that were not yet read
    must not be read.
    """
    with _frames_lock:
        global _is_collector_paused
        _is_collector_paused = _COLLECTS_ANYWHERE and gc.isenabled()
        if _is_collector_paused:
            gc.disable()
        try:
            frames = sys._current_frames()
            try:
                yield frames
            finally:
                # The frames reference each other, including this one.
                frames.clear()
        finally:
            _resume_collector()


def _resume_collector() -> None:
    global _is_collector_paused
    if _is_collector_paused:
        gc.enable()
    _is_collector_paused = False


_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
"""Whether any allocation may start the garbage collector; later only between instructions."""
_frames_lock = threading.Lock()
_is_collector_paused = False


def _reset_after_fork() -> None:
    global _switch_interval_lock, _frames_lock
    _switch_interval_lock = threading.Lock()
    _frames_lock = threading.Lock()
    _resume_collector()


call_in_children(_reset_after_fork)
