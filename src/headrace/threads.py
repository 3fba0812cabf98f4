"""Thread starts that an interruption (Ctrl-C) leaves either done or not done."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["run_in_thread", "start_thread"]


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, and wait until it runs.

    Signal handlers run in the main thread and may raise between any two of its instructions,
    including those of `Thread.start`. Python would then keep the thread in the starting state
    forever, with everything that it references. So another thread, which no signal interrupts,
    starts it for the main one. If the wait for that is interrupted, the thread starts nevertheless,
    a moment later: the code that ends the thread must know of it before this call.

    Raises:
        RuntimeError: If the system cannot start another thread.
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


def run_in_thread(work: Callable[[], object], wait_seconds: float = 1.0) -> None:
    """Run a function on another thread, and wait for it, at most `wait_seconds`.

    For finalizers that wait for other threads. The garbage collector calls finalizers at any
    instant, even while this thread holds a lock that those threads need: waiting without a limit
    could deadlock.

    Args:
        work: Function to run; its errors are not passed on.
        wait_seconds: Seconds to wait; after that it continues in the background.
    """
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def run() -> None:
        try:
            work()
        finally:
            is_done.release()

    def start() -> None:
        # On the new thread, since it takes locks of `threading` that the caller may hold.
        threading.Thread(target=run, name="headrace-finalizer", daemon=True).start()

    try:
        _thread.start_new_thread(start, ())
    except RuntimeError:  # at interpreter exit, or without a free thread
        work()
    else:
        is_done.acquire(timeout=wait_seconds)
