"""A thread beside the training loop, for work at parameter servers.

A cluster has one such thread in a process, which does what it is asked in that order: rows that are
pulled ahead are those after the steps that were pushed before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    """A thread that begins with the first work it gets, and ends when it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do some work after all that was submitted before."""
        with self._lock:
            if self._thread is None or self._process != os.getpid():
                self._process = os.getpid()
                self._thread = ThreadPoolExecutor(1, "headrace-parameter-servers")
            return self._thread.submit(work)

    def close(self) -> None:
        """Finish what was submitted."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and self._process == os.getpid():
            thread.shutdown()
