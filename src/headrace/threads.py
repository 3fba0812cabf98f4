"""Starting threads so that Ctrl-C, at any instant, leaves them started or not: nothing between."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["run_aside", "start_thread"]


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, and wait until it runs.

    Signals' handlers run in the main thread and may raise between any two of its instructions,
    those of `Thread.start` included. Python then counts the thread as starting for ever, with all
    that it holds. So another thread, which nothing interrupts, does it for the main one. Where the
    wait for that is interrupted, the thread starts all the same, a moment later: whoever may end it
    is to know of it before.

    Raises:
        RuntimeError: The system has no thread left.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    outcome: SimpleQueue[Exception | None] = SimpleQueue()
    _thread.start_new_thread(_start, (thread, outcome))
    error = outcome.get()
    if error is not None:
        raise error


def _start(thread: threading.Thread, outcome: SimpleQueue[Exception | None]) -> None:
    try:
        thread.start()
    except Exception as error:
        outcome.put(error)
    else:
        outcome.put(None)


def run_aside(work: Callable[[], object], wait_seconds: float = 1.0) -> None:
    """Run something on another thread, and return when it is done, or after some seconds.

    It is for finalizers that wait for other threads. The garbage collector calls finalizers at any
    instant, also while this thread holds a lock that those threads need: waiting for them without
    end would be a deadlock.

    Args:
        work: What to run; its errors are its own.
        wait_seconds: After so many it goes on by itself.
    """
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def run() -> None:
        try:
            work()
        finally:
            is_done.release()

    def start() -> None:
        # Here, for it takes locks of `threading`, which the caller's thread may hold just now.
        threading.Thread(target=run, name="headrace-finalizer", daemon=True).start()

    try:
        _thread.start_new_thread(start, ())
    except RuntimeError:  # at the interpreter's exit, or none is left
        work()
    else:
        is_done.acquire(timeout=wait_seconds)
