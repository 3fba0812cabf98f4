"""ZeroMQ channel: a DEALER socket with a monitor for each connection.

ZeroMQ would reconnect automatically and resend what it still holds. This channel prevents that: a
socket lives for one connection. When its monitor reports that the connection is lost, the socket is
closed and `receive` tells the caller, who alone knows whether to repeat a request (Rule 3 of
`channel`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.open_files import explain_open_error
from headrace.transport import address as addresses
from headrace.transport.arena import Arena, ArenaBudget
from headrace.transport.channel import Buffer, Reply
from headrace.transport.envelope import (
    CLOSING,
    EMPTY_BODY,
    ERROR,
    NOTICE,
    REQUEST,
    ReplyHeader,
    RequestHeader,
    decode_error,
    decode_reply_header,
    encode,
    flat_views,
    join_frames,
    receive_buffers,
    split_frames,
)
from headrace.transport.mappings import SegmentMappings
from headrace.transport.request_tracking import RequestTrackingChannel
from headrace.transport.security import Security
from headrace.transport.shared_memory import (
    BufferLocation,
    MemoryReport,
    SegmentOffer,
    SharedMemoryOptions,
    current_process_identity,
)
from headrace.transport.zeromq_connection import POLL_SECONDS, Connection

__all__ = ["ZeroMQChannel"]

_MAX_REJECTIONS = 3
_RELEASES_PER_NOTICE = 8
#: Options of a channel's own memory. Most requests are small, and most channels send no others, so
#: it is smaller than a server's memory for replies.
_MEMORY = SharedMemoryOptions(segment_bytes=16 << 20, smallest_reply=128 << 10)
#: Memory of all channels of this process together.
_BUDGET = ArenaBudget(_MEMORY.server_bytes)
# Plain integers: combining pyzmq's enumerations takes longer than sending a message.
_NOW = int(zmq.DONTWAIT)
_SOON = 0
_MORE_NOW = int(zmq.DONTWAIT | zmq.SNDMORE)


class ZeroMQChannel(RequestTrackingChannel):
    """One connection at a time to one server."""

    def __init__(
        self,
        address: str,
        *,
        reply_type: Any,
        security: Security | None,
        shared_memory: bool,
        keepalive_timeout: float,
        request_bytes: int,
    ) -> None:
        self._decode = msgspec.msgpack.Decoder(reply_type).decode
        self._security = security
        self._keepalive_timeout = keepalive_timeout
        self._request_bytes = request_bytes
        self._id = b"H" + secrets.token_bytes(16)
        self._connections = itertools.count(1)
        self._request_ids = itertools.count(1)
        #: Replies that had arrived when the connection was lost, and the error of the loss.
        self._arrived_replies: deque[Reply] = deque()
        self._loss_error: HeadraceError | None = None
        #: Number of consecutive connections that the server accepted and closed before the
        #: handshake.
        self._rejections = 0
        self._connection: Connection | None = None
        #: Whether the connection is being dropped. If this is still set later, that was
        #: interrupted, and the sockets may be closed.
        self._is_dropping = False
        self._mappings = SegmentMappings()
        #: Memory for requests, once the server has reported that it can open it.
        self._arena: Arena | None = None
        self._shares_memory = shared_memory
        self._has_sent_identity = False
        # Last: from here on it can be closed.
        super().__init__(address)

    def send(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> int:
        body = msgspec.Raw(encode(message))
        views = flat_views(buffers)
        size = len(body)
        for view in views:
            size += view.nbytes
        if size > self._request_bytes:
            raise ValueError(
                f"a request of {size:,} bytes exceeds the server's limit of "
                f"{self._request_bytes:,}; send it in parts"
            )
        connection = self._get_connection()
        request_id = next(self._request_ids)
        self._unanswered.add(request_id)
        if connection is not None:
            try:
                self._write_request(connection, request_id, body, views)
            except zmq.Again:
                pass  # The connection has just ended; `receive` reports why.
            except BaseException:
                # The next request would be read as the rest of this one.
                self._is_dropping = True
                self._unanswered.discard(request_id)
                self._finish_dropping()
                raise
        return request_id

    def _write_request(
        self, connection: Connection, request_id: int, body: msgspec.Raw, views: list[memoryview]
    ) -> None:
        """Write a request; place its buffers in shared memory if possible."""
        arena = self._arena
        location: BufferLocation | SegmentOffer | None = None
        if views and arena is not None:
            location = arena.write(views)
        if isinstance(location, BufferLocation) and arena is not None:
            header = RequestHeader(
                request_id, REQUEST, body, self._take_memory_report(), location=location
            )
            try:
                self._write(connection, header)
            except BaseException:
                arena.release(location)
                raise
            finally:
                arena.mark_sent(location)
            return
        offer = location if isinstance(location, SegmentOffer) else None
        # If there is no space, segments with slots held for too long are left to the server.
        full = arena is not None and bool(views) and location is None
        retired = arena.retire_overdue() if full and arena is not None else ()
        views, pieces = split_frames(views)
        header = RequestHeader(
            request_id,
            REQUEST,
            body,
            self._take_memory_report(),
            pieces,
            offer=offer,
            retired_segments=retired,
        )
        self._write(connection, header, views)

    def _get_connection(self) -> Connection | None:
        """Return a connection to send on; None while `receive` has yet to report a loss."""
        self._check_usable()
        self._finish_dropping()
        connection = self._connection
        if self._unanswered:
            return connection
        if connection is not None and connection.is_lost():
            self._drop_connection()
            connection = None
        if connection is None:
            self._loss_error = None
            self._has_sent_identity = False
            try:
                host, port = addresses.split(self._address)
                connection = Connection(
                    self._address,
                    addresses.resolve(host, port),
                    self._id + struct.pack(">I", next(self._connections)),
                    self._security,
                    self._keepalive_timeout,
                )
            except UnavailableError as error:
                error.unsent = True
                self._loss_error = error
            except (OSError, zmq.ZMQError) as error:
                # Most likely no descriptor is free; there may be one soon.
                unavailable = UnavailableError(
                    f"cannot connect to {self._address}: {explain_open_error(error)}"
                )
                unavailable.unsent = True
                self._loss_error = unavailable
            self._connection = connection
        return connection

    def _take_memory_report(self) -> Any:
        if not self._shares_memory:
            return None
        if self._has_sent_identity:
            return self._mappings.take_report()
        self._has_sent_identity = True
        return self._mappings.take_report(current_process_identity())

    @staticmethod
    def _write(
        connection: Connection, header: RequestHeader, views: Sequence[memoryview] = ()
    ) -> None:
        dealer = connection.dealer
        if not views:
            dealer.send(encode(header), _NOW)
            return
        dealer.send(encode(header), _MORE_NOW)
        for view in views[:-1]:
            dealer.send(view, _MORE_NOW, copy=False)
        dealer.send(views[-1], _NOW, copy=False)

    def receive(self, timeout: float) -> Reply | None:
        self._check_usable()
        self._finish_dropping()
        until = time.monotonic() + timeout
        while True:
            while self._arrived_replies:
                reply = self._arrived_replies.popleft()
                if reply.request_id in self._unanswered:
                    self._unanswered.discard(reply.request_id)
                    return reply
            if self._loss_error is not None and self._unanswered:
                error, self._loss_error = self._loss_error, None
                self._unanswered.clear()
                try:
                    raise error
                finally:
                    # The traceback refers to this frame; together they would keep the channel
                    # alive.
                    del error
            connection = self._connection
            if connection is None:
                # No request is pending, so no reply will arrive: wait for the timeout.
                remaining = until - time.monotonic()
                if remaining > 0:  # even a sleep of zero seconds lets other threads run
                    time.sleep(remaining)
                return None
            if connection.had_handshake and until - time.monotonic() > POLL_SECONDS:
                # Most replies arrive soon; this costs half of a wait that also checks the monitor.
                found = self._read(connection, _SOON)
                if found is not None:
                    self._send_releases(connection)
                    return found
            answered, news = connection.wait(max(0.0, until - time.monotonic()))
            if news:
                # First, and soon: the cause of a loss is known only if the connection was watched
                # from its start.
                self._check_connection(connection)
                continue
            if answered and (found := self._read(connection)) is not None:
                self._send_releases(connection)
                return found
            if time.monotonic() >= until:
                return None

    def _check_connection(self, connection: Connection) -> None:
        if connection.is_lost():
            while (reply := self._read(connection)) is not None:
                self._unanswered.add(reply.request_id)
                self._arrived_replies.append(reply)
            self._loss_error = self._loss_reason(connection)
            self._drop_connection()

    def _loss_reason(self, connection: Connection) -> HeadraceError | None:
        """Return why a connection was lost; repeated rejections become UnauthenticatedError."""
        self._rejections = self._rejections + 1 if connection.was_rejected else 0
        if self._rejections < _MAX_REJECTIONS:
            if isinstance(connection.reason, UnavailableError):
                connection.reason.unsent = not connection.had_handshake
            return connection.reason
        return UnauthenticatedError(f"{connection.reason} ({self._rejections} times in a row)")

    def _read(self, connection: Connection, when: int = _NOW) -> Reply | None:
        """Return the next reply to a pending request that has arrived or arrives soon."""
        dealer = connection.dealer
        while True:
            try:
                first = dealer.recv(when, copy=False)
            except zmq.Again:
                return None
            when = _NOW  # replies that are not awaited must not prolong the wait
            frames = receive_buffers(dealer, first)
            try:
                header: ReplyHeader = decode_reply_header(first.buffer)
                buffers: Sequence[Buffer] = join_frames(frames, header.frame_counts)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            if header.offer is not None:
                self._mappings.open_segment(header.offer)
            if header.retired_segments:
                self._mappings.close_segments(header.retired_segments)
            if header.report is not None:
                self._apply_memory_report(header.report)
            if header.request_id not in self._unanswered:
                if header.location is not None:
                    self._mappings.release(header.location)
                continue
            self._unanswered.discard(header.request_id)
            message: msgspec.Struct | Exception
            try:
                if header.kind == ERROR:
                    message = decode_error(header.body)
                else:
                    message = self._decode(header.body)
                if header.location is not None:
                    buffers = self._mappings.view(header.location)
            except (msgspec.MsgspecError, LookupError, ValueError, RecursionError) as error:
                message = FailedPreconditionError(
                    f"cannot decode the reply from {self._address} ({error}); is a Headrace "
                    "server of the same version running at this address?"
                )
            return Reply(header.request_id, message, buffers)

    def _apply_memory_report(self, report: MemoryReport) -> None:
        if self._arena is None and report.identity is not None:
            self._arena = Arena(report.identity, _MEMORY, _BUDGET)
        if self._arena is not None:
            self._arena.apply_report(report)

    def _send_releases(self, connection: Connection) -> None:
        # Usually the next request carries the report; a client that only receives sends a notice.
        if self._mappings.num_pending_releases >= _RELEASES_PER_NOTICE:
            report = self._mappings.take_report()
            self._write(connection, RequestHeader(0, NOTICE, EMPTY_BODY, report))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._process != os.getpid():
            # Thread-local objects are dropped in a child before any fork hook runs.
            self.after_fork_in_child()
            return
        self._finish_dropping()
        connection = self._connection
        if connection is not None and connection.is_ready():
            with contextlib.suppress(zmq.ZMQError):
                self._write(connection, RequestHeader(0, CLOSING, EMPTY_BODY))
            # Lets the closing message leave, in the background.
            connection.dealer.linger = 100
        self._drop_connection()
        self._unanswered.clear()
        self._arrived_replies.clear()

    @property
    def has_pending(self) -> bool:
        return bool(self._arrived_replies) or (
            self._loss_error is not None and bool(self._unanswered)
        )

    def sockets(self) -> Sequence[Any]:
        return () if self._connection is None else self._connection.sockets

    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        return

    def after_fork_in_child(self) -> None:
        """Close the copy of the connection in a forked process."""
        super().after_fork_in_child()
        if self._connection is not None:
            self._connection.close_in_child()
            self._connection = None
        self._mappings.clear()
        self._arena = None  # the parent's, and its lock may be held
        self._unanswered.clear()
        self._arrived_replies.clear()

    def _finish_dropping(self) -> None:
        """Finish dropping a connection if that was interrupted."""
        if self._is_dropping:
            self._loss_error = self._loss_error or UnavailableError(
                f"the connection to {self._address} was closed because a request was "
                "interrupted while it was sent"
            )
            self._drop_connection()

    def _drop_connection(self) -> None:
        self._is_dropping = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._mappings.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._is_dropping = False

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()
