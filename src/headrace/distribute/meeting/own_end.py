"""The way to the place for the worker in whose process it is: calls, and no socket.

A contribution is handled on the thread that brings it; the answer comes by a queue, from whichever
thread brought the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from headrace.transport.calling_end import CallingEnd
from headrace.transport.channel import Buffer, Handler, Reply, Request
from headrace.transport.envelope import flat_views

__all__ = ["OwnEnd"]

_PEER = "own"
"""What requests that come this way have for a peer."""


class OwnEnd(CallingEnd):
    """A channel to a handler of this process.

    Buffers reach it as read-only views: they stay the caller's, who does not change them before the
    answer. What is read-only in an answer is copied, since others get it, too.

    Args:
        address: For errors.
        handler: Answers requests, some of them later.
    """

    def __init__(self, address: str, handler: Handler) -> None:
        super().__init__(address)
        self._handler = handler
        self._tickets = itertools.count(1)
        self._answers: SimpleQueue[Reply] = SimpleQueue()

    def send(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> int:
        self._check_usable()
        ticket = next(self._tickets)
        self._unanswered.add(ticket)
        views = [view.toreadonly() for view in flat_views(buffers)]
        self._handler([_OwnRequest(ticket, message, views, self._answers.put)])
        return ticket

    def receive(self, timeout: float) -> Reply | None:
        self._check_usable()
        try:
            reply = self._answers.get(timeout=timeout) if timeout > 0 else self._answers.get(False)
        except Empty:
            return None
        self._unanswered.discard(reply.ticket)
        return reply

    def close(self) -> None:
        self._closed = True
        self._unanswered.clear()

    @property
    def has_news(self) -> bool:
        return not self._answers.empty()

    def sockets(self) -> Sequence[Any]:
        return ()

    def listen(self, ring: Callable[[], None] | None) -> None:
        return


class _OwnRequest(Request):
    __slots__ = ("_put", "_ticket", "buffers", "message", "peer", "role")

    def __init__(
        self,
        ticket: int,
        message: msgspec.Struct,
        buffers: Sequence[Buffer],
        put: Callable[[Reply], None],
    ) -> None:
        self._ticket = ticket
        self._put = put
        self.message = message
        self.buffers = buffers
        self.peer = _PEER
        self.role = None

    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, lent: bool = False
    ) -> None:
        views = flat_views(buffers)
        own = [memoryview(bytearray(each)) if lent or each.readonly else each for each in views]
        self._put(Reply(self._ticket, message, own))

    def fail(self, error: Exception) -> None:
        self._put(Reply(self._ticket, error, ()))
