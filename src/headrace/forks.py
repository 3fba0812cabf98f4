"""Handling of forks: resources and threads that must not survive in a forked child.

If a user's function forks on a thread of this package, the child has only that thread, and the
thread has no work to continue once the function returns. Inside the function the child may do
anything (`exec`, `os._exit`). When the function returns, the child exits with an error instead of
hanging.

SIGINT and SIGTERM are blocked during a fork: until the calls below are done, the child has the
parent's signal handler, and a signal would be lost.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Protocol

__all__ = ["ForkSensitive", "call_in_children", "register_fork_sensitive"]

_PACKAGE_PREFIX = "headrace."


class ForkSensitive(Protocol):
    """Object with sockets or threads, which a forked child must not use."""

    def after_fork_in_child(self) -> None:
        """Close the child's copies of all sockets and refuse further use. Must not block."""


def call_in_children(call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` in each process forked from this one; return a function that unregisters it."""
    _calls.append(call)
    return functools.partial(_calls.remove, call)


_calls: list[Callable[[], None]] = []
_fork_state = threading.local()
"""Signal mask from before the fork, by thread."""


def _block_signals() -> None:
    _fork_state.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork_state.mask)


def _call_in_child() -> None:
    for call in _calls:
        try:
            call()
        except Exception:
            traceback.print_exc()
    _unblock_signals()


os.register_at_fork(
    before=_block_signals,
    after_in_parent=_unblock_signals,
    after_in_child=_call_in_child,
)


_owners: weakref.WeakSet[ForkSensitive] = weakref.WeakSet()


def register_fork_sensitive(owner: ForkSensitive) -> None:
    """Call `owner.after_fork_in_child` in each process forked from this one."""
    _owners.add(owner)


def _notify_after_fork() -> None:
    # A child that outlives its parent must not keep ports open on which no thread listens, nor
    # connections that look alive to their peers.
    for owner in list(_owners):
        owner.after_fork_in_child()
    _owners.clear()


def _end_on_forked_thread() -> None:
    function = _find_thread_function(sys._getframe(1))
    if function is not None:
        # Traced in the child only, so that threads need not check whether they were forked.
        function.f_trace, function.f_trace_lines = _end_at_return, False
        sys.settrace(_trace_nothing)


def _find_thread_function(frame: FrameType | None) -> FrameType | None:
    """Return the frame that returns to a thread of this package; None for other threads.

    Args:
        frame: The innermost frame.
    """
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    while frames and _module_of(frames[-1]) == "threading":
        frames.pop()
    if not frames or not _module_of(frames[-1]).startswith(_PACKAGE_PREFIX):
        return None
    while frames and _module_of(frames[-1]).startswith(_PACKAGE_PREFIX):
        frames.pop()
    return frames[-1] if frames else None


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _trace_nothing(frame: FrameType, event: str, value: object) -> None:
    return None


def _end_at_return(frame: FrameType, event: str, value: object) -> object:
    if event != "return":
        return _end_at_return
    os.write(
        2,
        f"headrace: process {os.getpid()} was forked inside the function "
        f"{frame.f_code.co_name!r} on a thread of a dataset or a worker, and the function has "
        "returned. The forked process cannot continue the thread's work, so it exits with code 1. "
        "End it inside the function (os._exit), or start processes with `subprocess` or the spawn "
        "method of multiprocessing\n".encode(),
    )
    os._exit(1)


call_in_children(_notify_after_fork)
call_in_children(_end_on_forked_thread)
