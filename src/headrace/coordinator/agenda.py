"""What one life of a worker has to do: closures in the order in which they came, and their ends.

Pure: no thread, no clock. `request` is what is to be answered, and opaque. A closure's request is
answered once: when it ends, when it is called off, or when it asks for elements, after which the
one that brings them takes its place.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.coordinator.closure import CANCELLED, Payload
from headrace.coordinator.messages import CalledOff, CallOff, Ran, Run
from headrace.errors import CancelledError
from headrace.transport.channel import Buffer

__all__ = ["Agenda", "Task"]

R = TypeVar("R")


@dataclass(eq=False)
class Task(Generic[R]):
    """A closure at a worker.

    Attributes:
        run: What was asked.
        buffers: That came with it.
        request: To be answered; None: it was, for now or for good.
        is_refused: It may write no more.
        is_over: Nobody waits for its end any more; its thread is replaced.
        attempt: What refuses its writes; None before it runs.
        lease: Elements of a shared dataset that it was given; None: none.
        function: What it calls, as it is loaded.
    """

    run: Run
    buffers: Any
    request: R | None
    is_refused: bool = False
    is_over: bool = False
    attempt: Any = None
    lease: Any = None
    function: Any = None

    def refuse(self) -> None:
        """Let it write no more."""
        self.is_refused = True
        if self.attempt is not None:
            self.attempt.refuse(CancelledError(CANCELLED))


class Agenda(Generic[R]):
    """Closures of one life, from their arrival to their end."""

    def __init__(self) -> None:
        self._waiting: deque[Task[R]] = deque()
        self._running: dict[int, Task[R]] = {}
        #: Values that wait for somebody to take them.
        self.values: dict[int, Payload] = {}

    @property
    def num_waiting(self) -> int:
        """Closures that wait for a thread."""
        return len(self._waiting)

    @property
    def running(self) -> list[Task[R]]:
        """Closures that have begun."""
        return list(self._running.values())

    def find(self, number: int) -> Task[R] | None:
        """Return a closure that has begun."""
        return self._running.get(number)

    def add(self, run: Run, buffers: list[Buffer], request: R, function: Any = None) -> None:
        """Take note of a closure."""
        self._waiting.append(Task(run, buffers, request, function=function))

    def begin_next(self) -> Task[R] | None:
        """Return the next closure, which begins now; None: there is none."""
        if not self._waiting:
            return None
        task = self._waiting.popleft()
        self._running[task.run.number] = task
        return task

    def end(self, task: Task[R]) -> bool:
        """Take note that a closure has ended; False: nobody waits for that."""
        if task.is_over:
            return False
        del self._running[task.run.number]
        task.is_over = True
        return True

    def call_off(self, message: CallOff) -> tuple[CalledOff, list[tuple[R, Ran]]]:
        """Call a closure off; return the answer, and answers to others."""
        for task in self._waiting:
            if task.run.number == message.number:
                self._waiting.remove(task)
                return CalledOff(is_dropped=True), _drop(task)
        running = self._running.get(message.number)
        if running is None or message.how == "recall":
            return CalledOff(is_dropped=False), []
        running.refuse()
        if message.how == "refuse":
            return CalledOff(is_dropped=False), []
        del self._running[message.number]
        return CalledOff(is_dropped=True), _drop(running)

    def close(self) -> list[tuple[R, Ran]]:
        """End this life; return what is to be answered."""
        answers: list[tuple[R, Ran]] = []
        for task in self._running.values():
            task.refuse()
        for task in (*self._waiting, *self._running.values()):
            answers += _drop(task)
        self._waiting.clear()
        self._running.clear()
        self.values.clear()
        return answers


def _drop(task: Task[R]) -> list[tuple[R, Ran]]:
    task.is_over = True
    request, task.request = task.request, None
    return [] if request is None else [(request, Ran(is_dropped=True))]
