"""Closures of one worker session: run order and results.

Pure: no threads, no clock. `request` is an opaque handle of a request to answer. A closure's
request is answered once: when the closure ends, is cancelled, or asks for elements; the request
that supplies the elements then replaces it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.coordinator.closure import CANCELLED, Payload
from headrace.coordinator.messages import CancelClosure, CancelReply, RunClosure, RunReply
from headrace.errors import CancelledError
from headrace.transport.channel import Buffer

__all__ = ["WorkerQueue", "WorkerTask"]

R = TypeVar("R")


@dataclass(eq=False)
class WorkerTask(Generic[R]):
    """Closure on its worker.

    Attributes:
        message: The request.
        buffers: Buffers of the request.
        request: Request to answer; None once it was answered.
        writes_rejected: Whether further writes are rejected.
        is_finished: Whether it has ended or was abandoned, so that its result is ignored.
        write_context: Context that rejects its writes; None before it runs.
        leased_elements: Elements of a shared dataset that were sent with it; None without one.
        function: Loaded function.
    """

    message: RunClosure
    buffers: Any
    request: R | None
    writes_rejected: bool = False
    is_finished: bool = False
    write_context: Any = None
    leased_elements: Any = None
    function: Any = None

    def reject_writes(self) -> None:
        """Reject further writes of the closure."""
        self.writes_rejected = True
        if self.write_context is not None:
            self.write_context.reject_writes(CancelledError(CANCELLED))


class WorkerQueue(Generic[R]):
    """Closures of one worker session, from their arrival until they end."""

    def __init__(self) -> None:
        self._waiting: deque[WorkerTask[R]] = deque()
        self._running: dict[int, WorkerTask[R]] = {}
        #: Values waiting to be fetched, by closure number.
        self.results: dict[int, Payload] = {}

    @property
    def num_waiting(self) -> int:
        """Number of closures waiting for a thread."""
        return len(self._waiting)

    @property
    def running(self) -> list[WorkerTask[R]]:
        """Running closures."""
        return list(self._running.values())

    def find_running(self, number: int) -> WorkerTask[R] | None:
        """Return a running closure, or None."""
        return self._running.get(number)

    def add(
        self, message: RunClosure, buffers: list[Buffer], request: R, function: Any = None
    ) -> None:
        """Append a closure."""
        self._waiting.append(WorkerTask(message, buffers, request, function=function))

    def start_next(self) -> WorkerTask[R] | None:
        """Start and return the next closure, or return None."""
        if not self._waiting:
            return None
        task = self._waiting.popleft()
        self._running[task.message.number] = task
        return task

    def finish(self, task: WorkerTask[R]) -> bool:
        """Record that a closure has ended; return False if its outcome is no longer needed."""
        if task.is_finished:
            return False
        del self._running[task.message.number]
        task.is_finished = True
        return True

    def cancel(self, message: CancelClosure) -> tuple[CancelReply, list[tuple[R, RunReply]]]:
        """Cancel a closure; return the reply, and replies to other requests."""
        for task in self._waiting:
            if task.message.number == message.number:
                self._waiting.remove(task)
                return CancelReply(is_dropped=True), _finish_unanswered(task)
        running = self._running.get(message.number)
        if running is None or message.mode == "recall":
            return CancelReply(is_dropped=False), []
        running.reject_writes()
        if message.mode == "reject_writes":
            return CancelReply(is_dropped=False), []
        del self._running[message.number]
        return CancelReply(is_dropped=True), _finish_unanswered(running)

    def close(self) -> list[tuple[R, RunReply]]:
        """End the session; return the replies to pending requests."""
        answers: list[tuple[R, RunReply]] = []
        for task in self._running.values():
            task.reject_writes()
        for task in (*self._waiting, *self._running.values()):
            answers += _finish_unanswered(task)
        self._waiting.clear()
        self._running.clear()
        self.results.clear()
        return answers


def _finish_unanswered(task: WorkerTask[R]) -> list[tuple[R, RunReply]]:
    task.is_finished = True
    request, task.request = task.request, None
    return [] if request is None else [(request, RunReply(is_dropped=True))]
