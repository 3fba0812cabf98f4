"""A task reader: one thread with a channel to one worker, which fetches one task's elements.

It ends when the worker says that nothing is left or that the task was called off, or when the
worker cannot be reached and the dispatcher no longer lists the task. A worker that cannot be
reached is asked again under the same numbers, so that nothing that it kept is lost or doubled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.errors import CancelledError, HeadraceError, UnavailableError
from headrace.service.client.schedule import Budget, Window
from headrace.service.messages import Elements, GetElements, TaskAddress
from headrace.transport.channel import Channel, Reply

__all__ = ["TaskReader", "TaskWatcher"]

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_FIRST_DELAY = 0.02
_LAST_DELAY = 1.0


class TaskWatcher(Protocol):
    """What a task reader tells to whoever reads all tasks."""

    def deliver(self, task: TaskReader, number: int, result: Chunk | Exception) -> None:
        """Take a result; `task.use_up(number)` is owed for it."""

    def is_listed(self, task_id: int) -> bool:
        """Whether the dispatcher still names the task as one to read."""

    def unreachable(self, task_id: int) -> None:
        """The worker does not answer."""

    def fail(self, error: Exception) -> None:
        """Nothing can be read any more; `error` says why."""

    def ended(self, task: TaskReader) -> None:
        """The thread ends; nothing more will be delivered."""


class TaskReader:
    """Fetches one task.

    Args:
        task: Which, and where.
        client_id: Who asks.
        connect: Opens a channel to a worker's address.
        budget: Credit, shared with the other tasks; used under `changed` alone.
        changed: Notified when credit was given back.
        watcher: Who is told.
    """

    def __init__(
        self,
        task: TaskAddress,
        client_id: str,
        connect: Callable[[str], Channel],
        budget: Budget,
        changed: threading.Condition,
        watcher: TaskWatcher,
    ) -> None:
        self.task = task
        self._client_id = client_id
        self._connect = connect
        self._budget = budget
        self._changed = changed
        self._watcher = watcher
        self._window: Window[tuple[int, int, Chunk | Exception | None]] = Window()
        #: The worker has handed out everything and waits until it is used up.
        self._draining = False
        #: The worker said that nothing is left; answers to other numbers may be under way.
        self._ending = False
        self._over = False
        #: The worker has answered since it was last lost.
        self._answered = False
        self._stopping = threading.Event()
        budget.add(task.task_id)
        self._thread = threading.Thread(
            target=self._run, name=f"headrace-read-task-{task.task_id}", daemon=True
        )

    def start(self) -> None:
        """Begin to fetch."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end, without waiting."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def use_up(self, number: int) -> None:
        """Take note that a result was used up. Called under `changed`, which is then notified."""
        self._window.use_up(number)
        self._budget.used_up(self.task.task_id, number)

    def _run(self) -> None:
        channel: Channel | None = None
        delay = _FIRST_DELAY
        try:
            while not self._stopping.is_set() and not self._over:
                try:
                    if channel is None:
                        channel = self._connect(self.task.worker_address)
                    self._converse(channel)
                    continue
                except UnavailableError as error:
                    _log.debug("worker %s: %s", self.task.worker_address, error)
                    if channel is not None:
                        channel.close()
                        channel = None
                self._watcher.unreachable(self.task.task_id)
                delay = _FIRST_DELAY if self._answered else min(delay * 2, _LAST_DELAY)
                self._answered = False
                if self._stopping.wait(delay):
                    break
                if not self._watcher.is_listed(self.task.task_id):
                    _log.info(
                        "task %d is lost with its worker %s",
                        self.task.task_id,
                        self.task.worker_address,
                    )
                    break
        except Exception as error:
            _log.debug("reading task %d failed", self.task.task_id, exc_info=True)
            self._watcher.fail(error)
        finally:
            if channel is not None:
                channel.close()
            self._watcher.ended(self)

    def _converse(self, channel: Channel) -> None:
        """Ask and take answers until the task is over or the peer is lost."""
        numbers: dict[int, int] = {}
        with self._changed:
            to_send = self._window.to_repeat()
        while not self._stopping.is_set() and not self._over:
            with self._changed:
                to_send += self._ask()
                acknowledged = self._window.acknowledged
                if not to_send and not numbers:
                    self._changed.wait(_POLL_SECONDS)
                    continue
            for number in to_send:
                ticket = channel.send(
                    GetElements(
                        task_id=self.task.task_id,
                        client_id=self._client_id,
                        number=number,
                        acknowledged=acknowledged,
                    )
                )
                numbers[ticket] = number
            to_send = []
            reply = channel.receive(_POLL_SECONDS)
            if reply is not None:
                self._answered = True
                self._take(reply, numbers)

    def _ask(self) -> list[int]:
        """Return the numbers to ask for now."""
        numbers = []
        while not self._ending and not (self._draining and self._window.outstanding):
            now = time.monotonic()
            if not self._budget.may_ask(self.task.task_id, now):
                break
            number = self._window.ask()
            self._budget.asked(self.task.task_id, number, now)
            numbers.append(number)
        return numbers

    def _take(self, reply: Reply, numbers: dict[int, int]) -> None:
        number = numbers.pop(reply.ticket, -1)
        message = reply.message
        answer: Chunk | Exception | None
        first = count = 0
        if isinstance(message, CancelledError):
            # Lost as if the worker were: whether the iteration goes on, the dispatcher knows.
            _log.debug("task %d: %s", self.task.task_id, message)
            self._over = True
            return
        if isinstance(message, Exception):
            answer = message
        elif not isinstance(message, Elements):
            answer = HeadraceError(f"the worker answered with {type(message).__name__}")
        elif message.end:
            answer, self._ending = None, True
        elif message.count == 0:
            answer, self._draining = None, True
        else:
            first, count = message.first, message.count
            try:
                answer = wire.decode(reply.buffers)
            except HeadraceError as error:
                answer = error
        with self._changed:
            for due, result in self._window.take(number, (first, count, answer)):
                self._deliver(due, *result)
            self._over = self._ending and not self._window.unanswered

    def _deliver(
        self, number: int, first: int, count: int, result: Chunk | Exception | None
    ) -> None:
        self._budget.answered(self.task.task_id, number)
        if result is None or not self._window.is_new(first, count):
            self.use_up(number)
            self._changed.notify_all()
        else:
            self._watcher.deliver(self, number, result)
