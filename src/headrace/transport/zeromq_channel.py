"""The calling end over ZeroMQ: a DEALER socket for each connection, and a monitor beside it.

ZeroMQ would reconnect by itself and send again what it still holds. This channel does not let it: a
socket lives for one connection, and when its monitor says that the connection is lost, the socket
goes and `receive` tells the caller, who alone knows whether to repeat a request (Rule 3).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.transport import address as addresses
from headrace.transport.channel import Buffer, Channel, Reply
from headrace.transport.context import shared_context
from headrace.transport.envelope import (
    ERROR,
    GOODBYE,
    NOTHING,
    NOTICE,
    REQUEST,
    ReplyHeader,
    RequestHeader,
    cut,
    decode_error,
    decode_reply_header,
    encode,
    flat_views,
    join,
    receive_buffers,
)
from headrace.transport.security import Security
from headrace.transport.shared_memory import Mappings, this_process

__all__ = ["ZeroMQChannel"]

_ZERO_COPY_BYTES = 64 << 10
_TIMES_TURNED_AWAY = 3
_CONNECT_MS = 5_000
_HANDSHAKE_MS = 4_000
_HEARTBEAT_MS = 1_000
_SILENCE_MS = 4_000
_NEVER_MS = 0x7FFF_0000
_RELEASES_WORTH_A_NOTICE = 8
# Plain numbers: pyzmq's enumerations take longer to combine than a message to send.
_NOW = int(zmq.DONTWAIT)
_MORE_NOW = int(zmq.DONTWAIT | zmq.SNDMORE)
_IN = int(zmq.POLLIN)
_STATE = int(zmq.EVENTS)

_EVENTS = (
    zmq.Event.CONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_SUCCEEDED
)


class ZeroMQChannel(Channel):
    """One connection at a time to one server."""

    def __init__(
        self,
        address: str,
        *,
        reply_type: Any,
        security: Security | None,
        shared_memory: bool,
    ) -> None:
        self._address = address
        self._decode = msgspec.msgpack.Decoder(reply_type).decode
        self._security = security
        self._id = b"H" + secrets.token_bytes(16)
        self._connections = itertools.count(1)
        self._tickets = itertools.count(1)
        self._unanswered: set[int] = set()
        #: Answers that had arrived when the connection was lost, and what was lost with it.
        self._arrived: deque[Reply] = deque()
        self._lost: HeadraceError | None = None
        #: Connections in a row that the server took and ended before they began.
        self._turned_away = 0
        self._connection: _Connection | None = None
        self._mappings = Mappings()
        self._shares_memory = shared_memory
        self._introduced = False
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    def send(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> int:
        body = msgspec.Raw(encode(message))
        views = flat_views(buffers)
        connection = self._connected()
        ticket = next(self._tickets)
        self._unanswered.add(ticket)
        if connection is not None:
            views, pieces = cut(views)
            header = RequestHeader(ticket, REQUEST, body, self._report(), pieces)
            self._write(connection, header, views)
        return ticket

    def _connected(self) -> _Connection | None:
        """Return a connection to send on; None while a loss has yet to be told by `receive`."""
        if self._closed:
            raise FailedPreconditionError(f"the channel to {self._address} is closed")
        connection = self._connection
        if connection is not None and connection.pid != os.getpid():
            # A forked child: the connection is the parent's.
            self._connection = connection = None
            self._id = b"H" + secrets.token_bytes(16)
            self._mappings.forget()
            self._unanswered.clear()
        if self._unanswered:
            return connection
        if connection is not None and connection.is_lost():
            self._drop_connection()
            connection = None
        if connection is None:
            self._lost = None
            self._introduced = False
            try:
                host, port = addresses.split(self._address)
                connection = _Connection(
                    self._address,
                    addresses.resolve(host, port),
                    self._id + struct.pack(">I", next(self._connections)),
                    self._security,
                )
            except UnavailableError as error:
                self._lost = error
            self._connection = connection
        return connection

    def _report(self) -> Any:
        if not self._shares_memory:
            return None
        if self._introduced:
            return self._mappings.take_report()
        self._introduced = True
        return self._mappings.take_report(this_process())

    @staticmethod
    def _write(
        connection: _Connection, header: RequestHeader, views: Sequence[memoryview] = ()
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
        if self._closed:
            raise FailedPreconditionError(f"the channel to {self._address} is closed")
        until = time.monotonic() + timeout
        while True:
            while self._arrived:
                reply = self._arrived.popleft()
                if reply.ticket in self._unanswered:
                    self._unanswered.discard(reply.ticket)
                    return reply
            if self._lost is not None and self._unanswered:
                error, self._lost = self._lost, None
                self._unanswered.clear()
                raise error
            connection = self._connection
            if connection is None:
                # Nothing was asked, so nothing comes: the caller's time passes as agreed.
                time.sleep(max(0.0, until - time.monotonic()))
                return None
            answered, news = connection.wait(max(0.0, until - time.monotonic()))
            if answered and (found := self._read(connection)) is not None:
                self._tell_releases(connection)
                return found
            if news:
                self._look_after(connection)
            elif time.monotonic() >= until:
                return None

    def _look_after(self, connection: _Connection) -> None:
        if connection.is_lost():
            while (reply := self._read(connection)) is not None:
                self._unanswered.add(reply.ticket)
                self._arrived.append(reply)
            self._lost = self._judge(connection)
            self._drop_connection()

    def _judge(self, connection: _Connection) -> HeadraceError | None:
        """Say why a connection was lost; a server that turns us away again and again means it."""
        self._turned_away = self._turned_away + 1 if connection.was_turned_away else 0
        if self._turned_away < _TIMES_TURNED_AWAY:
            return connection.reason
        return UnauthenticatedError(f"{connection.reason} ({self._turned_away} times in a row)")

    def _read(self, connection: _Connection) -> Reply | None:
        """Return the next answer that has arrived and that someone waits for."""
        dealer = connection.dealer
        while True:
            try:
                first = dealer.recv(_NOW)
            except zmq.Again:
                return None
            frames = receive_buffers(dealer)
            try:
                header: ReplyHeader = decode_reply_header(first)
                buffers: Sequence[Buffer] = join(frames, header.pieces)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            if header.offer is not None:
                self._mappings.consider(header.offer)
            if header.ticket not in self._unanswered:
                if header.placement is not None:
                    self._mappings.drop(header.placement)
                continue
            self._unanswered.discard(header.ticket)
            message: msgspec.Struct | Exception
            try:
                if header.kind == ERROR:
                    message = decode_error(header.body)
                else:
                    message = self._decode(header.body)
                if header.placement is not None:
                    buffers = self._mappings.view(header.placement)
            except (msgspec.MsgspecError, LookupError, ValueError, RecursionError) as error:
                message = FailedPreconditionError(
                    f"the answer of {self._address} cannot be understood ({error}); "
                    "is this its address, and do both ends run the same version?"
                )
            return Reply(header.ticket, message, buffers)

    def _tell_releases(self, connection: _Connection) -> None:
        # Usually the next request carries them; a consumer that only receives says so itself.
        if self._mappings.releases_waiting >= _RELEASES_WORTH_A_NOTICE:
            report = self._mappings.take_report()
            self._write(connection, RequestHeader(0, NOTICE, NOTHING, report))

    def call(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, timeout: float
    ) -> tuple[msgspec.Struct, Sequence[Buffer]]:
        if self._unanswered:
            raise FailedPreconditionError(
                f"call() while {len(self._unanswered)} earlier requests are unanswered"
            )
        ticket = self.send(message, buffers)
        reply = self.receive(timeout)
        if reply is None:
            self._unanswered.discard(ticket)
            raise DeadlineExceededError(
                f"{self._address} did not answer {type(message).__name__} in {timeout:g} s"
            )
        if isinstance(reply.message, Exception):
            raise reply.message
        return reply.message, reply.buffers

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        connection = self._connection
        if connection is not None and connection.established():
            with contextlib.suppress(zmq.ZMQError):
                self._write(connection, RequestHeader(0, GOODBYE, NOTHING))
            # Time for the goodbye to leave, spent in the background.
            connection.dealer.linger = 100
        self._drop_connection()
        self._unanswered.clear()
        self._arrived.clear()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._mappings.forget()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


class _Connection:
    """A DEALER that connects once, and the monitor that tells how it fares."""

    def __init__(
        self,
        address: str,
        resolved: str,
        routing_id: bytes,
        security: Security | None,
    ) -> None:
        self.pid = os.getpid()
        self.reason: HeadraceError | None = None
        self._address = address
        self._secure = security is not None
        self._handshaken = False
        self._connected = False
        self.dealer = dealer = shared_context.borrow().socket(zmq.DEALER)
        try:
            self._set_up(resolved, routing_id, security)
        except BaseException:
            dealer.close()
            shared_context.give_back()
            raise

    def _set_up(self, resolved: str, routing_id: bytes, security: Security | None) -> None:
        dealer = self.dealer
        dealer.linger = 0
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.copy_threshold = _ZERO_COPY_BYTES
        dealer.ipv6 = True
        dealer.routing_id = routing_id
        dealer.connect_timeout = _CONNECT_MS
        dealer.handshake_ivl = _HANDSHAKE_MS
        dealer.heartbeat_ivl = _HEARTBEAT_MS
        dealer.heartbeat_timeout = _SILENCE_MS
        dealer.reconnect_ivl = _NEVER_MS
        if security is not None:
            security.apply(dealer, "client")
        self._monitor = dealer.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        dealer.connect(f"tcp://{resolved}")

    @property
    def was_turned_away(self) -> bool:
        """Whether the server took the connection and ended it before the handshake was done."""
        return self._connected and not self._handshaken

    def wait(self, seconds: float) -> tuple[bool, bool]:
        """Wait until something arrives; tell whether messages did, and whether news did."""
        # Rounded up: a wait of less than a millisecond must not become a busy loop.
        ready = self._poller.poll(math.ceil(seconds * 1000))
        answered = news = False
        for socket, _ in ready:
            if socket is self.dealer:
                answered = True
            else:
                news = True
        return answered, news

    def is_lost(self) -> bool:
        """Read the monitor's news; tell whether the connection is over (`reason` says why)."""
        while int(self._monitor.getsockopt(_STATE)) & _IN:
            news = recv_monitor_message(self._monitor, _NOW)
            event = zmq.Event(news["event"])
            if event == zmq.Event.CONNECTED:
                self._connected = True
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._handshaken = True
            elif self.reason is None or isinstance(self.reason, UnavailableError):
                self.reason = self._explain(event)
        return self.reason is not None

    def established(self) -> bool:
        """Whether the peer can be told something now."""
        return self.pid == os.getpid() and not self.is_lost() and self._handshaken

    def _explain(self, event: zmq.Event) -> HeadraceError:
        at = self._address
        if event in (zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_PROTOCOL):
            return UnauthenticatedError(
                f"the server at {at} does not let this client in: "
                + (
                    "the server's key is another one, or it does not know the client's"
                    if self._secure
                    else "it wants keys; pass security=Security.load(directory, 'client')"
                )
            )
        if not self._connected:
            return UnavailableError(f"nobody answers at {at}: connection refused or timed out")
        if not self._handshaken:
            return UnavailableError(
                f"the server at {at} ended the connection before it began; "
                + (
                    "is server_key the key of this server?"
                    if self._secure
                    else "does it want keys?"
                )
            )
        return UnavailableError(f"the connection to {at} was lost: the peer closed or is gone")

    def close(self) -> None:
        if self.pid != os.getpid():
            return  # The parent's, before a fork: neither sockets nor context are ours.
        self._poller.unregister(self.dealer)
        self._poller.unregister(self._monitor)
        self.dealer.disable_monitor()
        self._monitor.close(linger=0)
        self.dealer.close()
        shared_context.give_back()
