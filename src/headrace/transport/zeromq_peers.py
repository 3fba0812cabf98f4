"""Who is connected to a server: one record for each connection, made and dropped in time.

A ROUTER says who sent a message, but not when a peer goes; its monitor says which descriptor was
closed, but not whose it was. The first message of each connection tells the two apart: it carries
the number of the descriptor that it came through.

    monitor: ACCEPTED n ------------------> open[n]
    router:  first message of `route`, n -> peers[route], in open[n].routes
    monitor: DISCONNECTED n --------------> both dropped, and the peer's memory with them

Rule 1. The monitor is read to its end before a new peer is recorded, so that news about an earlier
        connection with the same number is never taken for news about this one.
Rule 2. Only the monitor and the peer itself end a connection. Messages may be read after the news
        of their connection's end, when another one has its number: they take nothing from that one.
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

from headrace.counts import count_handshake_refused
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
"""Numbers of servers in this process."""

# A channel's routing id: one letter and 16 random bytes for the channel, then the number of the
# connection.
_CHANNEL_ID_BYTES = 17


class Peer:
    """One connection, from its first message to its end.

    Belongs to the server's thread, but for `arena` and `take_report`, which those who answer
    requests use.
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
        self.route = route
        self.name = _parse_channel(route)
        self.descriptor = descriptor
        self.role = role
        self.arena: Arena | None = None
        #: The channel's own memory, and what it is to know of this process before it offers any.
        self.mappings: SegmentMappings | None = None
        self.pending_identity: ProcessIdentity | None = None
        self.is_disconnected = False
        #: Bytes of answers that its connection has not taken yet, and those not counted so far.
        self.pending_bytes = 0
        self.untracked_bytes = 0
        #: When its connection took something, or had nothing to take.
        self.last_progress_at = 0.0

    def share_memory(self, arena: Arena, identity: ProcessIdentity) -> None:
        """Share memory from now on: an arena for answers, and whatever the channel offers."""
        self.arena = arena
        self.mappings = SegmentMappings()
        self.pending_identity = identity

    def read_memory(
        self, offer: SegmentOffer | None, retired: Iterable[int], placement: BufferLocation | None
    ) -> list[memoryview] | None:
        """Take note of what a request says of the channel's memory; view what it placed there.

        Raises:
            LookupError: The segment is not one that was opened.
            ValueError: The placement reaches beyond the segment.
        """
        mappings = self.mappings
        if mappings is None:
            if placement is not None:
                raise LookupError("its buffers lie in memory that is not shared")
            return None
        if offer is not None:
            mappings.open_segment(offer)
        mappings.close_segments(retired)
        return None if placement is None else mappings.view(placement)

    def take_report(self) -> MemoryReport | None:
        """Return what is to be said about the channel's memory, on any thread."""
        mappings = self.mappings
        if mappings is None:
            return None
        introduction, self.pending_identity = self.pending_identity, None
        return mappings.take_report(introduction)

    def release_memory(self) -> None:
        """Let go of what is kept for the peer."""
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
    """A connection that was accepted, until the monitor says that it ended."""

    descriptor: Descriptor
    host: str
    #: Its peer; besides, maybe, one that had the same number before and was first heard of late.
    routes: set[bytes]


class Peers:
    """All connections of one ROUTER. Belongs to the server's thread."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        role_of: Callable[[bytes], Literal["worker", "client"] | None],
        on_disconnect: Callable[[str], None] | None = None,
    ) -> None:
        self._role_of = role_of
        #: Told of each channel whose connection has ended.
        self._on_disconnect = on_disconnect
        self._disconnected_channels: list[str] = []
        self._late_channels: dict[str, None] = {}
        self._router = router
        self._by_route: dict[bytes, Peer] = {}
        self._route_by_channel: dict[str, bytes] = {}
        self._accepted_connections: dict[int, _AcceptedConnection] = {}
        #: Connections that ended last. What they sent may be read later than the news of their
        #: end, and by then their number may be that of another connection.
        self._ended_routes: dict[bytes, None] = {}
        self._listening: list[Descriptor] = []
        self._handshake_failure = ""
        self.num_refused = 0
        """How many connections ended before they began."""
        self._warned: set[str] = set()
        # Not `id(self)`: an endpoint may still be bound when its number is used again.
        endpoint = f"inproc://headrace-server-{os.getpid()}-{next(_numbers)}"
        router.monitor(endpoint, _EVENTS)
        self.monitor = router.context.socket(zmq.PAIR)
        # Unbounded: a full queue of news would stop the thread that serves all connections.
        self.monitor.rcvhwm = 0
        self.monitor.connect(endpoint)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_route.values()))

    def find(self, route: bytes) -> Peer | None:
        return self._by_route.get(route)

    def find_by_channel(self, name: str) -> Peer | None:
        """Return the connection of a channel (`Request.peer`); None: it has none. Any thread."""
        route = self._route_by_channel.get(name)
        return None if route is None else self._by_route.get(route)

    def add(self, route: bytes, first: zmq.Frame) -> Peer | None:
        """Record the connection of which `first` is the first message; None if it is not ours."""
        self.read_monitor()
        try:
            number = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None  # What speaks a protocol older than ours, as noise on the port may.
        opened = None if self._has_ended(route) else self._accepted_connections.get(number)
        peer = Peer(route, opened and opened.descriptor, self._role_of(_user_id(first)))
        if opened is None:
            peer.is_disconnected = True  # It said one thing and left.
            return peer
        # A new connection of a channel knows nothing of the memory of the old one.
        if (earlier := self._route_by_channel.get(peer.name)) is not None:
            self._remove_route(earlier)
        # Whoever else has this number stays: which of the two is late cannot be known here, and
        # to drop the other would leave it without answers for as long as it is connected.
        opened.routes.add(route)
        self._by_route[route] = peer
        self._route_by_channel[peer.name] = route
        return peer

    def _has_ended(self, route: bytes) -> bool:
        """Whether the connection that this late message came through has ended."""
        latest = self._route_by_channel.get(_parse_channel(route))
        # The connections of a channel are numbered, and it has one at a time.
        return route in self._ended_routes or (latest is not None and route < latest)

    def remove(self, peer: Peer) -> None:
        """Take note of a goodbye."""
        self._remove_route(peer.route)

    def record_late_request(self, peer: Peer) -> None:
        """Take note of a request of one that may be gone; it is not to be the last word on it."""
        if peer.route not in self._by_route:
            self._late_channels[peer.name] = None

    @property
    def has_unreported_disconnects(self) -> bool:
        """Whether somebody has gone who was not reported; what it asked is to be handled first."""
        return bool(self._disconnected_channels)

    def report_disconnects(self) -> None:
        """Report who has gone, once all that they asked was handled."""
        if not (self._late_channels or self._disconnected_channels):
            return
        late, self._late_channels = self._late_channels, {}
        self._disconnected_channels += [name for name in late if name not in self._route_by_channel]
        while self._disconnected_channels:
            name = self._disconnected_channels.pop(0)
            if self._on_disconnect is not None:
                self._on_disconnect(name)

    def read_monitor(self) -> None:
        """Read all that the monitor has to say."""
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
                self._warn_once("accept", f"a connection cannot be accepted: {os.strerror(number)}")
            else:
                self._handshake_failure = _HANDSHAKE_FAILURES[event]

    def _record_accepted(self, number: int) -> None:
        warn_near_file_limit(number)
        descriptor = Descriptor.of(number)
        if descriptor is None:
            return
        # Also where no number is left for a second handle: its answers would be dropped else.
        host, connection = "a peer that is gone", descriptor.duplicate()
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                host = str(connection.getpeername()[0]).removeprefix("::ffff:")
                limit_receive_buffer(connection)
        self._accepted_connections[number] = _AcceptedConnection(descriptor, host, set())

    def _record_disconnected(self, number: int) -> None:
        opened = self._accepted_connections.pop(number, None)
        host = "a peer that is gone" if opened is None else opened.host
        for route in () if opened is None else opened.routes:
            self._remove_route(route)
        if self._handshake_failure:
            reason, self._handshake_failure = self._handshake_failure, ""
            self.num_refused += 1
            count_handshake_refused(reason)
            # Wrong keys were reported by who decided. Whoever only looks whether the port is open
            # ends so, too; that is no reason to warn.
            if reason == "protocol":
                self._warn_once(
                    host,
                    f"refused a connection from {host}: it has another key for this server, or "
                    "none, or speaks otherwise",
                )

    def _warn_once(self, whom: str, words: str) -> None:
        if whom not in self._warned and len(self._warned) < _MAX_WARNED_ADDRESSES:
            self._warned.add(whom)
            _log.warning("%s", words)

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
        """Let go of everything; the router is closed by its owner."""
        for peer in self:
            peer.release_memory()
        self._by_route.clear()
        self._router.disable_monitor()
        self.monitor.close(linger=0)

    def close_in_child(self) -> None:
        """Close the child's copies of the port and of all connections."""
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
