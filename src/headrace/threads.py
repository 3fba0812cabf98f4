"""Starting threads so that Ctrl-C, at any instant, leaves them started or not: nothing between."""

from __future__ import annotations

import _thread
import threading
from queue import SimpleQueue

__all__ = ["start_thread"]


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
