"""Samples of other threads at random moments, despite the interpreter lock.

A waiting thread gets the interpreter lock where another thread releases it for long, as
`time.sleep` and system calls do. All samples would be taken there. So after a random pause the
switch interval is short, and the lock is taken wherever the other thread is. This takes a few
tenths of a millisecond, so functions that hold the lock for less are found too rarely.

Some functions, such as small NumPy copies, release the lock and take it again at once. Each release
restarts the switch interval of the waiting threads, so they may wait for the end of a chunk. After
a late wake-up the random pause is therefore as long as the delay was.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headrace.forks import call_in_children

__all__ = ["frames_of_threads", "interrupt_threads"]

_SWITCH_SECONDS = 2e-5
"""Seconds after which a sample demands the interpreter lock (`sys.setswitchinterval`)."""
_MIN_JITTER_SECONDS = 0.002
_MAX_JITTER_SECONDS = 0.25
"""Maximum length of the random pause before a sample, after a punctual and a late wait."""

_switch_interval_lock = threading.Lock()
_num_interrupting = 0
"""Number of threads that need the short switch interval."""
_normal_switch_interval = sys.getswitchinterval()


@contextmanager
def interrupt_threads(stop: threading.Event, seconds: float) -> Iterator[bool]:
    """Wait, then take the interpreter lock at a random moment; the block runs at that moment.

    Args:
        stop: Event that ends the wait.
        seconds: Approximate length of the wait.

    Yields:
        Whether the event is set.
    """
    due = time.perf_counter() + seconds
    if stop.wait(seconds):
        yield True
        return
    lateness = time.perf_counter() - due
    jitter = min(max(lateness, _MIN_JITTER_SECONDS), _MAX_JITTER_SECONDS)
    with _short_switch_interval():
        yield stop.wait(random.random() * jitter)


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    global _num_interrupting, _normal_switch_interval
    with _switch_interval_lock:
        _num_interrupting += 1
        if _num_interrupting == 1:
            _normal_switch_interval = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        with _switch_interval_lock:
            _num_interrupting -= 1
            if _num_interrupting == 0:
                sys.setswitchinterval(_normal_switch_interval)


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
    global _switch_interval_lock, _num_interrupting, _frames_lock
    _switch_interval_lock = threading.Lock()
    _frames_lock = threading.Lock()
    if _num_interrupting:
        sys.setswitchinterval(_normal_switch_interval)
        _num_interrupting = 0
    _resume_collector()


call_in_children(_reset_after_fork)
