"""One connection of a channel: a DEALER socket that connects once, and its monitor.

    connecting --CONNECTED--> handshake --HANDSHAKE_SUCCEEDED--> established
        |                         |                                   |
        no answer,                rejected                            closed by the peer,
        or refused                or silent                           or silent

ZeroMQ reports the same event for a connection that the peer closed and one whose peer was silent.
To tell them apart, this module keeps a duplicate of the socket's descriptor: the kernel knows
whether the other end closed it.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.errors import HeadraceError, UnauthenticatedError, UnavailableError
from headrace.transport.context import shared_context
from headrace.transport.descriptors import Descriptor, closed_by_peer
from headrace.transport.security import Security

__all__ = ["POLL_SECONDS", "Connection"]

POLL_SECONDS = 0.02
"""Seconds that a read of the socket may block without a check of the connection's state."""

_ZERO_COPY_BYTES = 64 << 10
_CONNECT_SECONDS = 5.0
#: Gives three heartbeats within the default timeout. Each costs the server 30 us of CPU time, and a
#: thousand idle peers send little else.
_HEARTBEAT_SECONDS = 4.0
_NEVER_MS = 0x7FFF_0000
# ZeroMQ's timers are a little early or late.
_TIMEOUT_FRACTION = 0.9
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

_NO_KEYS_HINT = (
    "If the server has no keys, connect without keys (`security=`, on the command line --keys)"
)


class _Dealer(zmq.Socket[bytes]):
    """A socket that stops its monitor, closes, then closes the monitor's reader, in this order.

    Otherwise ZeroMQ's I/O thread would block forever on an event that nothing can read any longer,
    and with it all sockets of this process. After an interruption, any code may be the one that
    closes: an `except` block, a second `close`, the garbage collector.
    """

    _made_in = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._made_in = os.getpid()

    def close(self, linger: int | None = None) -> None:
        # In a forked process, the monitor belongs to the parent.
        if not self.closed and self._made_in == os.getpid():
            with contextlib.suppress(zmq.ZMQError):
                self.monitor(None, 0)
        super().close(linger)
        if self._monitor_socket is not None:
            self._monitor_socket.close(linger=0)


class Connection:
    """A DEALER socket and its monitor, from the attempt to connect to the loss.

    Args:
        address: Address of the peer, for errors.
        resolved: The same with a numeric host.
        routing_id: Id by which the server knows this connection.
        security: Keys; None if the connection is not encrypted.
        keepalive_timeout: Seconds for which the peer may be silent.
    """

    def __init__(
        self,
        address: str,
        resolved: str,
        routing_id: bytes,
        security: Security | None,
        keepalive_timeout: float,
    ) -> None:
        self.reason: HeadraceError | None = None
        #: Whether the server accepted the connection and closed it before the handshake was
        #: complete.
        self.was_rejected: bool = False
        self._address = address
        self._secure = security is not None
        self._keepalive_timeout = keepalive_timeout
        self._since = time.monotonic()
        self._connected = False
        self._handshaken = False
        #: Whether an event is being read. If this is still set later, the read was interrupted and
        #: the event is lost.
        self._is_reading_events = False
        self._descriptor: Descriptor | None = None
        self._watched: socket.socket | None = None
        # Not `self`: the context would keep the connection alive after its last other reference.
        self._use = object()
        try:
            self.dealer = shared_context.acquire(self._use).socket(zmq.DEALER, socket_class=_Dealer)
        except BaseException:
            shared_context.release(self._use)
            raise
        try:
            self._set_up(resolved, routing_id, security)
        except BaseException:
            self.close()
            raise

    def _set_up(self, resolved: str, routing_id: bytes, security: Security | None) -> None:
        dealer = self.dealer
        milliseconds = math.ceil(self._keepalive_timeout * 1000)
        dealer.linger = 0
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.rcvtimeo = math.ceil(POLL_SECONDS * 1000)
        dealer.copy_threshold = _ZERO_COPY_BYTES
        dealer.ipv6 = True
        dealer.routing_id = routing_id
        dealer.connect_timeout = math.ceil(self._connect_seconds * 1000)
        dealer.handshake_ivl = milliseconds
        dealer.heartbeat_ivl = math.ceil(
            min(_HEARTBEAT_SECONDS, self._keepalive_timeout / 3) * 1000
        )
        dealer.heartbeat_timeout = milliseconds
        dealer.reconnect_ivl = _NEVER_MS
        if security is not None:
            security.apply(dealer, "client")
        self._monitor = dealer.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        dealer.connect(f"tcp://{resolved}")

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets that become readable when a message or an event of the connection arrives."""
        return self.dealer, self._monitor

    @property
    def _connect_seconds(self) -> float:
        return min(_CONNECT_SECONDS, self._keepalive_timeout)

    def wait(self, seconds: float) -> tuple[bool, bool]:
        """Wait for input; return whether messages and whether monitor events are ready."""
        if seconds <= 0:
            # Costs a fifth of a poll, and runs after each reply. On an established connection,
            # events can wait until there is no reply.
            answered = _is_readable(self.dealer)
            return answered, not (answered and self._handshaken) and _is_readable(self._monitor)
        # Rounded up: a wait of less than a millisecond must not become a busy loop.
        ready = self._poller.poll(math.ceil(seconds * 1000))
        answered = news = False
        for source, _ in ready:
            if source is self.dealer:
                answered = True
            else:
                news = True
        return answered, news

    def is_lost(self) -> bool:
        """Read the monitor's events; return whether the connection is lost (`reason` says why)."""
        if self._is_reading_events and self.reason is None:
            self.reason = UnavailableError(
                f"the connection to {self._address} was closed because this process was "
                "interrupted while it read the connection's state"
            )
        while not self._is_reading_events and _is_readable(self._monitor):
            self._is_reading_events = True
            # Blocks for the second frame, which may arrive a moment after the first.
            monitor_event = recv_monitor_message(self._monitor)
            self._is_reading_events = False
            event = zmq.Event(monitor_event["event"])
            if event == zmq.Event.CONNECTED:
                self._connected = True
                self._since = time.monotonic()
                self._watch(int(monitor_event["value"]))
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._handshaken = True
            elif self.reason is None or isinstance(self.reason, UnavailableError):
                self.reason = self._explain(event)
        return self.reason is not None

    def _watch(self, number: int) -> None:
        self._descriptor = Descriptor.of(number)
        if self._descriptor is not None:
            self._watched = self._descriptor.duplicate()

    @property
    def had_handshake(self) -> bool:
        """Whether the handshake succeeded, so that messages may have reached the peer."""
        return self._handshaken

    def is_ready(self) -> bool:
        """Return whether messages can be sent to the peer now."""
        return not self.is_lost() and self._handshaken

    def _explain(self, event: zmq.Event) -> HeadraceError:
        at = self._address
        elapsed = time.monotonic() - self._since
        if event in (zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_PROTOCOL):
            self.was_rejected = True
            return UnauthenticatedError(
                f"server {at} refused this client: "
                + (
                    (
                        "either server.key is not the server's key, or client.key is not "
                        f"authorized. {_NO_KEYS_HINT}"
                    )
                    if self._secure
                    else (
                        "it requires keys; pass security=Security.load(directory, 'client'), on "
                        "the command line --keys DIRECTORY"
                    )
                )
            )
        if not self._connected:
            if elapsed >= _TIMEOUT_FRACTION * self._connect_seconds:
                return _silent_error(
                    f"no server reachable at {at}: no connection within {elapsed:.1f} s"
                )
            return _refused_error(f"no server reachable at {at}: connection refused")
        if self._handshaken:
            if self._closed_by_peer(elapsed):
                return _refused_error(
                    f"connection to {at} lost: closed by the peer, or the peer has ended"
                )
            return _silent_error(
                f"connection to {at} lost: no data from the peer for {self._keepalive_timeout:g} s"
            )
        if elapsed >= _TIMEOUT_FRACTION * self._keepalive_timeout:
            return _silent_error(
                f"server {at} accepted the connection, but sent no handshake for "
                f"{elapsed:.1f} s; is it paused, or not a Headrace server?"
            )
        self.was_rejected = True
        return _refused_error(
            f"server {at} closed the connection during the handshake; "
            + (
                (
                    "is server.key the key of that server, and is client.key in its "
                    f"authorized_clients? {_NO_KEYS_HINT}"
                )
                if self._secure
                else "does it require keys (`security=`, on the command line --keys)?"
            )
        )

    def _closed_by_peer(self, elapsed: float) -> bool:
        if self._watched is None:
            # Lost before it was watched: not by a timeout if its lifetime was shorter than that.
            return elapsed < self._keepalive_timeout
        return closed_by_peer(self._watched)

    def close(self) -> None:
        """Close the sockets. Idempotent; call it again if it was interrupted."""
        self.dealer.close()
        if self._watched is not None:
            self._watched.close()
            self._watched = None
        shared_context.release(self._use)

    def close_in_child(self) -> None:
        """Close the copies of the descriptors in a forked process; leave all else to the parent."""
        if self._watched is not None:
            self._watched.close()
        if self._descriptor is not None:
            self._descriptor.close()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(_STATE)) & _IN)


def _refused_error(message: str) -> UnavailableError:
    error = UnavailableError(message)
    error.refused = True
    return error


def _silent_error(message: str) -> UnavailableError:
    return UnavailableError(message)
