"""One request as it came through a ROUTER, and the way of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from headrace.transport.arena import Arena
from headrace.transport.channel import Buffer, Request
from headrace.transport.envelope import (
    ERROR,
    REPLY,
    ReplyHeader,
    copied,
    cut,
    encode,
    encode_error,
    flat_views,
)
from headrace.transport.shared_memory import Offer, Placement
from headrace.transport.zeromq_outbox import Answer
from headrace.transport.zeromq_peers import Peer

__all__ = ["ZeroMQRequest"]


class ZeroMQRequest(Request):
    """A request that is answered by posting to the server's thread."""

    __slots__ = (
        "_origin",
        "_post",
        "_room",
        "_ticket",
        "_unanswered",
        "buffers",
        "message",
        "peer",
        "role",
    )

    def __init__(
        self,
        post: Callable[[Answer], None],
        origin: Peer,
        ticket: int,
        buffers: Sequence[Buffer],
    ) -> None:
        self._post = post
        self._origin = origin
        self._ticket = ticket
        self._unanswered = [True]
        #: Memory of an arena in which the answer is made.
        self._room: tuple[Arena, Placement, np.ndarray] | None = None
        self.peer = origin.name
        self.role = origin.role
        self.buffers = buffers

    def room(self, size: int) -> memoryview | None:
        arena = self._origin.arena
        found = None if arena is None or self._room is not None else arena.room(size)
        if arena is None or found is None:
            return None
        self._room = arena, *found
        return found[1].data

    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, lent: bool = False
    ) -> None:
        # What cannot be sent raises here, and the request stays open for `fail`.
        body = msgspec.Raw(encode(message))
        views = flat_views(buffers)
        try:
            self._unanswered.pop()  # One list operation: two threads cannot both succeed.
        except IndexError:
            return
        try:
            self._reply(body, views, lent)
        except BaseException:
            self._unanswered.append(True)
            raise

    def _reply(self, body: msgspec.Raw, views: list[memoryview], lent: bool) -> None:
        arena = self._origin.arena
        placed: Placement | Offer | None = None
        if self._room is not None:
            arena, placed = self._made_in_place(views)
        if views and placed is None and arena is not None:
            placed = arena.place(views)
        if not isinstance(placed, Placement) or arena is None:
            offer = placed if isinstance(placed, Offer) else None
            views, pieces = cut(copied(views) if lent else views)
            report = self._origin.take_report()
            header = ReplyHeader(self._ticket, REPLY, body, None, offer, pieces, report=report)
            self._send(header, views)
            return
        try:
            report = self._origin.take_report()
            self._send(ReplyHeader(self._ticket, REPLY, body, placed, report=report), ())
        except BaseException:
            arena.take_back(placed)
            raise
        finally:
            arena.posted(placed)

    def _made_in_place(self, views: list[memoryview]) -> tuple[Arena | None, Placement | None]:
        """Return where the answer lies, if it was made in the memory that was given for it."""
        assert self._room is not None
        (arena, placement, memory), self._room = self._room, None
        there = range(memory.ctypes.data, memory.ctypes.data + memory.nbytes)
        for number, view in enumerate(views):
            if not view.nbytes or np.frombuffer(view, np.uint8).ctypes.data not in there:
                continue
            if number == 0 and view.nbytes == memory.nbytes:
                made = arena.beside(placement, views[1:])
                if made is not None:
                    return arena, made
            views[number] = copied([view])[0]  # the memory is another answer's from here on
        arena.take_back(placement)
        arena.posted(placement)
        return self._origin.arena, None

    def fail(self, error: Exception) -> None:
        body = msgspec.Raw(encode_error(error))
        try:
            self._unanswered.pop()
        except IndexError:
            return
        if self._room is not None:
            self._made_in_place([])
        report = self._origin.take_report()
        self._send(ReplyHeader(self._ticket, ERROR, body, report=report), ())

    def _send(self, header: ReplyHeader, views: Sequence[memoryview]) -> None:
        self._post(Answer(self._origin, self._ticket, encode(header), views))
