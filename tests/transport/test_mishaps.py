"""What seldom happens between two ends: no memory, an answer and then the end, other words."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import msgspec
import pytest
import zmq

from headrace.errors import FailedPreconditionError, UnavailableError
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Request
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
    assert (reply.ticket, reply.message) == (ticket, Echoed(number=7))
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
    with pytest.raises(FailedPreconditionError, match="cannot be understood") as caught:
        channel.call(Echo(), timeout=20)
    assert server.address in str(caught.value)
    assert "do both ends run the same version" in str(caught.value)
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
    assert "goes on after an error" not in caplog.text
