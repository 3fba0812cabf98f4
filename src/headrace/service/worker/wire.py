"""The worker's wire to its dispatcher: one channel in an inbox, for one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError
from headrace.service.messages import DispatcherRequest
from headrace.transport.channel import Channel, Reply
from headrace.transport.inbox import Inbox

__all__ = ["Wire"]

_FORGET_SECONDS = 30.0


class Wire:
    """Sends calls and remembers which answer belongs to which.

    Args:
        inbox: What waits for answers; `Inbox.wake` may be called from any thread.
        connect: Opens a channel to the dispatcher.
    """

    def __init__(self, inbox: Inbox, connect: Callable[[], Channel]) -> None:
        self._inbox = inbox
        self._channel = connect()
        self._asked: dict[int, tuple[float, DispatcherRequest]] = {}
        inbox.add(self._channel)

    def send(self, message: DispatcherRequest) -> None:
        """Send a call."""
        now = time.monotonic()
        # Calls are repeated: answers to what is this old come no more, or do not matter.
        for ticket, (sent, _) in list(self._asked.items()):
            if now - sent <= _FORGET_SECONDS:
                break
            del self._asked[ticket]
        self._asked[self._channel.send(message)] = now, message

    def wait(self, seconds: float) -> list[tuple[DispatcherRequest, Any]]:
        """Return what came of calls, as soon as something did, the inbox was woken, or time passed.

        Returns:
            Calls, each with its answer or the error in its place.
        """
        came: list[tuple[DispatcherRequest, Any]] = []
        for _, what in self._inbox.wait(seconds):
            if isinstance(what, HeadraceError):
                came += [(message, what) for _, message in self._asked.values()]
                self._asked.clear()
            else:
                came += self._answer(what)
        return came

    def _answer(self, reply: Reply) -> list[tuple[DispatcherRequest, Any]]:
        asked = self._asked.pop(reply.ticket, None)
        return [] if asked is None else [(asked[1], reply.message)]

    def close(self) -> None:
        """Close the channel."""
        self._inbox.remove(self._channel)
        self._channel.close()
