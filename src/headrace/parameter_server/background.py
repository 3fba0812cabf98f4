"""A thread beside the training loop, for work at parameter servers.

A cluster has one such thread in a process, which does what it is asked in that order: rows that are
pulled ahead are those after the steps that were pushed before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from headrace.errors import FailedPreconditionError
from headrace.forks import stays_with_parent

__all__ = ["Background", "Work"]

T = TypeVar("T")

_FORKED = (
    "this process was forked after work at parameter servers was begun, which only the process "
    "that began it can wait for: use variables and tables there"
)


class Work(Generic[T]):
    """What was submitted; whoever waits for it in a forked child, which has no thread, is refused.

    Args:
        future: What comes of it.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._process = os.getpid()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._here().done()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._here().exception()

    def result(self) -> T:
        """Return what came of it, once it has ended; raises what it failed with."""
        return self._here().result()

    def _here(self) -> Future[T]:
        if self._process != os.getpid():
            raise FailedPreconditionError(_FORKED)
        return self._future


class Background:
    """A thread that begins with the first work it gets, and ends when it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        stays_with_parent(self)

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """Do some work after all that was submitted before."""
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "headrace-parameter-servers")
            return Work(self._thread.submit(work))

    def close(self) -> None:
        """Finish what was submitted."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def leave_to_parent(self) -> None:
        """Begin again in a forked child, which does not have the thread."""
        self._lock, self._thread = threading.Lock(), None
