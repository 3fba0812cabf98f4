"""Tests of a server's connected peers, of disconnect events, and of polling many channels."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from headrace.errors import UnavailableError
from headrace.transport import zeromq
from headrace.transport.channel import Channel, Reply, Request
from headrace.transport.channel_poller import ChannelPoller
from headrace.transport.zeromq_peers import Peer, Peers
from tests.transport.conftest import TransportFixture
from tests.transport.messages import Echo, Echoed, Hold, Make, Release, TestReply, TestRequest
from tests.transport.peer import TestHandler

_SECONDS = 10.0


class RouterHarness:
    """A ROUTER socket driven by the test, which reads messages and events in any order."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self._address = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.gone: list[str] = []
        self.peers = Peers(self.router, lambda _: None, self.gone.append)
        self._dealers: list[zmq.Socket[bytes]] = []
        #: Dealers, and descriptors with lower numbers than that of any connection.
        self._spares = [
            (self.socket(a_channel()), os.open(os.devnull, os.O_RDONLY)) for _ in range(5)
        ]

    def socket(self, channel: bytes, number: int = 1) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.routing_id = channel + struct.pack(">I", number)
        dealer.linger = 1000
        self._dealers.append(dealer)
        return dealer

    def connect(self, channel: bytes, number: int = 1) -> zmq.Socket[bytes]:
        dealer = self.socket(channel, number)
        dealer.connect(self._address)
        return dealer

    def take(self) -> tuple[bytes, zmq.Frame]:
        """Wait for the next message; return its route and its frame."""
        assert self.router.poll(1000 * _SECONDS)
        return self.router.recv(), self.router.recv(copy=False)

    def meet(self, message: tuple[bytes, zmq.Frame]) -> Peer:
        peer = self.peers.add(*message)
        assert peer is not None
        return peer

    def hear(self, happened: Callable[[], bool]) -> None:
        """Read events until a condition holds."""
        until = time.monotonic() + _SECONDS
        while not happened():
            assert time.monotonic() < until
            self.peers.monitor.poll(10)
            self.peers.read_monitor()

    def reach(self, number: int) -> tuple[bytes, zmq.Frame]:
        """Return the first message of a new connection that has this descriptor, once it is free.

        The kernel assigns the lowest free number: the spare one goes to the dealer's end first.
        """
        # The other end of the connection that had the number may be closed a moment later.
        while number_of(message := self._try_to_reach(number)) != number:
            assert self._spares
        return message

    def _try_to_reach(self, number: int) -> tuple[bytes, zmq.Frame]:
        dealer, spare = self._spares.pop()
        until = time.monotonic() + _SECONDS
        with contextlib.ExitStack() as taken:
            while (lowest := os.open(os.devnull, os.O_RDONLY)) != number:
                assert time.monotonic() < until
                taken.callback(os.close, lowest)
                if lowest > number:
                    taken.close()
                    time.sleep(0.001)
            os.close(number)
            os.close(spare)
            dealer.connect(self._address)
            dealer.send(b"ask")
            return self.take()

    def leave(self) -> None:
        """Close all connections."""
        for dealer in self._dealers:
            dealer.close(linger=0)

    def close(self) -> None:
        self.leave()
        for _, spare in self._spares:
            os.close(spare)
        self.peers.close()
        self.router.close(linger=0)
        self.context.term()


@pytest.fixture
def house() -> Iterator[RouterHarness]:
    with contextlib.closing(RouterHarness()) as made:
        yield made


def a_channel() -> bytes:
    return b"H" + secrets.token_bytes(16)


def number_of(message: tuple[bytes, zmq.Frame]) -> int:
    return int(message[1].get(zmq.SRCFD))


def test_last_message_of_an_ended_connection_leaves_its_successor_intact(house):
    dealer = house.connect(a_channel())
    dealer.send(b"ask")
    first = house.take()
    former = house.meet(first)
    dealer.send(b"goodbye")
    dealer.close()
    last = house.take()
    house.hear(lambda: former.is_disconnected)
    new = house.meet(house.reach(number_of(first)))
    late = house.meet(last)
    house.peers.remove(late)
    assert late.is_disconnected
    assert not new.is_disconnected
    assert house.peers.find(new.route) is new
    house.peers.report_disconnects()
    assert house.gone == [former.name]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_peers_with_one_descriptor_number_are_both_answered(house, order):
    dealer = house.connect(a_channel())
    dealer.send(b"ask")
    one = house.take()
    dealer.close()
    messages = [one, house.reach(number_of(one))]
    met = [house.meet(messages[index]) for index in order]
    new = met[order.index(1)]
    assert not new.is_disconnected
    assert house.peers.find(new.route) is new
    house.peers.remove(met[order.index(0)])
    assert not new.is_disconnected


def test_end_of_a_connection_removes_all_peers_with_its_number(house):
    dealer = house.connect(a_channel())
    dealer.send(b"ask")
    one = house.take()
    dealer.close()
    two = house.reach(number_of(one))
    new, former = house.meet(two), house.meet(one)
    assert not new.is_disconnected
    house.leave()
    house.hear(lambda: new.is_disconnected)
    assert former.is_disconnected
    assert not list(house.peers)


def test_last_message_of_an_earlier_connection_keeps_the_later_one(house):
    channel = a_channel()
    dealers = [house.connect(channel, number) for number in (1, 2)]
    dealers[0].send(b"ask")
    earlier = house.take()
    dealers[1].send(b"ask")
    later = house.meet(house.take())
    late = house.meet(earlier)
    assert late.is_disconnected
    assert not later.is_disconnected
    assert house.peers.find(later.route) is later


def test_reconnected_channel_is_a_new_peer(house):
    channel = a_channel()
    met = []
    for number in (1, 2, 3):
        house.connect(channel, number).send(b"ask")
        met.append(house.meet(house.take()))
    assert [peer.is_disconnected for peer in met] == [True, True, False]
    house.peers.report_disconnects()
    assert house.gone == [met[0].name] * 2
    assert list(house.peers) == met[2:]


def test_pending_data_of_a_local_peer_fits_into_a_cache(house):
    house.connect(a_channel()).send(b"one")
    peer = house.meet(house.take())
    with peer.descriptor.duplicate() as connection, socket.socket() as fresh:
        # The kernel may grant less than requested.
        fresh.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 << 10)
        room, most = (
            each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in (connection, fresh)
        )
        assert room == most


def test_request_after_a_reported_disconnect_reports_it_again(house):
    dealer = house.connect(a_channel())
    dealer.send(b"ask")
    former = house.meet(house.take())
    dealer.send(b"ask")
    dealer.close()
    last = house.take()
    house.hear(lambda: former.is_disconnected)
    house.peers.report_disconnects()
    house.peers.record_late_request(house.meet(last))
    assert not house.peers.has_unreported_disconnects
    house.peers.report_disconnects()
    house.peers.report_disconnects()
    assert house.gone == [former.name] * 2


def test_disconnect_is_reported_after_all_requests_of_the_peer():
    events: list[tuple[str, str]] = []
    asked, may_answer = threading.Event(), threading.Event()

    def handle(requests: list[Request]) -> None:
        for request in requests:
            if isinstance(request.message, Hold):
                asked.set()
                assert may_answer.wait(_SECONDS)
            words = f"asked {number}" if (number := getattr(request.message, "number", 0)) else "?"
            events.append((request.peer, words))
            request.reply(Echoed())

    server = zeromq.serve(
        handle, request_type=TestRequest, on_disconnect=lambda peer: events.append((peer, "gone"))
    )
    for number in range(1, 11):
        asked.clear()
        may_answer.clear()
        first, leaving, third = (
            zeromq.connect(server.address, reply_type=TestReply) for _ in range(3)
        )
        leaving.call(Echo(number=number), timeout=_SECONDS)
        peer = next(peer for peer, what in events if what == f"asked {number}")
        first.send(Hold())
        assert asked.wait(_SECONDS)
        leaving.send(Echo(number=number))
        leaving.close()
        third.send(Echo())
        may_answer.set()
        assert third.receive(_SECONDS) is not None
        until = time.monotonic() + _SECONDS
        while (peer, "gone") not in events:
            assert time.monotonic() < until
            time.sleep(0.001)
        third.call(Echo(), timeout=_SECONDS)
        assert [what for one, what in events if one == peer][-1] == "gone"
        first.close()
        third.close()
    server.close()


def test_server_starts_while_the_monitor_of_a_closed_one_is_bound() -> None:
    with zmq.Context() as context:
        routers = [context.socket(zmq.ROUTER) for _ in range(20)]
        for router in routers:
            # Freed at once, so that the next object has its address in memory.
            Peers(router, lambda _: None).monitor.close(0)
        for router in routers:
            router.close(0)


# --- one thread that waits on many channels -------------------------------------------------------


@pytest.fixture
def inbox() -> Iterator[ChannelPoller]:
    inbox = ChannelPoller()
    yield inbox
    inbox.close()


def collect(
    inbox: ChannelPoller, count: int, seconds: float = 10.0
) -> list[tuple[Channel, object]]:
    events: list[tuple[Channel, object]] = []
    until = time.monotonic() + seconds
    while len(events) < count:
        assert time.monotonic() < until, f"{len(events)} of {count} came"
        events += inbox.wait(until - time.monotonic())
    return events


def test_one_wait_returns_replies_of_many_channels(carrier: TransportFixture, inbox: ChannelPoller):
    channels = [carrier.connect(carrier.serve().address) for _ in range(5)]
    sent = {}
    for number, channel in enumerate(channels):
        inbox.add(channel)
        for n in range(3):
            sent[channel, channel.send(Echo(number=10 * number + n))] = 10 * number + n
    for channel, reply in collect(inbox, 15):
        assert isinstance(reply, Reply)
        assert reply.message == Echoed(number=sent.pop((channel, reply.request_id)))
    assert not sent
    for channel in channels:
        inbox.remove(channel)


def test_lost_connection_is_returned_as_an_event(carrier: TransportFixture, inbox: ChannelPoller):
    server, other = carrier.serve(), carrier.serve()
    lost, stays = carrier.connect(server.address), carrier.connect(other.address)
    for channel in (lost, stays):
        inbox.add(channel)
        channel.send(Hold())
    assert inbox.wait(0.2) == []
    server.close()
    ((channel, error),) = collect(inbox, 1)
    assert channel is lost
    assert isinstance(error, UnavailableError)
    assert error.refused
    stays.send(Release())
    assert {channel for channel, _ in collect(inbox, 2)} == {stays}
    # The same channel connects again, through new sockets, and is still waited on.
    lost.send(Echo())
    ((channel, error),) = collect(inbox, 1)
    assert (channel, type(error)) == (lost, UnavailableError)
    for channel in (lost, stays):
        inbox.remove(channel)


def test_reconnected_channel_is_still_polled(carrier: TransportFixture, inbox: ChannelPoller):
    server = carrier.serve()
    channel = carrier.connect(server.address)
    inbox.add(channel)
    channel.send(Hold())
    server.close()
    collect(inbox, 1)
    carrier.serve(port=int(server.address.rpartition(":")[2]))
    ticket = channel.send(Make(number=3, size=50_000))
    ((_, reply),) = collect(inbox, 1)
    assert (reply.request_id, bytes(reply.buffers[0])) == (ticket, b"\3" * 50_000)
    inbox.remove(channel)


def test_wake_from_another_thread_ends_a_wait(inbox: ChannelPoller):
    thread = threading.Thread(target=inbox.wake)
    thread.start()
    assert inbox.wait(math.inf) == []
    thread.join()


def test_wake_before_the_wait_is_not_lost_and_counts_once(inbox: ChannelPoller):
    inbox.wake()
    inbox.wake()
    began = time.monotonic()
    assert inbox.wait(30) == []
    assert time.monotonic() - began < 10
    assert inbox.wait(0.02) == []


def test_poller_without_events_returns_at_its_timeout(
    carrier: TransportFixture, inbox: ChannelPoller
):
    _, channel = carrier.pair()
    inbox.add(channel)
    channel.send(Hold())
    assert inbox.wait(0.05) == []
    inbox.remove(channel)


def test_removed_channel_can_be_used_by_its_caller(carrier: TransportFixture, inbox: ChannelPoller):
    handler = TestHandler()
    channel = carrier.connect(carrier.serve(handler).address)
    inbox.add(channel)
    inbox.remove(channel)
    ticket = channel.send(Echo(number=4))
    assert inbox.wait(0.05) == []
    assert channel.receive(10).request_id == ticket


def test_wake_does_not_read_idle_channels(inbox: ChannelPoller, monkeypatch: pytest.MonkeyPatch):
    carrier = TransportFixture("tcp")
    channel = carrier.connect(carrier.serve().address)
    inbox.add(channel)
    channel.send(Echo(number=1))
    collect(inbox, 1)
    while inbox.wait(0.05):
        pass
    asked = []
    receive = channel.receive

    def counting(timeout: float) -> Reply | None:
        asked.append(timeout)
        return receive(timeout)

    monkeypatch.setattr(channel, "receive", counting)
    inbox.wake()
    assert inbox.wait(30) == []
    assert asked == []
    inbox.remove(channel)
    carrier.close()


def test_poll_of_an_unused_channel_returns_at_once(monkeypatch: pytest.MonkeyPatch):
    carrier = TransportFixture("tcp")
    channel = carrier.connect("127.0.0.1:1")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("slept"))
    assert channel.receive(0.0) is None
    carrier.close()
