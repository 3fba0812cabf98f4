"""Tests of `PeerConnections`: matching of replies to requests, and lost requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace.service.messages import DispatcherReply, DispatcherRequest, Done, Ping
from headrace.serving.connections import PeerConnections, PeerLost, ReplyReceived
from headrace.transport import zeromq
from headrace.transport.channel import Request, TransportServer

SECONDS = 10.0


class Peer:
    """A server that replies when the test requests it."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.server: TransportServer = zeromq.serve(self._take, request_type=DispatcherRequest)

    def _take(self, requests: Sequence[Request]) -> None:
        self.requests += requests


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.server.close()


@pytest.fixture
def connections(peer: Peer) -> Iterator[PeerConnections[str, Any]]:
    found: PeerConnections[str, Any] = PeerConnections()
    found.add("peer", zeromq.connect(peer.server.address, reply_type=DispatcherReply))
    yield found
    found.close()


def wait_for(condition: Any) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_reply_is_returned_with_its_request(peer: Peer, connections: Any) -> None:
    for name in ("one", "two"):
        connections.send("peer", Ping(), name)
    wait_for(lambda: len(peer.requests) == 2)
    for request in reversed(peer.requests):
        request.reply(Done())
        (event,) = connections.wait(SECONDS)
        assert isinstance(event, ReplyReceived)
        assert (event.peer, event.request) == (
            "peer",
            "two" if request is peer.requests[1] else "one",
        )


def test_requests_are_lost_with_their_connection(peer: Peer, connections: Any) -> None:
    for name in ("one", "two"):
        connections.send("peer", Ping(), name)
    wait_for(lambda: len(peer.requests) == 2)
    peer.server.close()
    (event,) = connections.wait(SECONDS)
    assert isinstance(event, PeerLost)
    assert (event.peer, event.requests) == ("peer", ["one", "two"])


def test_reply_to_an_expired_request_is_dropped(peer: Peer, connections: Any) -> None:
    connections.send("peer", Ping(), "old", expires=-1.0)
    connections.send("peer", Ping(), "new")
    wait_for(lambda: len(peer.requests) == 2)
    for request in peer.requests:
        request.reply(Done())
    found: list[Any] = []
    while not found:
        found += connections.wait(SECONDS)
    assert [event.request for event in found] == ["new"]


def test_dropped_peer_produces_no_events(peer: Peer, connections: Any) -> None:
    connections.send("peer", Ping(), "one")
    wait_for(lambda: peer.requests)
    peer.requests[0].reply(Done())
    connections.drop("peer")
    assert "peer" not in connections
    connections.wake()
    assert connections.wait(SECONDS) == []
