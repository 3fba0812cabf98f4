"""Tests of requests with large buffers, which use shared memory owned by the channel."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest

from headrace.errors import FailedPreconditionError, UnavailableError
from headrace.transport import zeromq
from headrace.transport.envelope import REQUEST, RequestHeader, encode
from headrace.transport.limits import ServerLimits
from headrace.transport.shared_memory import BufferLocation
from tests.transport.conftest import TransportFixture
from tests.transport.messages import Echo, Echoed, Hold, Release, TestReply, TestRequest, eventually

LARGE = 1 << 20


def ask(channel, number: int, size: int = LARGE):
    """Send a buffer to be echoed, and check that the same bytes return."""
    sent = np.full(size, number % 251, np.uint8)
    message, (buffer,) = channel.call(Echo(number=number), [memoryview(sent)], timeout=20)
    assert message == Echoed(number=number)
    assert np.array_equal(np.frombuffer(buffer, np.uint8), sent)


def arena_of(channel):
    arena = channel._arena
    assert arena is not None, "no memory is shared"
    return arena


def test_large_requests_use_shared_memory(start_peer):
    peer = start_peer()
    channel = zeromq.connect(peer.address, reply_type=TestReply)
    for number in range(20):
        ask(channel, number)
    arena = arena_of(channel)
    assert arena.bytes_mapped == 16 << 20, "one segment, used again and again"
    assert arena.slots_in_use <= 4
    channel.close()


def test_small_requests_use_no_shared_memory(start_peer):
    peer = start_peer()
    channel = zeromq.connect(peer.address, reply_type=TestReply)
    for number in range(5):
        ask(channel, number, 50_000)
    assert arena_of(channel).bytes_mapped == 0
    channel.close()


def test_several_buffers_arrive_separate_aligned_and_writable():
    carrier = TransportFixture("shared-memory")
    seen = []

    def handler(requests):
        for request in requests:
            seen.append(
                [np.frombuffer(view, np.uint8).ctypes.data % 64 for view in request.buffers]
            )
            assert not any(view.readonly for view in request.buffers)
            request.reply(Echoed(), [memoryview(bytes(view)) for view in request.buffers])

    server = carrier.serve(handler)
    channel = carrier.connect(server.address)
    data = [b"a" * 300_001, b"b", b"c" * 65]
    for _ in range(3):
        _, buffers = channel.call(Echo(), [memoryview(each) for each in data], timeout=20)
        assert [bytes(view) for view in buffers] == data
    assert arena_of(channel).slots_in_use > 0
    assert seen[-1] == [0, 0, 0]
    carrier.close()


def test_slots_held_by_the_server_are_kept_and_released_in_the_end():
    carrier = TransportFixture("shared-memory")
    held = []

    def handler(requests):
        for request in requests:
            if isinstance(request.message, Echo):
                held.append(request.buffers)
            request.reply(Echoed())

    server = carrier.serve(handler)
    channel = carrier.connect(server.address)
    for number in range(64):
        channel.call(Echo(), [memoryview(np.full(LARGE, number, np.uint8))], timeout=20)
    for number, (view,) in enumerate(held):
        assert set(view[:: LARGE // 8]) == {number}
    arena = arena_of(channel)
    assert arena.slots_in_use > 10
    del view
    held.clear()
    gc.collect()
    channel.call(Release(), timeout=20)
    assert arena.slots_in_use == 0
    carrier.close()


def test_many_concurrent_requests_are_answered_with_any_memory_limit():
    carrier = TransportFixture("shared-memory")
    _, channel = carrier.pair()
    ask(channel, 0)
    for number in range(100):
        channel.send(Echo(number=number), [memoryview(np.full(LARGE, number, np.uint8))])
    for _ in range(100):
        reply = channel.receive(30)
        assert bytes(reply.buffers[0][:5]) == bytes([reply.message.number]) * 5
        del reply
    carrier.close()


def test_idle_server_still_releases_slots():
    carrier = TransportFixture("shared-memory")
    _, channel = carrier.pair()
    for number in range(3):
        ask(channel, number)
    arena = arena_of(channel)
    assert eventually(15, lambda: channel.receive(0.05) is None and arena.slots_in_use == 0)
    carrier.close()


def test_restarted_server_gets_new_memory(start_peer):
    peer = start_peer()
    channel = zeromq.connect(peer.address, reply_type=TestReply)
    for number in range(3):
        ask(channel, number)
    first = arena_of(channel)
    peer.kill()
    again = start_peer(int(peer.address.rpartition(":")[2]))

    def answered() -> bool:
        try:
            ask(channel, 7)
        except ConnectionError:
            return False
        return True

    assert eventually(20, answered)
    for number in range(3):
        ask(channel, number)
    assert arena_of(channel) is not first
    assert first.bytes_mapped == 0
    channel.close()
    assert again.process.poll() is None


def test_too_large_request_is_refused_in_any_memory():
    def handler(requests):
        for request in requests:
            request.reply(Echoed())

    server = zeromq.serve(
        handler, request_type=TestRequest, limits=ServerLimits(request_bytes=2 << 20)
    )
    channel = zeromq.connect(server.address, reply_type=TestReply)
    for _ in range(3):
        channel.call(Echo(), [bytes(LARGE)], timeout=20)
    with pytest.raises(FailedPreconditionError, match=r"exceeds the .*limit of 2,097,152"):
        channel.call(Echo(), [bytes(3 << 20)], timeout=20)
    channel.call(Echo(), [bytes(LARGE)], timeout=20)
    channel.close()
    server.close()


@pytest.mark.parametrize("shared", [True, False])
def test_invalid_placement_is_an_error_without_side_effects(shared: bool):
    carrier = TransportFixture("shared-memory" if shared else "tcp")
    _, channel = carrier.pair()
    channel.call(Echo(), timeout=20)
    header = RequestHeader(
        77, REQUEST, msgspec.Raw(encode(Hold())), location=BufferLocation(12345, 1, 0, (100,))
    )
    channel._unanswered.add(77)
    channel._write(channel._connection, header)
    reply = channel.receive(20)
    assert isinstance(reply.message, FailedPreconditionError)
    ask(channel, 5)
    carrier.close()


@pytest.mark.parametrize("kind", ["tcp", "shared-memory"])
def test_reply_is_built_in_shared_memory_if_it_fits(kind: str):
    carrier = TransportFixture(kind)
    given: list[bool] = []

    def handler(requests):
        for request in requests:
            number = getattr(request.message, "number", 0)
            memory = request.allocate(LARGE)
            given.append(memory is not None)
            assert request.allocate(LARGE) is None or memory is None, "once"
            found = np.empty(LARGE, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
            found[:] = number
            if number == 5:
                request.fail(ValueError("after all"))
            elif number == 6:
                request.reply(Echoed(), [found[: LARGE // 2].data])
            else:
                request.reply(Echoed(), [found.data])

    server = carrier.serve(handler)
    channel = carrier.connect(server.address)
    for number in range(30):
        if number == 5:
            with pytest.raises(ValueError, match="after all"):
                channel.call(Echo(number=number), timeout=20)
            continue
        _, (buffer,) = channel.call(Echo(number=number), timeout=20)
        assert len(buffer) == (LARGE // 2 if number == 6 else LARGE)
        assert set(bytes(buffer)) == {number}
        del buffer
    assert given[-1] == (kind == "shared-memory")
    assert all(arena.slots_in_use <= 2 for arena in server.arenas)
    carrier.close()


@pytest.mark.parametrize(
    ("place", "beside"), [(0, [3]), (0, [0, 5, 60 << 10]), (0, [LARGE]), (1, [3]), (1, [9, LARGE])]
)
def test_other_buffers_of_a_reply_built_in_place_arrive_with_it(place, beside):
    carrier = TransportFixture("shared-memory")
    given: list[bool] = []

    def handler(requests):
        for request in requests:
            number = request.message.number
            memory = request.allocate(LARGE)
            given.append(memory is not None)
            made = np.empty(LARGE, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
            made[:] = number
            found = [np.full(size, number + 1, np.uint8) for size in beside]
            found.insert(place, made)
            request.reply(Echoed(), [each.data for each in found])

    server = carrier.serve(handler)
    channel = carrier.connect(server.address)
    sizes = [*beside[:place], LARGE, *beside[place:]]
    held = []
    for number in range(12):
        _, buffers = channel.call(Echo(number=number), timeout=20)
        assert [len(each) for each in buffers] == sizes
        held = [*held[-2:], (number, buffers)]
        for earlier, kept in held:
            for index, each in enumerate(kept):
                due = earlier if index == place else earlier + 1
                assert set(bytes(each)) <= {due}
        del buffers, kept, each
    assert given[-1]
    held.clear()
    assert all(arena.slots_in_use <= 4 for arena in server.arenas)
    carrier.close()


@pytest.mark.parametrize("kind", ["inprocess", "tcp", "shared-memory"])
def test_borrowed_memory_may_change_after_it_was_sent(kind: str):
    carrier = TransportFixture(kind)
    table = np.zeros(LARGE, np.uint8)

    def handler(requests):
        for request in requests:
            table[:] = request.message.number
            request.reply(Echoed(), [memoryview(table)], borrowed=True)
            table[:] = 255

    server = carrier.serve(handler)
    channel = carrier.connect(server.address)
    for number in range(8):
        _, (view,) = channel.call(Echo(number=number), timeout=20)
        assert set(np.frombuffer(view, np.uint8).tolist()) == {number}
    carrier.close()


def test_loss_reports_whether_anything_may_have_been_sent(start_peer):
    peer = start_peer()
    channel = zeromq.connect(peer.address, reply_type=TestReply)
    channel.call(Echo(), timeout=20)
    channel.send(Hold())
    peer.kill()
    with pytest.raises(UnavailableError) as caught:
        channel.receive(20)
    assert not caught.value.unsent
    channel.send(Echo())
    with pytest.raises(UnavailableError, match="refused") as caught:
        channel.receive(20)
    assert caught.value.unsent
    channel.close()
