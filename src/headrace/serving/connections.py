"""Connections to several peers, for one thread, which match replies with requests.

connections.add(peer, channel)
connections.send(peer, message, request)
connections.wait(seconds)     # -> [ReplyReceived(...), PeerLost(...)]
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.errors import HeadraceError
from headrace.transport.channel import Buffer, Channel, Reply
from headrace.transport.channel_poller import ChannelPoller

__all__ = ["PeerConnections", "PeerLost", "ReplyReceived"]

Peer = TypeVar("Peer")
Q = TypeVar("Q")


class ReplyReceived(NamedTuple):
    """A reply, and the request that it answers."""

    peer: Any
    request: Any
    reply: Reply


class PeerLost(NamedTuple):
    """Loss of a connection, with its unanswered requests, oldest first."""

    peer: Any
    requests: list[Any]
    error: HeadraceError


@dataclass
class _Connection(Generic[Q]):
    channel: Channel
    #: By request id, oldest first: the time at which the request expires, and the request.
    requests: dict[int, tuple[float, Q]] = field(default_factory=dict)


class PeerConnections(Generic[Peer, Q]):
    """Sends requests to peers, and waits for the replies of all of them.

    All methods but `wake` are for one thread. A channel is kept until it is dropped, even after a
    loss: it reconnects at the next send.
    """

    def __init__(self) -> None:
        self._poller = ChannelPoller()
        self._by_peer: dict[Peer, _Connection[Q]] = {}
        self._peers: dict[Channel, Peer] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._by_peer

    def __iter__(self) -> Any:
        return iter(list(self._by_peer))

    def add(self, peer: Peer, channel: Channel) -> None:
        """Set the channel of a peer that has none."""
        self._by_peer[peer] = _Connection(channel)
        self._peers[channel] = peer
        self._poller.add(channel)

    def channel(self, peer: Peer) -> Channel:
        """Return the channel of a peer."""
        return self._by_peer[peer].channel

    def send(
        self,
        peer: Peer,
        message: Any,
        request: Q,
        buffers: Sequence[Buffer] = (),
        *,
        expires: float = math.inf,
    ) -> None:
        """Send a message.

        Args:
            peer: Peer that has a channel.
            message: Message to send.
            request: Object that `wait` returns with the reply.
            buffers: Buffers to send with it.
            expires: Seconds after which the reply is dropped, because the request is repeated.

        Raises:
            HeadraceError: If it cannot be sent.
        """
        connection = self._by_peer[peer]
        requests, now = connection.requests, time.monotonic()
        for request_id, (deadline, _) in list(requests.items()):
            if now <= deadline:
                break
            del requests[request_id]
        request_id = connection.channel.send(message, buffers)
        requests[request_id] = now + expires, request

    def wait(self, seconds: float) -> list[ReplyReceived | PeerLost]:
        """Return replies and losses, once there are some, `wake` was called, or time has passed.

        Replies to expired requests and of dropped peers are omitted.
        """
        events: list[ReplyReceived | PeerLost] = []
        for channel, event in self._poller.wait(seconds):
            peer = self._peers.get(channel)
            if peer is None:
                continue
            requests = self._by_peer[peer].requests
            if isinstance(event, HeadraceError):
                events.append(PeerLost(peer, [request for _, request in requests.values()], event))
                requests.clear()
            elif event.request_id in requests:
                events.append(ReplyReceived(peer, requests.pop(event.request_id)[1], event))
        return events

    def wake(self) -> None:
        """End the current or next `wait`. May be called from any thread."""
        self._poller.wake()

    def drop(self, peer: Peer) -> None:
        """Close the channel of a peer, if it has one."""
        connection = self._by_peer.pop(peer, None)
        if connection is not None:
            del self._peers[connection.channel]
            self._poller.remove(connection.channel)
            connection.channel.close()

    def close(self) -> None:
        """Close all channels."""
        for peer in self:
            self.drop(peer)
        self._poller.close()
