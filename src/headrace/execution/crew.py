"""Threads that run jobs, and are never waited for without bound.

Rule 1. The threads are daemons: one that is stuck in a user's function holds up neither `close`
        nor the end of the interpreter. It ends by itself when the function returns.
Rule 2. A job lets nothing escape: it hands errors, of whatever kind, to whoever waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from headrace.threads import start_thread

__all__ = ["Crew"]

Job: TypeAlias = Callable[[], None]


class Crew:
    """Up to `size` threads, started as they are needed, that run jobs in turn.

    Args:
        size: The most threads.
        name: Their name.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, job: Job) -> None:
        """Have a thread run a job, after those that were submitted before it."""
        if len(self._threads) < self._size and not self._idle.acquire(blocking=False):
            thread = threading.Thread(
                target=_work, args=(self._jobs, self._idle), name=self._name, daemon=True
            )
            self._threads.append(thread)
            start_thread(thread)
        self._jobs.put(job)

    def dismiss(self) -> None:
        """Let each thread end after the jobs that were submitted; wait for none."""
        for _ in self._threads:
            self._jobs.put(None)


def _work(jobs: SimpleQueue[Job | None], idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        job()
        job = None  # not kept alive while this thread waits
        idle.release()
