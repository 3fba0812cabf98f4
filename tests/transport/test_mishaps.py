"""What seldom happens between two ends: no memory, other words, Ctrl-C at any instant."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import msgspec
import pytest
import zmq

from headrace.errors import FailedPreconditionError, UnavailableError
from headrace.transport import inprocess, zeromq, zeromq_connection
from headrace.transport.channel import Channel, Request, TransportServer
from headrace.transport.context import shared_context
from headrace.transport.zeromq_connection import Connection
from tests.transport.conftest import Carrier
from tests.transport.peer import TestHandler
from tests.transport.words import Echo, Echoed, Make, TestReply, TestRequest, Word


class Other(Word):
    """A word that channels do not know."""


def test_an_answer_that_came_before_a_connection_was_lost_is_delivered_after_it(start_peer):
    peer = start_peer()
    channel = zeromq.connect(peer.address, reply_type=TestReply)
    channel.call(Echo(), timeout=20)
    ticket = channel.send(Echo(number=7))
    # Answered, but nobody has received: the answer lies in this end's socket.
    poller = zmq.Poller()
    for socket in channel.sockets():
        poller.register(socket, zmq.POLLIN)
    assert poller.poll(20_000)
    peer.kill()
    reply = channel.receive(20)
    assert reply is not None
    assert (reply.request_id, reply.message) == (ticket, Echoed(number=7))
    with pytest.raises(UnavailableError):
        channel.call(Echo(), timeout=2)
    channel.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_where_no_memory_can_be_shared_answers_take_the_socket(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    server = zeromq.serve(TestHandler(), request_type=TestRequest)
    channel = zeromq.connect(server.address, reply_type=TestReply)
    for n in range(4):
        _, (buffer,) = channel.call(Make(number=n, size=200_000), timeout=20)
        assert bytes(buffer) == bytes([n]) * 200_000
    channel.close()
    server.close()


def test_a_connection_that_took_the_last_descriptor_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(number: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", refuse)
    server = zeromq.serve(TestHandler(), request_type=TestRequest)
    channel = zeromq.connect(server.address, reply_type=TestReply)
    assert channel.call(Echo(number=3), timeout=5)[0] == Echoed(number=3)
    channel.close()
    server.close()


def test_an_answer_in_other_words_is_an_error_and_the_channel_goes_on(network: Carrier) -> None:
    answers: list[msgspec.Struct] = [Other(), Echoed(number=1)]

    def answer(requests: list[Request]) -> None:
        for request in requests:
            request.reply(answers.pop(0))

    server = network.serve(answer)
    channel = network.connect(server.address)
    with pytest.raises(FailedPreconditionError, match="cannot decode the reply") as caught:
        channel.call(Echo(), timeout=20)
    assert server.address in str(caught.value)
    assert "of the same version" in str(caught.value)
    assert channel.call(Echo(), timeout=20)[0] == Echoed(number=1)
    channel.close()
    server.close()


@pytest.mark.parametrize("began", [True, False], ids=["after its start", "before its start"])
@pytest.mark.parametrize("make", [zeromq.serve, inprocess.serve], ids=["zeromq", "inprocess"])
def test_a_server_whose_making_is_interrupted_leaves_nothing(
    make: Any, began: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    server = make(TestHandler(), request_type=TestRequest, host="127.0.0.1")
    port = int(server.address.rpartition(":")[2])
    server.close()
    made: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if not thread.name.startswith("headrace-server"):
            start(thread)
            return
        made.append(thread)
        if began:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(TestHandler(), request_type=TestRequest, host="127.0.0.1", port=port)
    (thread,) = made
    if began:
        thread.join(10)
    assert not thread.is_alive()
    make(TestHandler(), request_type=TestRequest, host="127.0.0.1", port=port).close()
    assert ", which continues" not in caplog.text


# --- Ctrl-C while a connection is opened or closed: who else is in this process goes on -----------


@pytest.fixture
def server() -> Iterator[TransportServer]:
    server = zeromq.serve(TestHandler(), request_type=TestRequest)
    yield server
    server.close()


@pytest.fixture
def channel(server: TransportServer) -> Iterator[Channel]:
    channel = zeromq.connect(server.address, reply_type=TestReply, shared_memory=False)
    channel.call(Echo(), timeout=20)
    yield channel
    channel.close()


def open_connection(server: TransportServer, number: int) -> Connection:
    return Connection(server.address, server.address, b"%d" % number, None, 10.0)


def interrupted_at(instruction: int, call: Callable[[], None]) -> bool:
    """Interrupt a call at its n-th instruction here; tell whether it had that many."""
    left = instruction

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != zeromq_connection.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


# Each time ZeroMQ's thread may be quicker than the interruption: in one of five it is not.
def test_where_openings_are_interrupted_the_server_of_the_same_process_answers_on(
    server: TransportServer, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = zmq.Socket.connect
    users = len(shared_context._users)

    def interrupted(socket: zmq.Socket[bytes], endpoint: str) -> None:
        connect(socket, endpoint)
        if endpoint.startswith("tcp:"):
            raise KeyboardInterrupt

    monkeypatch.setattr(zmq.Socket, "connect", interrupted)
    for number in range(200):
        with pytest.raises(KeyboardInterrupt):
            open_connection(server, number)
        assert channel.call(Echo(number=number), timeout=5)[0] == Echoed(number=number)
    assert len(shared_context._users) == users


def test_a_close_that_was_interrupted_anywhere_is_done_by_the_next_one(
    server: TransportServer, channel: Channel
) -> None:
    users = len(shared_context._users)
    for number in range(1, 1000):
        connection = open_connection(server, number)
        was_interrupted = interrupted_at(number, connection.close)
        connection.close()
        assert connection.dealer.closed
        assert all(socket.closed for socket in connection.sockets)
        assert len(shared_context._users) == users
        assert channel.call(Echo(number=number), timeout=5)[0] == Echoed(number=number)
        if not was_interrupted:
            break
    assert number > 20


def test_a_channel_goes_on_where_the_end_of_an_interrupted_request_was_interrupted_too(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Connection.close

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def closed_and_interrupted(connection: Connection) -> None:
        close(connection)
        raise KeyboardInterrupt

    ticket = channel.send(Echo(number=1))
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "send", interrupted)
        patch.setattr(Connection, "close", closed_and_interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.send(Echo(number=2))
    assert channel.send(Echo(number=3)) > ticket
    with pytest.raises(UnavailableError, match="a request was interrupted while it was sent"):
        channel.receive(20)
    assert channel.call(Echo(number=4), timeout=20)[0] == Echoed(number=4)


def test_a_channel_goes_on_where_the_news_of_its_connection_was_read_by_half(
    server: TransportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(monitor: zmq.Socket[bytes]) -> None:
        monitor.recv()
        raise KeyboardInterrupt

    channel = zeromq.connect(server.address, reply_type=TestReply, shared_memory=False)
    channel.send(Echo(number=1))
    with monkeypatch.context() as patch:
        patch.setattr(zeromq_connection, "recv_monitor_message", interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.receive(20)
    # The answer may be here first; then there is nothing else to be told of it.
    try:
        reply = channel.receive(20)
    except UnavailableError as error:
        assert "interrupted" in str(error)  # noqa: PT017 - it is raised or not
    else:
        assert reply is not None
        assert reply.message == Echoed(number=1)
    assert channel.call(Echo(number=2), timeout=20)[0] == Echoed(number=2)
    channel.close()
