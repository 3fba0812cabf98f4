"""The wires of a reader: a channel to the dispatcher and one for each task, for one thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.errors import DeadlineExceededError, HeadraceError, UnavailableError
from headrace.service.messages import (
    CloseIteration,
    DispatcherRequest,
    GetElements,
    SettleTask,
    TaskAddress,
)
from headrace.serving.asked import Asked
from headrace.transport.channel import Channel, Reply
from headrace.transport.inbox import Inbox

__all__ = ["Line", "TaskEvent", "Verdict", "Wires"]

_GOODBYE_SECONDS = 0.5


class TaskEvent(NamedTuple):
    """What came of a request to a task's worker: an answer, or the loss of the connection."""

    task_id: int
    number: int
    what: Reply | HeadraceError


class Verdict(NamedTuple):
    """What came of a request to the dispatcher; `asked` is None if all requests were lost."""

    asked: DispatcherRequest | None
    what: Reply | HeadraceError


class Line:
    """The channel of a reader to the dispatcher, on its way from one thread to another.

    The consumer's thread opens the iteration, and leaves the channel to the I/O thread, which would
    else connect again: that took a tenth of a short epoch.

    Args:
        connect: Opens a channel to the dispatcher.
    """

    def __init__(self, connect: Callable[[], Channel]) -> None:
        self._connect = connect
        self._kept: list[Channel] = []
        self._is_taken = False

    def keep(self, channel: Channel) -> None:
        """Keep a channel for whoever takes it; close it where that was done."""
        if self._is_taken:
            channel.close()
        else:
            self._kept.append(channel)

    def take(self) -> Channel:
        """Return the last channel that was kept, or a new one."""
        self._is_taken = True
        if not self._kept:
            return self._connect()
        channel = self._kept.pop()
        # An opening that was interrupted and repeated may have left one, too.
        while self._kept:
            self._kept.pop().close()
        return channel


class Wires:
    """Sends requests and remembers which answer belongs to which.

    Args:
        inbox: What waits for answers; `Inbox.wake` may be called from any thread.
        connect_dispatcher: Opens a channel to the dispatcher.
        connect: Opens a channel to the worker that has a task.
    """

    def __init__(
        self,
        inbox: Inbox,
        connect_dispatcher: Callable[[], Channel],
        connect: Callable[[TaskAddress], Channel],
    ) -> None:
        self._inbox = inbox
        self._connect = connect
        self._dispatcher = connect_dispatcher()
        self._asked: Asked[DispatcherRequest] = Asked()
        self._channels: dict[int, Channel] = {}
        self._tasks: dict[Channel, int] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        inbox.add(self._dispatcher)

    def ask(self, task: TaskAddress, number: int, message: GetElements) -> None:
        """Send a request to a task's worker.

        Raises:
            HeadraceError: The worker cannot be reached this way at all.
        """
        task_id = task.task_id
        channel = self._channels.get(task_id)
        if channel is None:
            channel = self._connect(task)
            self._channels[task_id] = channel
            self._tasks[channel] = task_id
            self._numbers[task_id] = {}
            self._inbox.add(channel)
        self._numbers[task_id][channel.send(message)] = number

    def call(self, message: DispatcherRequest) -> None:
        """Send a request to the dispatcher."""
        self._asked.sent(self._dispatcher.send(message), message, time.monotonic())

    def wait(self, timeout: float) -> list[TaskEvent | Verdict]:
        """Return what came, as soon as something did, the inbox was woken, or time passed."""
        events: list[TaskEvent | Verdict] = []
        for channel, what in self._inbox.wait(timeout):
            if channel is self._dispatcher:
                events.append(self._verdict(what))
                continue
            task_id = self._tasks.get(channel)
            if task_id is None:
                continue  # dropped meanwhile
            if isinstance(what, Reply):
                number = self._numbers[task_id].pop(what.ticket, -1)
                events.append(TaskEvent(task_id, number, what))
            else:
                self.drop(task_id)
                events.append(TaskEvent(task_id, -1, what))
        return events

    def _verdict(self, what: Reply | HeadraceError) -> Verdict:
        if isinstance(what, Reply):
            return Verdict(self._asked.answered(what.ticket), what)
        self._asked.lost()
        return Verdict(None, what)

    def drop(self, task_id: int) -> None:
        """Close the channel to a task's worker, if there is one."""
        channel = self._channels.pop(task_id, None)
        if channel is not None:
            del self._tasks[channel]
            del self._numbers[task_id]
            self._inbox.remove(channel)
            channel.close()

    def close(self, words: Sequence[SettleTask], goodbye: CloseIteration) -> None:
        """Close everything; the dispatcher hears the last words, if it answers soon."""
        for task_id in list(self._channels):
            self.drop(task_id)
        with contextlib.suppress(HeadraceError):
            for word in words:
                self._dispatcher.send(word)
            ticket = self._dispatcher.send(goodbye)
            until = time.monotonic() + _GOODBYE_SECONDS
            while (left := until - time.monotonic()) > 0:
                with contextlib.suppress(UnavailableError, DeadlineExceededError):
                    reply = self._dispatcher.receive(left)
                    if reply is None or reply.ticket == ticket:
                        break
                    continue
                break
        self._inbox.remove(self._dispatcher)
        self._dispatcher.close()
        self._inbox.close()
