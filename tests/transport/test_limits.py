"""Tests of the limits on a server's memory for its peers, and of freeing it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from headrace import process_metrics
from headrace.errors import FailedPreconditionError, UnavailableError
from headrace.transport import zeromq, zeromq_server
from headrace.transport.channel import Request
from headrace.transport.envelope import (
    EMPTY_BODY,
    REQUEST,
    RequestHeader,
    decode_error,
    decode_reply_header,
    encode,
)
from headrace.transport.limits import ServerLimits
from headrace.transport.shared_memory import SharedMemoryOptions
from tests.transport.conftest import Peer, TransportFixture
from tests.transport.messages import Echo, Echoed, Hold, Make, TestReply, TestRequest, eventually
from tests.transport.peer import TestHandler

MIB = 1 << 20


def count(name: str) -> float:
    return process_metrics.REGISTRY.get_sample_value(name) or 0.0


def mapped(pid: int) -> int:
    """Return the bytes of shared memory of Headrace that a process has mapped."""
    spans = re.findall(
        r"^(\w+)-(\w+) .*memfd:headrace", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE
    )
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


# --- shared memory goes with its connection -------------------------------------------------


@pytest.mark.heavy
def test_repeatedly_disconnected_clients_leak_no_memory(start_peer):
    peer: Peer = start_peer()
    pid = peer.process.pid
    channel = zeromq.connect(peer.address, reply_type=TestReply, keepalive_timeout=0.6)
    for _ in range(3):
        kept = [channel.call(Make(number=n, size=100_000), timeout=20)[1] for n in range(3)]
        assert mapped(pid) == 64 * MIB
        peer.stop()
        try:
            channel.send(Echo())
            with pytest.raises(UnavailableError):
                assert channel.receive(20) is not None
        finally:
            peer.go_on()
        assert eventually(10, lambda: mapped(pid) == 0), "before anybody asks again"
        assert bytes(kept[2][0]) == b"\2" * 100_000
    channel.close()


TAKER = """
import sys, time
from headrace.transport import zeromq, zeromq_server
from tests.transport.messages import Make, TestReply
channel = zeromq.connect(sys.argv[1], reply_type=TestReply)
kept = [channel.call(Make(number=n, size=200_000), timeout=20)[1] for n in range(10)]
print("holding", flush=True)
time.sleep(60)
"""


@pytest.mark.heavy
def test_repeatedly_killed_clients_leak_no_memory(run_python):
    carrier = TransportFixture("shared-memory")
    server = carrier.serve()
    before = mapped(os.getpid())
    for _ in range(3):
        taker = run_python("-c", TAKER, server.address)
        assert taker.stdout.readline() == "holding\n"
        assert mapped(os.getpid()) > before
        taker.kill()
        taker.wait(10)
        assert eventually(5, lambda: mapped(os.getpid()) == before)
    carrier.close()


def test_many_channels_share_the_server_budget_and_all_are_served():
    options = SharedMemoryOptions(segment_bytes=4 * MIB, total_bytes=8 * MIB, server_bytes=12 * MIB)
    server = zeromq.serve(TestHandler(), request_type=TestRequest, shared_memory=options)
    channels = [zeromq.connect(server.address, reply_type=TestReply) for _ in range(6)]
    kept = []
    for n in range(30):
        _, (buffer,) = channels[n % 6].call(Make(number=n, size=MIB), timeout=20)
        assert bytes(buffer[:1]) == bytes([n])
        kept.append(buffer)
        assert sum(arena.bytes_mapped for arena in server.arenas) <= 12 * MIB
    for channel in channels:
        channel.close()
    server.close()


def test_memory_held_beyond_the_lease_is_abandoned_by_the_server():
    options = SharedMemoryOptions(
        segment_bytes=4 * MIB, total_bytes=4 * MIB, server_bytes=4 * MIB, lease_seconds=0.1
    )
    server = zeromq.serve(TestHandler(), request_type=TestRequest, shared_memory=options)
    greedy, other = (zeromq.connect(server.address, reply_type=TestReply) for _ in range(2))
    kept = [greedy.call(Make(number=n, size=MIB), timeout=20)[1] for n in range(3)]

    def other_has_memory() -> bool:
        other.call(Make(number=9, size=MIB), timeout=20)
        return bool(other._mappings._mappings)

    assert not other_has_memory()
    assert eventually(20, other_has_memory)
    greedy.call(Echo(), timeout=20)  # Delivers the report if it has not arrived yet.
    assert eventually(10, lambda: greedy.receive(0.01) is None and not greedy._mappings._mappings)
    for n, buffers in enumerate(kept):
        assert bytes(buffers[0]) == bytes([n]) * MIB
    for channel in (greedy, other):
        channel.close()
    server.close()


# --- requests --------------------------------------------------------------------------------


def test_too_large_request_is_refused_by_the_client():
    carrier = TransportFixture("tcp")
    channel = carrier.connect(carrier.serve().address, request_bytes=MIB)
    with pytest.raises(ValueError, match=r"1,048,.* exceeds the server's limit of 1,048,576"):
        channel.send(Echo(), [bytes(MIB)])
    assert channel.call(Echo(number=2), timeout=10)[0] == Echoed(number=2)
    carrier.close()


@pytest.fixture
def small_server() -> Iterator[zeromq.TransportServer]:
    limits = ServerLimits(
        request_bytes=MIB,
        pending_reply_bytes=24 * MIB,
        total_pending_reply_bytes=64 * MIB,
        stall_seconds=0.5,
    )
    server = zeromq.serve(TestHandler(), request_type=TestRequest, limits=limits)
    yield server
    server.close()


def test_frame_beyond_the_limit_closes_the_connection(small_server):
    channel = zeromq.connect(small_server.address, reply_type=TestReply)
    with pytest.raises(UnavailableError, match="closed by the peer"):
        channel.call(Echo(), [bytes(3 * MIB)], timeout=10)
    assert channel.call(Echo(number=2), timeout=10)[0] == Echoed(number=2)
    channel.close()


def test_too_large_request_of_many_frames_is_counted_and_logged_once(small_server, caplog):
    before = count("headrace_requests_too_large_total")
    channel = zeromq.connect(small_server.address, reply_type=TestReply)
    with caplog.at_level(logging.WARNING, "headrace.transport"):
        for _ in range(3):
            with pytest.raises(FailedPreconditionError, match="exceeds the limit of 1,048,576"):
                channel.call(Echo(), [bytes(MIB // 2)] * 4, timeout=10)
    assert count("headrace_requests_too_large_total") == before + 3
    assert len(caplog.records) == 1
    assert channel.call(Echo(number=2), timeout=10)[0] == Echoed(number=2)
    channel.close()


# --- unread replies ---------------------------------------------------------------------------


class NonReadingPeer:
    """A peer that sends requests and never reads replies."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.rcvhwm = 1
        self.socket.rcvbuf = 64 << 10
        self.socket.linger = 0
        self.socket.connect(f"tcp://{address}")

    def ask(self, number: int) -> None:
        body = encode(Make(number=number, size=4 * MIB))
        self.socket.send(encode(RequestHeader(number, REQUEST, type(EMPTY_BODY)(body))))

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def test_unread_replies_are_bounded_and_freed_with_the_connection(small_server):
    withheld, cut = (
        count("headrace_replies_dropped_total"),
        count("headrace_slow_connections_closed_total"),
    )
    peer = NonReadingPeer(small_server.address)
    for n in range(1, 61):
        peer.ask(n)
    outbox = small_server._reply_writer
    assert eventually(10, lambda: count("headrace_replies_dropped_total") - withheld > 40)
    assert outbox.pending_bytes <= 24 * MIB, "of the 240 that were asked for"
    assert eventually(10, lambda: count("headrace_slow_connections_closed_total") == cut + 1)

    # Another peer is served throughout, and all memory of the first is freed.
    other = zeromq.connect(small_server.address, reply_type=TestReply, shared_memory=False)

    def served() -> bool:
        assert other.call(Make(number=1, size=MIB), timeout=10)[0] == Echoed(number=1)
        return outbox.pending_bytes <= 2 * MIB

    assert eventually(10, served)
    other.close()
    peer.close()


def test_replies_beyond_the_limit_are_dropped_and_can_be_requested_again(small_server):
    peer = NonReadingPeer(small_server.address)
    wanted = set(range(1, 31))
    for n in sorted(wanted):
        peer.ask(n)
    until = time.monotonic() + 30
    asked_again = 0
    while wanted:
        assert time.monotonic() < until
        assert peer.socket.poll(10_000), "an answer or an error comes for each request"
        first, *frames = peer.socket.recv_multipart()
        header = decode_reply_header(first)
        if frames:
            assert frames[0] == bytes([header.request_id]) * 4 * MIB
            wanted.remove(header.request_id)
        else:
            error = decode_error(header.body)
            assert isinstance(error, UnavailableError)
            assert "send the request again" in str(error)
            peer.ask(header.request_id)
            asked_again += 1
    assert asked_again
    peer.close()


def test_single_reply_beyond_every_limit_still_arrives(small_server):
    channel = zeromq.connect(small_server.address, reply_type=TestReply, shared_memory=False)
    _, (buffer,) = channel.call(Make(number=7, size=80 * MIB), timeout=30)
    assert bytes(buffer[-3:]) == b"\7\7\7"
    assert len(buffer) == 80 * MIB
    channel.close()


def test_small_replies_are_counted_together(small_server):
    channel = zeromq.connect(small_server.address, reply_type=TestReply)
    for n in range(20_000):
        channel.send(Echo(number=n))
    for n in range(20_000):
        assert channel.receive(10).message == Echoed(number=n)
    assert eventually(
        5, lambda: channel.call(Echo(), timeout=10) and not small_server._reply_writer._sent
    )
    assert small_server._reply_writer.pending_bytes <= 128 << 10
    channel.close()


@pytest.mark.parametrize(
    "field", ["request_bytes", "pending_reply_bytes", "total_pending_reply_bytes", "stall_seconds"]
)
def test_invalid_limits_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        ServerLimits(**{field: 0})


@pytest.mark.parametrize("options", [{"keepalive_timeout": 0.0}, {"request_bytes": 0}])
def test_invalid_channel_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        zeromq.connect("127.0.0.1:5050", reply_type=TestReply, **options)


# --- errors after which the server thread continues -------------------------------------------


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_any_exception_of_a_handler_is_returned_and_the_server_continues(
    carrier: TransportFixture, kind
):
    def handle(requests: Sequence[Request]) -> None:
        for request in requests:
            if isinstance(request.message, Hold):
                raise kind("stop")
            request.reply(Echoed(number=5))

    channel = carrier.connect(carrier.serve(handle).address)
    with pytest.raises(Exception, match="stop"):
        channel.call(Hold(), timeout=10)
    assert channel.call(Echo(), timeout=10)[0] == Echoed(number=5)


def test_out_of_memory_for_a_request_fails_only_that_request(monkeypatch, caplog):
    carrier = TransportFixture("tcp")
    _, channel = carrier.pair()
    real = zeromq_server.receive_buffers
    fails = [MemoryError("no memory")]

    def receive(router, first):
        if fails:
            raise fails.pop()
        return real(router, first)

    monkeypatch.setattr(zeromq_server, "receive_buffers", receive)
    channel.send(Echo(number=1), [b"x" * 100_000, b"y" * 100_000])
    for n in range(2, 5):
        channel.send(Echo(number=n), [bytes([n]) * 100_000])
    for n in range(2, 5):
        reply = channel.receive(10)
        assert reply.message == Echoed(number=n)
        assert bytes(reply.buffers[0]) == bytes([n]) * 100_000
    assert ", which continues" in caplog.text
    carrier.close()


class Failing:
    """A ROUTER socket that runs out of memory in the middle of a message."""

    def __init__(self, router) -> None:
        self.router = router
        self.fails = [MemoryError("no memory")]

    def send(self, data, flags, copy=True):
        if not copy and self.fails:
            raise self.fails.pop()
        return self.router.send(data, flags, copy=copy)


def test_out_of_memory_for_a_reply_closes_only_that_connection(caplog):
    carrier = TransportFixture("tcp")
    server, channel = carrier.pair()
    other = carrier.connect(server.address)
    for each in (channel, other):
        each.call(Echo(), timeout=10)
    server._reply_writer._router = Failing(server._reply_writer._router)
    with pytest.raises(UnavailableError) as caught:
        channel.call(Make(number=1, size=300_000), timeout=10)
    assert caught.value.refused
    for each in (other, channel):
        assert bytes(each.call(Make(number=2, size=10_000), timeout=10)[1][0]) == b"\2" * 10_000
    assert ", which continues" in caplog.text
    carrier.close()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_error_without_a_message_is_returned(carrier: TransportFixture):
    def handle(requests: Sequence[Request]) -> None:
        raise UnspeakableError(1, 2)

    channel = carrier.connect(carrier.serve(handle).address)
    with pytest.raises(Exception, match="UnspeakableError"):
        channel.call(Echo(), timeout=10)


FULL = """
import os, resource, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
import logging
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
from headrace.errors import UnavailableError
from headrace.transport import zeromq, zeromq_server
from tests.transport.peer import TestHandler
from tests.transport.messages import Echo, Echoed, Make, TestReply, TestRequest
server = zeromq.serve(TestHandler(), request_type=TestRequest)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
connect = lambda: zeromq.connect(server.address, reply_type=TestReply, keepalive_timeout=3.0)
channel = connect()
channel.call(Echo(), timeout=10)
second = connect()
files = []
while len(files) < 1000:
    try:
        files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
try:
    second.call(Echo(), timeout=10)
    print("a call without a descriptor")
except UnavailableError as error:
    print("unavailable", error.refused, "Too many open files" in str(error))
for n in range(3):
    assert channel.call(Make(number=n, size=100_000), timeout=10)[0] == Echoed(number=n)
for _ in range(25):
    os.close(files.pop())
assert second.call(Echo(number=3), timeout=10)[0] == Echoed(number=3)
while files:
    os.close(files.pop())
channel.close()
second.close()
server.close()
print("done")
"""


def test_process_without_free_descriptors_continues_and_recovers(run_python):
    output, _ = run_python("-c", FULL).communicate(timeout=30)
    lines = output.splitlines()
    assert "unavailable False True" in lines
    assert lines[-1] == "done"
    assert any("files of this process are open" in line for line in lines), output
