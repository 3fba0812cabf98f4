"""One thread that waits on many channels."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.errors import UnavailableError
from headrace.transport.channel import Channel, Reply
from headrace.transport.inbox import Inbox
from tests.transport.conftest import Carrier
from tests.transport.peer import TestHandler
from tests.transport.words import Echo, Echoed, Hold, Make, Release


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    yield inbox
    inbox.close()


def collect(inbox: Inbox, count: int, seconds: float = 10.0) -> list[tuple[Channel, object]]:
    events: list[tuple[Channel, object]] = []
    until = time.monotonic() + seconds
    while len(events) < count:
        assert time.monotonic() < until, f"{len(events)} of {count} came"
        events += inbox.wait(until - time.monotonic())
    return events


def test_answers_of_many_channels_come_through_one_wait(carrier: Carrier, inbox: Inbox):
    channels = [carrier.connect(carrier.serve().address) for _ in range(5)]
    sent = {}
    for number, channel in enumerate(channels):
        inbox.add(channel)
        for n in range(3):
            sent[channel, channel.send(Echo(number=10 * number + n))] = 10 * number + n
    for channel, reply in collect(inbox, 15):
        assert isinstance(reply, Reply)
        assert reply.message == Echoed(number=sent.pop((channel, reply.ticket)))
    assert not sent
    for channel in channels:
        inbox.remove(channel)


def test_a_lost_connection_is_an_event_among_answers(carrier: Carrier, inbox: Inbox):
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


def test_a_channel_that_finds_its_server_again_is_still_waited_on(carrier: Carrier, inbox: Inbox):
    server = carrier.serve()
    channel = carrier.connect(server.address)
    inbox.add(channel)
    channel.send(Hold())
    server.close()
    collect(inbox, 1)
    carrier.serve(port=int(server.address.rpartition(":")[2]))
    ticket = channel.send(Make(number=3, size=50_000))
    ((_, reply),) = collect(inbox, 1)
    assert (reply.ticket, bytes(reply.buffers[0])) == (ticket, b"\3" * 50_000)
    inbox.remove(channel)


def test_a_wake_from_another_thread_ends_a_wait(inbox: Inbox):
    thread = threading.Thread(target=inbox.wake)
    thread.start()
    assert inbox.wait(math.inf) == []
    thread.join()


def test_a_wake_before_the_wait_is_not_lost_and_counts_once(inbox: Inbox):
    inbox.wake()
    inbox.wake()
    began = time.monotonic()
    assert inbox.wait(30) == []
    assert time.monotonic() - began < 10
    assert inbox.wait(0.02) == []


def test_an_inbox_without_news_returns_when_its_time_is_over(carrier: Carrier, inbox: Inbox):
    _, channel = carrier.pair()
    inbox.add(channel)
    channel.send(Hold())
    assert inbox.wait(0.05) == []
    inbox.remove(channel)


def test_a_removed_channel_is_its_caller_s_again(carrier: Carrier, inbox: Inbox):
    handler = TestHandler()
    channel = carrier.connect(carrier.serve(handler).address)
    inbox.add(channel)
    inbox.remove(channel)
    ticket = channel.send(Echo(number=4))
    assert inbox.wait(0.05) == []
    assert channel.receive(10).ticket == ticket


def test_a_wake_asks_no_channel_that_has_sockets_and_nothing_on_them(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
):
    carrier = Carrier("tcp")
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


def test_a_look_at_a_channel_that_was_never_used_takes_no_time(monkeypatch: pytest.MonkeyPatch):
    carrier = Carrier("tcp")
    channel = carrier.connect("127.0.0.1:1")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("slept"))
    assert channel.receive(0.0) is None
    carrier.close()
