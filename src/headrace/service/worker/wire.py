"""The worker's wire to its dispatcher: one channel in an inbox, for one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError
from headrace.service.messages import DispatcherRequest
from headrace.serving.asked import Asked
from headrace.transport.channel import Channel
from headrace.transport.inbox import Inbox

__all__ = ["Wire"]


class Wire:
    """Sends calls and remembers which answer belongs to which.

    Args:
        inbox: What waits for answers; `Inbox.wake` may be called from any thread.
        connect: Opens a channel to the dispatcher.
    """

    def __init__(self, inbox: Inbox, connect: Callable[[], Channel]) -> None:
        self._inbox = inbox
        self._channel = connect()
        self._asked: Asked[DispatcherRequest] = Asked()
        inbox.add(self._channel)

    def send(self, message: DispatcherRequest) -> None:
        """Send a call."""
        self._asked.sent(self._channel.send(message), message, time.monotonic())

    def wait(self, seconds: float) -> list[tuple[DispatcherRequest, Any]]:
        """Return what came of calls, as soon as something did, the inbox was woken, or time passed.

        Returns:
            Calls, each with its answer or the error in its place.
        """
        came: list[tuple[DispatcherRequest, Any]] = []
        for _, what in self._inbox.wait(seconds):
            if isinstance(what, HeadraceError):
                came += [(message, what) for message in self._asked.lost()]
            elif (message := self._asked.answered(what.ticket)) is not None:
                came.append((message, what.message))
        return came

    def close(self) -> None:
        """Close the channel."""
        self._inbox.remove(self._channel)
        self._channel.close()
