"""A request received through a ROUTER socket, and its reply."""

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
    copy_views,
    encode,
    encode_error,
    flat_views,
    split_frames,
)
from headrace.transport.shared_memory import BufferLocation, SegmentOffer
from headrace.transport.zeromq_peers import Peer
from headrace.transport.zeromq_reply_writer import QueuedReply

__all__ = ["ZeroMQRequest"]


class ZeroMQRequest(Request):
    """A request whose reply is queued for the server's thread."""

    __slots__ = (
        "_allocation",
        "_post",
        "_request_id",
        "_source",
        "_unanswered",
        "buffers",
        "message",
        "peer",
        "role",
    )

    def __init__(
        self,
        send: Callable[[QueuedReply], None],
        source: Peer,
        request_id: int,
        buffers: Sequence[Buffer],
    ) -> None:
        self._post = send
        self._source = source
        self._request_id = request_id
        self._unanswered = [True]
        #: Memory of an arena in which the reply is built.
        self._allocation: tuple[Arena, BufferLocation, np.ndarray] | None = None
        self.peer = source.name
        self.role = source.role
        self.buffers = buffers

    def allocate(self, size: int) -> memoryview | None:
        arena = self._source.arena
        found = None if arena is None or self._allocation is not None else arena.allocate(size)
        if arena is None or found is None:
            return None
        self._allocation = arena, *found
        return found[1].data

    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, borrowed: bool = False
    ) -> None:
        # If encoding fails, this raises, and the request can still be answered with `fail`.
        body = msgspec.Raw(encode(message))
        views = flat_views(buffers)
        try:
            self._unanswered.pop()  # one list operation: two threads cannot both succeed
        except IndexError:
            return
        try:
            self._reply(body, views, borrowed)
        except BaseException:
            self._unanswered.append(True)
            raise

    def _reply(self, body: msgspec.Raw, views: list[memoryview], lent: bool) -> None:
        arena = self._source.arena
        location: BufferLocation | SegmentOffer | None = None
        if self._allocation is not None:
            arena, location = self._take_allocation(views)
        if views and location is None and arena is not None:
            location = arena.write(views)
        if not isinstance(location, BufferLocation) or arena is None:
            offer = location if isinstance(location, SegmentOffer) else None
            views, pieces = split_frames(copy_views(views) if lent else views)
            report = self._source.take_report()
            header = ReplyHeader(self._request_id, REPLY, body, None, offer, pieces, report=report)
            self._send(header, views)
            return
        try:
            report = self._source.take_report()
            self._send(ReplyHeader(self._request_id, REPLY, body, location, report=report), ())
        except BaseException:
            arena.release(location)
            raise
        finally:
            arena.mark_sent(location)

    def _take_allocation(
        self, views: list[memoryview]
    ) -> tuple[Arena | None, BufferLocation | None]:
        """Return the location of the reply, if it was built in the memory allocated for it."""
        assert self._allocation is not None
        (arena, placement, memory), self._allocation = self._allocation, None
        there = range(memory.ctypes.data, memory.ctypes.data + memory.nbytes)
        for number, view in enumerate(views):
            if not view.nbytes or np.frombuffer(view, np.uint8).ctypes.data not in there:
                continue
            if number == 0 and view.nbytes == memory.nbytes:
                made = arena.append(placement, views[1:])
                if made is not None:
                    return arena, made
            views[number] = copy_views([view])[0]  # the memory is released below
        arena.release(placement)
        arena.mark_sent(placement)
        return self._source.arena, None

    def fail(self, error: Exception) -> None:
        body = msgspec.Raw(encode_error(error))
        try:
            self._unanswered.pop()
        except IndexError:
            return
        if self._allocation is not None:
            self._take_allocation([])
        report = self._source.take_report()
        self._send(ReplyHeader(self._request_id, ERROR, body, report=report), ())

    def _send(self, header: ReplyHeader, views: Sequence[memoryview]) -> None:
        self._post(QueuedReply(self._source, self._request_id, encode(header), views))
