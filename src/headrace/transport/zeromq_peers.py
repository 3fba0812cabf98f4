"""Who is connected to a server: one record for each connection, made and dropped in time.

A ROUTER says who sent a message, but not when a peer goes; its monitor says which descriptor was
closed, but not whose it was. The first message of each connection tells the two apart: it carries
the number of the descriptor that it came through.

    monitor: ACCEPTED n ------------------> open[n]
    router:  first message of `route`, n -> peers[route], of_descriptor[n]
    monitor: DISCONNECTED n --------------> both dropped, and the peer's memory with them

Rule 1. The monitor is read to its end before a new peer is recorded, so that news about an earlier
        connection with the same number is never taken for news about this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from headrace.counts import count_handshake_refused
from headrace.transport.arena import Arena
from headrace.transport.descriptors import Descriptor, warn_near
from headrace.transport.mappings import Mappings
from headrace.transport.shared_memory import HostIdentity, MemoryReport, Offer, Placement

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
_REFUSALS = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "keys",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "protocol",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "ended",
}
_STATE = int(zmq.EVENTS)
_IN = int(zmq.POLLIN)
_MOST_NAMES = 1000

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
        "gone",
        "introduction",
        "mappings",
        "moved_at",
        "name",
        "role",
        "route",
        "unmarked",
        "unread",
    )

    def __init__(
        self, route: bytes, descriptor: Descriptor | None, role: Literal["worker", "client"] | None
    ) -> None:
        self.route = route
        self.name = route[:_CHANNEL_ID_BYTES].hex()
        self.descriptor = descriptor
        self.role = role
        self.arena: Arena | None = None
        #: The channel's own memory, and what it is to know of this process before it offers any.
        self.mappings: Mappings | None = None
        self.introduction: HostIdentity | None = None
        self.gone = False
        #: Bytes of answers that its connection has not taken yet, and those not counted so far.
        self.unread = 0
        self.unmarked = 0
        #: When its connection took something, or had nothing to take.
        self.moved_at = 0.0

    def share(self, arena: Arena, identity: HostIdentity) -> None:
        """Share memory from now on: an arena for answers, and whatever the channel offers."""
        self.arena = arena
        self.mappings = Mappings()
        self.introduction = identity

    def read_memory(
        self, offer: Offer | None, retired: Iterable[int], placement: Placement | None
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
            mappings.consider(offer)
        mappings.retire(retired)
        return None if placement is None else mappings.view(placement)

    def take_report(self) -> MemoryReport | None:
        """Return what is to be said about the channel's memory, on any thread."""
        mappings = self.mappings
        if mappings is None:
            return None
        introduction, self.introduction = self.introduction, None
        return mappings.take_report(introduction)

    def leave(self) -> None:
        """Let go of what is kept for the peer."""
        self.gone = True
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        if self.mappings is not None:
            self.mappings.forget()
            self.mappings = None

    def cut(self) -> None:
        """End the connection."""
        self.leave()
        if self.descriptor is not None:
            self.descriptor.shut_down()


class Peers:
    """All connections of one ROUTER. Belongs to the server's thread."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        role_of: Callable[[bytes], Literal["worker", "client"] | None],
        gone: Callable[[str], None] | None = None,
    ) -> None:
        self._role_of = role_of
        #: Told of each channel whose connection has ended.
        self._gone = gone
        self._router = router
        self._by_route: dict[bytes, Peer] = {}
        self._of_descriptor: dict[int, bytes] = {}
        self._of_channel: dict[str, bytes] = {}
        self._open: dict[int, tuple[Descriptor, str]] = {}
        self._listening: list[Descriptor] = []
        self._refusal = ""
        self.refused = 0
        """How many connections ended before they began."""
        self._complained: set[str] = set()
        endpoint = f"inproc://headrace-server-{os.getpid()}-{id(self)}"
        router.monitor(endpoint, _EVENTS)
        self.monitor = router.context.socket(zmq.PAIR)
        # Unbounded: a full queue of news would stop the thread that serves all connections.
        self.monitor.rcvhwm = 0
        self.monitor.connect(endpoint)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_route.values()))

    def find(self, route: bytes) -> Peer | None:
        return self._by_route.get(route)

    def meet(self, route: bytes, first: zmq.Frame) -> Peer | None:
        """Record the connection of which `first` is the first message; None if it is not ours."""
        self.read_news()
        try:
            number = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None  # What speaks a protocol older than ours, as noise on the port may.
        opened = self._open.get(number)
        peer = Peer(route, opened and opened[0], self._role_of(_user(first)))
        # Who had this descriptor is gone, and a new connection of a channel knows nothing of the
        # memory of the old one.
        for earlier in (self._of_descriptor.get(number), self._of_channel.get(peer.name)):
            if earlier is not None:
                self._drop(earlier)
        if opened is None:
            peer.gone = True  # It said one thing and left.
        else:
            self._by_route[route] = peer
            self._of_descriptor[number] = route
            self._of_channel[peer.name] = route
        return peer

    def forget(self, peer: Peer) -> None:
        """Take note of a goodbye."""
        self._drop(peer.route)

    def read_news(self) -> None:
        """Read all that the monitor has to say."""
        while int(self.monitor.getsockopt(_STATE)) & _IN:
            news = parse_monitor_message(self.monitor.recv_multipart())
            event = zmq.Event(news["event"])
            number = int(news["value"])
            if event == zmq.Event.ACCEPTED:
                self._accepted(number)
            elif event == zmq.Event.DISCONNECTED:
                self._disconnected(number)
            elif event == zmq.Event.LISTENING:
                if (found := Descriptor.of(number)) is not None:
                    self._listening.append(found)
            elif event == zmq.Event.ACCEPT_FAILED:
                self._complain("accept", f"a connection cannot be accepted: {os.strerror(number)}")
            else:
                self._refusal = _REFUSALS[event]

    def _accepted(self, number: int) -> None:
        warn_near(number)
        descriptor = Descriptor.of(number)
        if descriptor is None:
            return
        # Also where no number is left for a second handle: its answers would be dropped else.
        host, connection = "a peer that is gone", descriptor.duplicate()
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                host = str(connection.getpeername()[0]).removeprefix("::ffff:")
        self._open[number] = (descriptor, host)

    def _disconnected(self, number: int) -> None:
        _, host = self._open.pop(number, (None, "a peer that is gone"))
        route = self._of_descriptor.pop(number, None)
        if route is not None:
            self._drop(route)
        if self._refusal:
            reason, self._refusal = self._refusal, ""
            self.refused += 1
            count_handshake_refused(reason)
            # Wrong keys were reported by who decided. Whoever only looks whether the port is open
            # ends so, too; that is no reason to warn.
            if reason == "protocol":
                self._complain(
                    host,
                    f"refused a connection from {host}: it has another key for this server, or "
                    "none, or speaks otherwise",
                )

    def _complain(self, whom: str, words: str) -> None:
        if whom not in self._complained and len(self._complained) < _MOST_NAMES:
            self._complained.add(whom)
            _log.warning("%s", words)

    def _drop(self, route: bytes) -> None:
        peer = self._by_route.pop(route, None)
        if peer is None:
            return
        peer.leave()
        if self._of_channel.get(peer.name) == route:
            del self._of_channel[peer.name]
            if self._gone is not None:
                self._gone(peer.name)
        if peer.descriptor is not None:
            number = peer.descriptor.number
            if self._of_descriptor.get(number) == route:
                del self._of_descriptor[number]

    def close(self) -> None:
        """Let go of everything; the router is closed by its owner."""
        for peer in self:
            peer.leave()
        self._by_route.clear()
        self._router.disable_monitor()
        self.monitor.close(linger=0)

    def close_in_child(self) -> None:
        """Close the child's copies of the port and of all connections."""
        for descriptor in [*self._listening, *(found for found, _ in self._open.values())]:
            descriptor.close()


def _user(frame: zmq.Frame) -> bytes:
    try:
        user = frame.get("User-Id")
    except zmq.ZMQError:
        return b""
    return user.encode() if isinstance(user, str) else bytes(user)
