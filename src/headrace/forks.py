"""What must not live on in a process that is forked from this one.

Nor may a thread: a child that a user's function forked on a thread of this package has that thread
alone, and once the function returns, nobody is there for whom it would go on. Inside the function
the child may do what it likes (`exec`, `os._exit`); one that returns ends with an error that says
so, in place of waiting for ever.

A signal that asks to leave waits while a process forks: in the child it would else be taken by the
parent's handler, which is there until the calls below are done, and nobody would heed it.
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

__all__ = ["StaysWithParent", "in_each_child", "stays_with_parent"]

_OURS = "headrace."


class StaysWithParent(Protocol):
    """What has sockets or threads, which a forked child must not use."""

    def leave_to_parent(self) -> None:
        """Close the child's copies of all sockets and refuse further use. Must not wait."""


def in_each_child(call: Callable[[], None]) -> Callable[[], None]:
    """Have `call` called in each process that is forked from this one; return what ends that."""
    _calls.append(call)
    return functools.partial(_calls.remove, call)


_calls: list[Callable[[], None]] = []
_here = threading.local()
"""The signals that were held back already where a thread forks."""


def _hold_signals_back() -> None:
    _here.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _let_signals_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _here.mask)


def _call_in_child() -> None:
    for call in _calls:
        try:
            call()
        except Exception:
            traceback.print_exc()
    _let_signals_through()


os.register_at_fork(
    before=_hold_signals_back,
    after_in_parent=_let_signals_through,
    after_in_child=_call_in_child,
)


_owners: weakref.WeakSet[StaysWithParent] = weakref.WeakSet()


def stays_with_parent(owner: StaysWithParent) -> None:
    """Have `owner.leave_to_parent` called in each process that is forked from this one."""
    _owners.add(owner)


def _leave_all_to_parent() -> None:
    # A child that outlives its parent must not keep ports open that nobody listens at, nor
    # connections that look alive to their other ends.
    for owner in list(_owners):
        owner.leave_to_parent()
    _owners.clear()


def _end_where_nobody_is_left() -> None:
    function = _function_on_a_thread_of_ours(sys._getframe(1))
    if function is not None:
        # Traced here, in the child alone, so that no thread has to ask whether it was forked.
        function.f_trace, function.f_trace_lines = _end_at_return, False
        sys.settrace(_trace_nothing)


def _function_on_a_thread_of_ours(frame: FrameType | None) -> FrameType | None:
    """Return the frame that returns to a thread of this package's; None: the thread is another's.

    Args:
        frame: The innermost frame.
    """
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    while frames and _module_of(frames[-1]) == "threading":
        frames.pop()
    if not frames or not _module_of(frames[-1]).startswith(_OURS):
        return None
    while frames and _module_of(frames[-1]).startswith(_OURS):
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
        f"{frame.f_code.co_name!r}, on a thread that a dataset or a worker runs it on, and the "
        "function returned: in this process nobody is left to go on, so it ends here with exit "
        "code 1. End it inside the function (os._exit), or start processes with "
        "`subprocess` or the spawn method of multiprocessing\n".encode(),
    )
    os._exit(1)


in_each_child(_leave_all_to_parent)
in_each_child(_end_where_nobody_is_left)
