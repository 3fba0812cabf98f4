"""Samples of other threads at random moments, despite the interpreter lock.

A waiting thread gets the interpreter lock where another thread releases it for long, as
`time.sleep` and system calls do. All samples would be taken there. So after a random pause the
switch interval is short, and the lock is taken wherever the other thread is. This takes a few
tenths of a millisecond, so functions that hold the lock for less are found too rarely.

Some functions, such as small NumPy copies, release the lock and take it again at once. Each release
restarts the switch interval of the waiting threads, so they may wait for the end of a chunk. After
a late wake-up the random pause may therefore be as long as the delay was.
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
from typing import Any

from headrace.forks import call_in_children

__all__ = ["forget_calls", "frames_of_threads", "interrupt_threads", "self_of"]

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
                _restore_switch_interval()


def _restore_switch_interval() -> None:
    # If the program has set another one, it stays. The getter is precise to a microsecond.
    if abs(sys.getswitchinterval() - _SWITCH_SECONDS) < 1e-6:
        sys.setswitchinterval(_normal_switch_interval)


@contextmanager
def frames_of_threads() -> Iterator[dict[int, FrameType]]:
    """Provide the innermost frame of each thread, for reading while the threads run.

    Before Python 3.12, the garbage collector may run while CPython creates the frame object of a
    call. If it runs Python code, such as a finalizer, other threads continue. The call may return,
    and the object then refers to memory that was freed: reading it can crash the process. So the
    collector is paused until the end of the block. A frame may be read after the block only if its
    callers were read in the block.
    """
    with _frames_lock:
        _pause_collector()
        try:
            frames = sys._current_frames()
            try:
                yield frames
            finally:
                # The frames reference each other, including this one.
                frames.clear()
                _forget_ended_calls()
        finally:
            _resume_collector()


def self_of(frame: FrameType) -> object:
    """Return the local variable `self` of a running method; None if it has none.

    Must be called in a block of `frames_of_threads`. Before Python 3.13, `f_locals` updates a
    dictionary that the frame keeps. If that released the last reference to an old value, its
    finalizer could run during the update, while the call returns. So old values are kept until
    after the update.
    """
    if _LOCALS_ARE_VIEWS:
        return frame.f_locals.get("self")
    old_values = list(_read_locals.get(id(frame), {}).values())
    values = _read_locals[id(frame)] = frame.f_locals
    del old_values
    return values.get("self")


def forget_calls() -> None:
    """Release what was read of running calls, at the end of sampling."""
    with _frames_lock:
        _read_locals.clear()


def _forget_ended_calls() -> None:
    for number in list(_read_locals):
        if sys.getrefcount(_read_locals[number]) == 2:  # by `_read_locals` and by this call
            del _read_locals[number]


def _pause_collector() -> None:
    global _normal_threshold
    threshold, *others = gc.get_threshold()
    if _COLLECTS_ANYWHERE and threshold:
        _normal_threshold = threshold
        gc.set_threshold(0, *others)


def _resume_collector() -> None:
    global _normal_threshold
    threshold, *others = gc.get_threshold()
    if (
        _normal_threshold and not threshold
    ):  # otherwise the program has set another one, which stays
        gc.set_threshold(_normal_threshold, *others)
    _normal_threshold = 0


_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
"""Whether any allocation may start the garbage collector; later only between instructions."""
_LOCALS_ARE_VIEWS = sys.version_info >= (3, 13)
"""Whether `f_locals` reads the variables themselves, not a copy."""
_frames_lock = threading.Lock()
_normal_threshold = 0
"""First threshold of the garbage collector while it is paused; otherwise 0."""
_read_locals: dict[int, dict[str, Any]] = {}
"""Local variables of calls that were read, by the `id` of the frame."""


def _reset_after_fork() -> None:
    global _switch_interval_lock, _num_interrupting, _frames_lock
    _switch_interval_lock = threading.Lock()
    _frames_lock = threading.Lock()
    if _num_interrupting:
        _restore_switch_interval()
        _num_interrupting = 0
    _resume_collector()


call_in_children(_reset_after_fork)
