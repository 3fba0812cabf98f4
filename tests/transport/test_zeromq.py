"""Tests of the ZeroMQ transport that need real processes and sockets."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import threading
import time

import numpy as np
import pytest
import zmq

from headrace.errors import UnavailableError
from headrace.transport import zeromq
from headrace.transport.channel import Channel
from headrace.transport.context import shared_context
from headrace.transport.envelope import decode_error, encode, encode_error
from tests.stopwatch import Stopwatch
from tests.transport.conftest import TransportFixture
from tests.transport.messages import Count, Echo, Echoed, Hold, Make, TestReply, eventually


def call_until_answered(channel: Channel, number: int, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            assert channel.call(Echo(number=number), timeout=10)[0] == Echoed(number=number)
            return
        except UnavailableError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_killed_peer_is_detected_at_once_and_reconnected(network: TransportFixture, start_peer):
    peer = start_peer(keys=network.keys)
    channel = network.connect(peer.address)
    kept = [channel.call(Make(number=n, size=100_000), timeout=20)[1][0] for n in range(4)]
    for _ in range(3):
        channel.send(Hold())
    peer.kill()
    # Far below any heartbeat: the kernel closes the socket, and the monitor reports it.
    with Stopwatch() as watch, pytest.raises(UnavailableError) as caught:
        channel.receive(10)
    assert caught.value.refused
    assert watch.seconds < 1
    assert channel.receive(0) is None
    with pytest.raises(UnavailableError) as caught:
        channel.call(Echo(), timeout=3)
    assert caught.value.refused
    for n, buffer in enumerate(kept):
        assert bytes(buffer) == bytes([n]) * 100_000
    start_peer(int(peer.address.rpartition(":")[2]), network.keys)
    call_until_answered(channel, 7)
    for n in range(5):
        _, (buffer,) = channel.call(Make(number=n, size=100_000), timeout=20)
        assert bytes(buffer) == bytes([n]) * 100_000


@pytest.mark.heavy
def test_request_before_a_pause_is_answered_after_it(network: TransportFixture, start_peer):
    peer = start_peer(keys=network.keys)
    channel = network.connect(peer.address)
    call_until_answered(channel, 1)
    peer.stop()
    try:
        tickets = {channel.send(Make(number=n, size=100_000)) for n in range(5)}
        assert channel.receive(3) is None
    finally:
        peer.go_on()
    while tickets:
        reply = channel.receive(10)
        assert reply is not None
        tickets.remove(reply.request_id)


@pytest.mark.heavy
def test_connection_started_in_a_pause_is_made_after_it(network: TransportFixture, start_peer):
    peer = start_peer(keys=network.keys)
    peer.stop()
    channel = network.connect(peer.address)
    try:
        channel.send(Echo(number=1))
        assert channel.receive(1) is None
    finally:
        peer.go_on()
    assert channel.receive(10).message == Echoed(number=1)


@pytest.mark.heavy
def test_paused_peer_is_unavailable_but_did_not_refuse(network: TransportFixture, start_peer):
    peer = start_peer(keys=network.keys)
    channel = network.connect(peer.address, keepalive_timeout=1.0)
    call_until_answered(channel, 1)
    peer.stop()
    try:
        for _ in range(2):  # Established at first, then in a handshake that never ends.
            channel.send(Echo())
            began = time.monotonic()
            with pytest.raises(
                UnavailableError, match=r"(no data from the peer|sent no handshake)"
            ) as caught:
                assert channel.receive(30) is not None
            assert not caught.value.refused
            assert 0.9 < time.monotonic() - began < 10
    finally:
        peer.go_on()
    call_until_answered(channel, 2)


def test_arena_of_a_closed_channel_is_freed(start_peer):
    peer = start_peer()
    watcher = zeromq.connect(peer.address, reply_type=TestReply, shared_memory=False)
    channel = zeromq.connect(peer.address, reply_type=TestReply)
    kept = channel.call(Make(number=1, size=100_000), timeout=20)[1]
    assert watcher.call(Count(), timeout=10)[0] == Echoed(number=1)
    channel.close()
    assert eventually(10, lambda: watcher.call(Count(), timeout=10)[0] == Echoed(number=0))
    assert bytes(kept[0]) == b"\1" * 100_000
    watcher.close()


CONSUMER = """
import sys, time
from headrace.transport import zeromq
from tests.transport.messages import Make, TestReply
channel = zeromq.connect(sys.argv[1], reply_type=TestReply)
kept = [channel.call(Make(number=n, size=200_000), timeout=20)[1] for n in range(10)]
assert channel._mappings.slots_held > 5
print("holding", flush=True)
time.sleep(60)
"""


def test_arena_of_a_killed_consumer_is_freed(start_peer, run_python):
    peer = start_peer()
    consumer = run_python("-c", CONSUMER, peer.address)
    assert consumer.stdout.readline() == "holding\n"
    watcher = zeromq.connect(peer.address, reply_type=TestReply, shared_memory=False)
    assert watcher.call(Count(), timeout=10)[0] == Echoed(number=1)
    consumer.kill()
    consumer.wait(10)
    assert eventually(20, lambda: watcher.call(Count(), timeout=10)[0] == Echoed(number=0))
    watcher.close()


def test_large_replies_use_shared_memory(start_peer):
    peer = start_peer()
    channel = zeromq.connect(peer.address, reply_type=TestReply)
    kept = []
    for n in range(6):
        _, (buffer,) = channel.call(Make(number=n, size=100_000), timeout=20)
        kept.append(buffer)
    assert channel._mappings.slots_held == 5, "all but the first, which brought the offer"
    kept.clear()
    del buffer
    assert channel._mappings.slots_held == 0
    channel.close()


def test_consumer_that_only_receives_releases_slots():
    carrier = TransportFixture("shared-memory")
    server, channel = carrier.pair()
    channel.call(Make(number=1, size=1_000_000), timeout=20)
    channel.call(Make(number=1, size=1_000_000), timeout=20)
    for n in range(100):
        channel.send(Make(number=n, size=20_000))
    for n in range(100):
        reply = channel.receive(20)
        assert bytes(reply.buffers[0]) == bytes([n]) * 20_000
        del reply
    (arena,) = server.arenas
    channel.call(Echo(), timeout=20)
    assert arena.slots_in_use <= 8
    carrier.close()


def test_garbage_sent_to_the_port_is_ignored(network: TransportFixture):
    server, channel = network.pair()
    host, port = server.address.split(":")
    seed = 3
    rng = np.random.default_rng(seed)
    for size in (1, 10, 64, 1000, 100_000):
        with socket.create_connection((host, int(port)), timeout=5) as unauthorized_client:
            unauthorized_client.sendall(rng.bytes(size))
    with socket.create_connection((host, int(port)), timeout=5) as unauthorized_client:
        # A ZMTP greeting, then a frame that claims to be enormous.
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL" + bytes(16 + 32)
        unauthorized_client.sendall(greeting + b"\x02" + struct.pack(">Q", 2**62) + b"x" * 1000)
    assert channel.call(Echo(number=1), timeout=10)[0] == Echoed(number=1)


def test_messages_that_are_not_requests_are_ignored():
    carrier = TransportFixture("tcp")
    server, channel = carrier.pair()
    seed = 4
    rng = np.random.default_rng(seed)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 1000
    dealer.connect(f"tcp://{server.address}")
    messages = [[b""], [b"", b"", b""], [b"\xc1"], [b"\x94\x01\x00\xa1x"], [b"\x92\x01\x00"]]
    messages += [[b"\x91" * 100_000], [b"\x94\xff\x00\x91\x91\xc0", b"x" * 100_000]]
    messages += [[rng.bytes(int(size))] for size in rng.integers(0, 100, 300)]
    for parts in messages:
        dealer.send_multipart(parts)
    for n in range(20):
        assert channel.call(Echo(number=n), timeout=10)[0] == Echoed(number=n)
    dealer.close()
    context.term()
    carrier.close()


def test_unexpected_replies_do_not_extend_a_wait():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    channel = zeromq.connect(f"127.0.0.1:{port}", reply_type=TestReply, shared_memory=False)
    channel.send(Echo())
    route = router.recv_multipart()[0]
    channel.receive(0.05)  # and learns that the connection is established
    is_over = threading.Event()

    def chatter() -> None:
        until = time.monotonic() + 2
        while not is_over.wait(0.002) and time.monotonic() < until:
            router.send_multipart([route, b"no answer"])

    thread = threading.Thread(target=chatter)
    thread.start()
    begun = time.monotonic()
    assert channel.receive(0.2) is None
    took = time.monotonic() - begun
    is_over.set()
    thread.join()
    channel.close()
    router.close()
    context.term()
    assert took < 1


def test_peer_without_a_handshake_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        channel = zeromq.connect(f"127.0.0.1:{port}", reply_type=TestReply, keepalive_timeout=0.5)
        for _ in range(4):  # Never an authentication error: the connection was not refused.
            with pytest.raises(UnavailableError, match="handshake") as caught:
                channel.call(Echo(), timeout=30)
            assert not caught.value.refused
        channel.close()


def test_peer_with_another_protocol_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as web:
        port = web.getsockname()[1]

        def answer() -> None:
            connection, _ = web.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"sorry " * 100)

        thread = threading.Thread(target=answer)
        thread.start()
        channel = zeromq.connect(f"127.0.0.1:{port}", reply_type=TestReply)
        with pytest.raises((UnavailableError, PermissionError)):
            channel.call(Echo(), timeout=30)
        channel.close()
        thread.join(10)
        assert not thread.is_alive()


def test_host_other_than_loopback_requires_keys():
    with pytest.raises(ValueError, match=r"requires security=.*headrace keys new"):
        zeromq.serve(lambda requests: None, request_type=Echo, host="0.0.0.0")


@pytest.mark.parametrize("port", [-1, 65536])
def test_invalid_port_is_refused(port):
    with pytest.raises(ValueError, match=f"port={port}"):
        zeromq.serve(lambda requests: None, request_type=Echo, port=port)


def test_invalid_address_is_refused():
    with pytest.raises(ValueError, match="address='nowhere'"):
        zeromq.connect("nowhere", reply_type=TestReply)


def test_server_on_localhost_is_reachable():
    server = zeromq.serve(
        lambda requests: [request.reply(Echoed(number=1)) for request in requests],
        request_type=Echo,
        host="localhost",
    )
    assert server.address.startswith("localhost:")
    channel = zeromq.connect(server.address, reply_type=TestReply)
    assert channel.call(Echo(), timeout=10)[0] == Echoed(number=1)
    channel.close()
    server.close()


def test_repeated_open_and_close_leaks_nothing(network: TransportFixture):
    def once() -> None:
        server, channel = network.pair()
        for n in range(3):
            channel.call(Make(number=n, size=100_000), timeout=20)
        channel.close()
        server.close()

    once()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        once()
    assert eventually(5, lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert threading.active_count() <= threads


def test_memory_does_not_grow_with_the_number_of_replies(network: TransportFixture):
    _, channel = network.pair()

    def read(count: int) -> None:
        waiting = 0
        for n in range(count):
            channel.send(Make(number=n, size=1_000_000))
            waiting += 1
            if waiting == 4:
                assert channel.receive(20) is not None
                waiting -= 1
        for _ in range(waiting):
            assert channel.receive(20) is not None

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    read(50)
    before = resident()
    read(300)
    assert resident() - before < 60_000_000, "300 MB were read"


def test_channel_dropped_without_close_leaks_no_sockets():
    users = len(shared_context._users)
    carrier = TransportFixture("tcp")
    server = carrier.serve()
    channel = zeromq.connect(server.address, reply_type=TestReply)
    channel.call(Echo(), timeout=10)
    assert len(shared_context._users) == users + 2
    del channel
    assert len(shared_context._users) == users + 1
    carrier.close()
    assert len(shared_context._users) == users


FORGETFUL = """
import sys
from headrace.transport import zeromq
from headrace.transport.security import Security
from tests.transport.peer import TestHandler
from tests.transport.messages import Echo, Hold, Make, TestReply, TestRequest
keys = sys.argv[1] if len(sys.argv) > 1 else None
server = zeromq.serve(TestHandler(), request_type=TestRequest,
                      security=Security.load(keys, "server") if keys else None)
channel = zeromq.connect(server.address, reply_type=TestReply,
                         security=Security.load(keys, "client") if keys else None)
kept = [channel.call(Make(number=1, size=200_000), timeout=20) for _ in range(4)]
channel.send(Hold())
lost = zeromq.connect("127.0.0.1:9", reply_type=TestReply)
lost.send(Echo())
print("done", flush=True)
"""


def test_process_that_closes_nothing_exits(network: TransportFixture, run_python):
    process = run_python("-c", FORGETFUL, *([str(network.keys)] if network.keys else []))
    output, _ = process.communicate(timeout=30)
    assert output == "done\n"
    assert process.returncode == 0


FORK = """
import os
import pickle
from headrace.errors import FailedPreconditionError
from headrace.transport import inprocess, zeromq
from tests.transport.peer import TestHandler
from tests.transport.messages import Echo, Echoed, Hold, TestReply, TestRequest

def refused(use):
    try:
        use()
    except FailedPreconditionError as error:
        return "before a fork" in str(error)
    return False

def in_child():
    assert refused(lambda: channel.call(Echo(), timeout=10))
    assert refused(lambda: channel.send(Echo()))
    assert refused(lambda: channel.receive(10))
    assert refused(lambda: handler.held[0].reply(Echoed()))
    assert not inprocess.is_in_process(server.address)
    channel.close()
    server.close()
    if KIND == "zeromq":
        own = connect()
        assert own.call(Echo(number=5), timeout=10)[0] == Echoed(number=5)
        own.close()

def connect():
    if KIND == "inprocess":
        return inprocess.connect(server.address)
    return zeromq.connect(server.address, reply_type=TestReply)

handler = TestHandler()
room = inprocess if KIND == "inprocess" else zeromq
server = room.serve(handler, request_type=TestRequest)
channel = connect()
channel.send(Hold())
while not handler.held:
    channel.receive(0.01)
pid = os.fork()
if pid == 0:
    try:
        in_child()
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
handler.held[0].reply(Echoed(number=6))
assert channel.receive(10).message == Echoed(number=6)
channel.close()
server.close()
print("done")
"""


@pytest.mark.parametrize("kind", ["zeromq", "inprocess"])
def test_forked_child_cannot_use_objects_of_its_parent(run_python, kind):
    output, _ = run_python("-c", f"KIND = {kind!r}\n{FORK}").communicate(timeout=30)
    assert output == "done\n"


OUTLIVES = """
import os, sys, time
from headrace.transport import zeromq
from tests.transport.peer import TestHandler
from tests.transport.messages import Echo, TestReply, TestRequest
server = zeromq.serve(TestHandler(), request_type=TestRequest)
caller = zeromq.connect(sys.argv[1], reply_type=TestReply)
caller.call(Echo(), timeout=10)
print(server.address, flush=True)
sys.stdin.readline()  # The other side is connected, too.
child = os.fork()
if child == 0:
    sys.stdin.close()
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_orphaned_child_keeps_no_port_and_no_connection(start_peer, run_python):
    peer = start_peer()
    parent = run_python("-c", OUTLIVES, peer.address)
    address = parent.stdout.readline().strip()
    channel = zeromq.connect(address, reply_type=TestReply)
    call_until_answered(channel, 1)
    channel.send(Hold())
    parent.stdin.write("go\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait(10)
        with Stopwatch() as watch:
            with pytest.raises(UnavailableError) as caught:
                channel.receive(10)
            assert caught.value.refused
            with pytest.raises(UnavailableError) as caught:
                channel.call(Echo(), timeout=10)
            assert caught.value.refused, "the port is closed, too"
        assert watch.seconds < 3
        # The caller's connection is closed as well, so the peer frees its memory.
        watcher = zeromq.connect(peer.address, reply_type=TestReply, shared_memory=False)
        assert eventually(10, lambda: watcher.call(Count(), timeout=10)[0] == Echoed(number=0))
        watcher.close()
    finally:
        os.kill(child, signal.SIGKILL)
        channel.close()


def test_loss_is_reported_as_refused_only_if_observed():
    error = UnavailableError("gone")
    assert error.refused is False
    error.refused = True
    again = decode_error(encode_error(error))
    assert type(again) is UnavailableError
    assert (str(again), again.refused) == ("gone", False)
    assert pickle.loads(pickle.dumps(error)).refused is True


def test_closing_server_refuses_and_silent_server_does_not(carrier: TransportFixture):
    server, channel = carrier.pair()
    channel.send(Hold())
    assert channel.receive(0.2) is None
    server.close()
    for _ in range(2):
        with pytest.raises(UnavailableError) as caught:
            assert channel.receive(10) is not None
        assert caught.value.refused
        channel.send(Echo())
    channel.close()


def test_interrupted_request_closes_only_its_connection(monkeypatch):
    carrier = TransportFixture("tcp")
    _, channel = carrier.pair()
    channel.call(Echo(), timeout=10)
    channel.send(Hold())
    real = channel._write

    def fail(connection, header, views):
        connection.dealer.send(encode(header), zmq.SNDMORE)
        raise MemoryError("no memory")

    monkeypatch.setattr(channel, "_write", fail)
    with pytest.raises(MemoryError):
        channel.send(Echo(), [b"x" * 100])
    monkeypatch.setattr(channel, "_write", real)
    with pytest.raises(UnavailableError, match="a request was interrupted while it was sent"):
        channel.receive(10)
    assert channel.call(Echo(number=3), timeout=10)[0] == Echoed(number=3)
    carrier.close()
