"""Connected peers of a server: one record for each connection.

A ROUTER socket says who sent a message, but not when a peer disconnects; its monitor says which
descriptor was closed, but not whose. The first message of each connection links the two: it carries
the number of the descriptor through which it arrived.

    monitor: ACCEPTED n ------------------> _accepted_connections[n]
    router:  first message of `route`, n -> _by_route[route], _accepted_connections[n].routes
    monitor: DISCONNECTED n --------------> both removed, and the peer's memory released

Rule 1. All monitor events are read before a new peer is recorded, so that an event of an earlier
        connection with the same descriptor number is never attributed to the new one.
Rule 2. Only the monitor and the peer itself end a connection. Messages may be read after the event
        that their connection ended, when another connection has its number; they do not affect that
        one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from headrace.process_metrics import count_handshake_refused
from headrace.transport.arena import Arena
from headrace.transport.descriptors import Descriptor, limit_receive_buffer, warn_near_file_limit
from headrace.transport.mappings import SegmentMappings
from headrace.transport.shared_memory import (
    BufferLocation,
    MemoryReport,
    ProcessIdentity,
    SegmentOffer,
)

__all__ = ["Peer", "Peers"]

_log = logging.getLogger(__name__)

_EVENTS = (
    zmq.Event.LISTENING
    | zmq.Event.ACCEPTED
    | zmq.Event.ACCEPT_FAILED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_HANDSHAKE_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "keys",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "protocol",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "ended",
}
_STATE = int(zmq.EVENTS)
_IN = int(zmq.POLLIN)
_MAX_WARNED_ADDRESSES = 1000
_MAX_ENDED_ROUTES = 4096
_numbers = itertools.count()
"""Counter for the names of monitor endpoints in this process."""

# A channel's routing id: one letter and 16 random bytes for the channel, then the number of the
# connection.
_CHANNEL_ID_BYTES = 17


class Peer:
    """One connection, from its first message to its end.

    Used by the server's thread only, except `arena` and `take_report`, which are used by the
    threads that reply to requests.
    """

    __slots__ = (
        "arena",
        "descriptor",
        "is_disconnected",
        "last_progress_at",
        "mappings",
        "name",
        "pending_bytes",
        "pending_identity",
        "role",
        "route",
        "untracked_bytes",
    )

    def __init__(
        self, route: bytes, descriptor: Descriptor | None, role: Literal["worker", "client"] | None
    ) -> None:
        self.route: bytes = route
        self.name: str = _parse_channel(route)
        self.descriptor: Descriptor | None = descriptor
        self.role = role
        self.arena: Arena | None = None
        #: Mapped segments of the channel, and the identity of this process that the channel needs
        #: before it offers any.
        self.mappings: SegmentMappings | None = None
        self.pending_identity: ProcessIdentity | None = None
        self.is_disconnected: bool = False
        #: Bytes of replies that the connection has not taken yet, and the part not yet counted.
        self.pending_bytes: int = 0
        self.untracked_bytes: int = 0
        #: Time when the connection last took data, or had none to take.
        self.last_progress_at: float = 0.0

    def share_memory(self, arena: Arena, identity: ProcessIdentity) -> None:
        """Enable shared memory: an arena for replies, mappings for the channel's segments."""
        self.arena = arena
        self.mappings = SegmentMappings()
        self.pending_identity = identity

    def read_memory(
        self, offer: SegmentOffer | None, retired: Iterable[int], placement: BufferLocation | None
    ) -> list[memoryview] | None:
        """Apply what a request says about the channel's memory; return views of its buffers there.

        Raises:
            LookupError: If the segment has not been opened.
            ValueError: If the placement exceeds the segment.
        """
        mappings = self.mappings
        if mappings is None:
            if placement is not None:
                raise LookupError("its buffers are in memory that is not shared")
            return None
        if offer is not None:
            mappings.open_segment(offer)
        mappings.close_segments(retired)
        return None if placement is None else mappings.view(placement)

    def take_report(self) -> MemoryReport | None:
        """Return the next report about the channel's memory, or None. Any thread."""
        mappings = self.mappings
        if mappings is None:
            return None
        introduction, self.pending_identity = self.pending_identity, None
        return mappings.take_report(introduction)

    def release_memory(self) -> None:
        """Release the memory that is held for the peer."""
        self.is_disconnected = True
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        if self.mappings is not None:
            self.mappings.clear()
            self.mappings = None

    def disconnect(self) -> None:
        """End the connection."""
        self.release_memory()
        if self.descriptor is not None:
            self.descriptor.shut_down()


class _AcceptedConnection(NamedTuple):
    """An accepted connection, until the monitor reports its end."""

    descriptor: Descriptor
    host: str
    #: Its peer, and possibly an earlier one with the same number whose first message came late.
    routes: set[bytes]


class Peers:
    """All connections of one ROUTER socket. Used by the server's thread only."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        role_of: Callable[[bytes], Literal["worker", "client"] | None],
        on_disconnect: Callable[[str], None] | None = None,
    ) -> None:
        self._role_of = role_of
        #: Called with the name of each channel whose connection has ended.
        self._on_disconnect = on_disconnect
        self._disconnected_channels: list[str] = []
        self._late_channels: dict[str, None] = {}
        self._router = router
        self._by_route: dict[bytes, Peer] = {}
        self._route_by_channel: dict[str, bytes] = {}
        self._accepted_connections: dict[int, _AcceptedConnection] = {}
        #: Connections that ended most recently. Their messages may be read after the event of their
        #: end, when their descriptor number may belong to another connection.
        self._ended_routes: dict[bytes, None] = {}
        self._listening: list[Descriptor] = []
        self._handshake_failure = ""
        self.num_refused: int = 0
        """Number of connections that ended before the handshake was complete."""
        self._warned: set[str] = set()
        # Not `id(self)`: an endpoint may still be bound when the same id is used again.
        endpoint = f"inproc://headrace-server-{os.getpid()}-{next(_numbers)}"
        router.monitor(endpoint, _EVENTS)
        self.monitor = router.context.socket(zmq.PAIR)
        # Unbounded: a full event queue would block the thread that serves all connections.
        self.monitor.rcvhwm = 0
        self.monitor.connect(endpoint)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_route.values()))

    def find(self, route: bytes) -> Peer | None:
        return self._by_route.get(route)

    def find_by_channel(self, name: str) -> Peer | None:
        """Return a channel's connection (`Request.peer`), or None if it has none. Any thread."""
        route = self._route_by_channel.get(name)
        return None if route is None else self._by_route.get(route)

    def add(self, route: bytes, first: zmq.Frame) -> Peer | None:
        """Record the connection of a first message; return None for a foreign protocol."""
        self.read_monitor()
        try:
            number = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None  # The peer speaks an older ZeroMQ protocol, like stray traffic on the port.
        opened = None if self._has_ended(route) else self._accepted_connections.get(number)
        peer = Peer(route, opened and opened.descriptor, self._role_of(_user_id(first)))
        if opened is None:
            peer.is_disconnected = True  # the peer sent one message and disconnected
            return peer
        # A new connection of a channel knows nothing about the memory of the old one.
        if (earlier := self._route_by_channel.get(peer.name)) is not None:
            self._remove_route(earlier)
        # Another peer with this number stays: it is unknown which of the two is late, and a removed
        # peer would get no replies for as long as it is connected.
        opened.routes.add(route)
        self._by_route[route] = peer
        self._route_by_channel[peer.name] = route
        return peer

    def _has_ended(self, route: bytes) -> bool:
        """Return whether the connection of this late message has ended."""
        latest = self._route_by_channel.get(_parse_channel(route))
        # The connections of a channel are numbered, and it has one at a time.
        return route in self._ended_routes or (latest is not None and route < latest)

    def remove(self, peer: Peer) -> None:
        """Remove a peer that announced its disconnect."""
        self._remove_route(peer.route)

    def record_late_request(self, peer: Peer) -> None:
        """Have a disconnect reported after a late request of a peer, too."""
        if peer.route not in self._by_route:
            self._late_channels[peer.name] = None

    @property
    def has_unreported_disconnects(self) -> bool:
        """Whether a disconnect is unreported; requests of that peer must be handled first."""
        return bool(self._disconnected_channels)

    def report_disconnects(self) -> None:
        """Report disconnected peers, after all of their requests were handled."""
        if not (self._late_channels or self._disconnected_channels):
            return
        late, self._late_channels = self._late_channels, {}
        self._disconnected_channels += [name for name in late if name not in self._route_by_channel]
        while self._disconnected_channels:
            name = self._disconnected_channels.pop(0)
            if self._on_disconnect is not None:
                self._on_disconnect(name)

    def read_monitor(self) -> None:
        """Read all pending monitor events."""
        while int(self.monitor.getsockopt(_STATE)) & _IN:
            news = parse_monitor_message(self.monitor.recv_multipart())
            event = zmq.Event(news["event"])
            number = int(news["value"])
            if event == zmq.Event.ACCEPTED:
                self._record_accepted(number)
            elif event == zmq.Event.DISCONNECTED:
                self._record_disconnected(number)
            elif event == zmq.Event.LISTENING:
                if (found := Descriptor.of(number)) is not None:
                    self._listening.append(found)
            elif event == zmq.Event.ACCEPT_FAILED:
                self._warn_once("accept", f"cannot accept a connection: {os.strerror(number)}")
            else:
                self._handshake_failure = _HANDSHAKE_FAILURES[event]

    def _record_accepted(self, number: int) -> None:
        warn_near_file_limit(number)
        descriptor = Descriptor.of(number)
        if descriptor is None:
            return
        # Also recorded if no descriptor is free for a duplicate: its replies would otherwise be
        # dropped.
        host, connection = "a disconnected peer", descriptor.duplicate()
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                host = str(connection.getpeername()[0]).removeprefix("::ffff:")
                limit_receive_buffer(connection)
        self._accepted_connections[number] = _AcceptedConnection(descriptor, host, set())

    def _record_disconnected(self, number: int) -> None:
        opened = self._accepted_connections.pop(number, None)
        host = "a disconnected peer" if opened is None else opened.host
        for route in () if opened is None else opened.routes:
            self._remove_route(route)
        if self._handshake_failure:
            reason, self._handshake_failure = self._handshake_failure, ""
            self.num_refused += 1
            count_handshake_refused(reason)
            # Wrong keys were logged by the authenticator. Port scans and health checks end like
            # this, too, and are no reason to warn.
            if reason == "protocol":
                self._warn_once(
                    host,
                    f"refused a connection from {host}: wrong or missing keys, or not a "
                    "Headrace client",
                )

    def _warn_once(self, peer: str, message: str) -> None:
        if peer not in self._warned and len(self._warned) < _MAX_WARNED_ADDRESSES:
            self._warned.add(peer)
            _log.warning("%s", message)

    def _remove_route(self, route: bytes) -> None:
        peer = self._by_route.pop(route, None)
        if peer is None:
            return
        peer.release_memory()
        self._ended_routes[route] = None
        if len(self._ended_routes) > _MAX_ENDED_ROUTES:
            del self._ended_routes[next(iter(self._ended_routes))]
        if self._route_by_channel.get(peer.name) == route:
            del self._route_by_channel[peer.name]
            self._disconnected_channels.append(peer.name)
        if peer.descriptor is not None:
            opened = self._accepted_connections.get(peer.descriptor.number)
            if opened is not None:
                opened.routes.discard(route)

    def close(self) -> None:
        """Release everything; the owner closes the router."""
        for peer in self:
            peer.release_memory()
        self._by_route.clear()
        self._router.disable_monitor()
        self.monitor.close(linger=0)

    def close_in_child(self) -> None:
        """Close the copies of the port and of all connections in a forked process."""
        for descriptor in [
            *self._listening,
            *(each.descriptor for each in self._accepted_connections.values()),
        ]:
            descriptor.close()


def _parse_channel(route: bytes) -> str:
    return route[:_CHANNEL_ID_BYTES].hex()


def _user_id(frame: zmq.Frame) -> bytes:
    try:
        user = frame.get("User-Id")
    except zmq.ZMQError:
        return b""
    return user.encode() if isinstance(user, str) else bytes(user)
