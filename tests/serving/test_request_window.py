"""Tests of request windows, unacknowledged replies, heartbeats and rates."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.serving.heartbeats import LastHeard, PauseDetector
from headrace.serving.rates import Rate
from headrace.serving.request_window import RequestWindow, UnacknowledgedReplies
from headrace.serving.rpc import Done, Message, Ping, Stub, TypedRequest, reply_type
from headrace.transport import inprocess
from headrace.transport.channel import Request

# --- requesting side --------------------------------------------------------------------------


def test_replies_are_accepted_in_order_of_their_numbers() -> None:
    window: RequestWindow[str] = RequestWindow()
    first, second = window.allocate(), window.allocate()

    assert window.accept(second, "b") == []
    assert window.accept(first, "a") == [(0, "a"), (1, "b")]


def test_duplicate_reply_is_accepted_once() -> None:
    window: RequestWindow[str] = RequestWindow()
    number = window.allocate()

    assert window.accept(number, "a") == [(number, "a")]
    assert window.accept(number, "a") == []


def test_only_consumed_replies_are_acknowledged() -> None:
    window: RequestWindow[str] = RequestWindow()
    for number in (window.allocate(), window.allocate(), window.allocate()):
        window.accept(number, "x")

    window.mark_consumed(1)
    assert window.acknowledged == 0
    window.mark_consumed(0)
    assert window.acknowledged == 2
    assert window.num_outstanding == 1


def test_unanswered_requests_are_resent_in_order_after_a_disconnect() -> None:
    window: RequestWindow[str] = RequestWindow()
    for _ in range(4):
        window.allocate()
    window.accept(1, "x")

    assert window.numbers_to_resend() == [0, 2, 3]


def test_elements_seen_before_are_not_new() -> None:
    window: RequestWindow[str] = RequestWindow()

    assert window.record_elements(0, 10)
    assert not window.record_elements(0, 10)
    assert window.record_elements(10, 0)
    assert window.record_elements(5, 0)
    assert window.record_elements(30, 5)
    assert not window.record_elements(9, 2)
    assert not window.record_elements(29, 2)
    assert not window.record_elements(31, 1)
    assert window.record_elements(10, 20)
    assert not window.record_elements(20, 1)


def test_late_elements_of_a_retried_request_are_new() -> None:
    window: RequestWindow[str] = RequestWindow()

    assert [window.record_elements(first, 1) for first in (2, 0, 1)] == [True] * 3
    assert [window.record_elements(first, 1) for first in (2, 0, 1)] == [False] * 3


def test_seen_elements_take_bounded_memory() -> None:
    window: RequestWindow[str] = RequestWindow()
    # Every other element goes to another client.
    for first in range(0, 20_000, 2):
        assert window.record_elements(first, 1)
    assert len(window._seen_ranges) <= 64
    assert not window.record_elements(0, 1)
    assert not window.record_elements(19_998, 1)
    assert window.record_elements(19_997, 1)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=40))
def test_elements_are_new_once(pieces: list[tuple[int, int]]) -> None:
    window: RequestWindow[str] = RequestWindow()
    seen: set[int] = set()
    for first, count in pieces:
        elements = set(range(first, first + count))
        if count:
            assert window.record_elements(first, count) == (not elements & seen)
            if not elements & seen:
                seen |= elements


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_replies_arrive_once_in_order_despite_losses_and_duplicates(
    count: int, chance: random.Random
) -> None:
    window: RequestWindow[int] = RequestWindow()
    taken: list[int] = []
    flying: list[int] = []
    while len(taken) < count:
        if window.num_outstanding < 3:
            flying.append(window.allocate())
        if chance.random() < 0.2:
            flying = window.numbers_to_resend() + chance.sample(flying, len(flying) // 2)
        chance.shuffle(flying)
        if flying:
            number = flying.pop()
            for due, answer in window.accept(number, number):
                taken.append(answer)
                window.mark_consumed(due)
    assert taken == list(range(len(taken)))
    assert window.acknowledged == len(taken)


# --- replying side ----------------------------------------------------------------------------


def test_repeated_request_number_gets_the_same_frame() -> None:
    delivery: UnacknowledgedReplies[str] = UnacknowledgedReplies()
    delivery.acknowledge("a", 0, now=0.0)
    delivery.record("a", 0, "frame")

    assert delivery.find("a", 0) == "frame"
    assert delivery.find("a", 1) is None
    assert delivery.find("b", 0) is None


def test_acknowledged_frame_is_freed_and_its_number_refused() -> None:
    delivery: UnacknowledgedReplies[str] = UnacknowledgedReplies()
    delivery.acknowledge("a", 0, now=0.0)
    delivery.record("a", 0, "first")
    delivery.record("a", 1, "second")

    delivery.acknowledge("a", 1, now=1.0)

    assert delivery.find("a", 0) is None
    assert delivery.is_acknowledged("a", 0)
    assert delivery.find("a", 1) == "second"
    assert not delivery.is_acknowledged("a", 1)
    assert delivery.num_unacknowledged == 1


def test_late_acknowledgement_changes_nothing() -> None:
    delivery: UnacknowledgedReplies[str] = UnacknowledgedReplies()
    delivery.acknowledge("a", 5, now=0.0)

    delivery.acknowledge("a", 2, now=1.0)

    assert delivery.is_acknowledged("a", 4)


def test_frames_of_expired_clients_only_are_freed() -> None:
    delivery: UnacknowledgedReplies[str] = UnacknowledgedReplies()
    for client, now in (("silent", 0.0), ("alive", 90.0)):
        delivery.acknowledge(client, 0, now=now)
        delivery.record(client, 0, client)

    delivery.expire_clients(now=100.0, timeout=60.0)

    assert delivery.find("silent", 0) is None
    assert delivery.find("alive", 0) == "alive"
    assert delivery.num_clients_seen == 2


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 5))))
def test_each_frame_has_a_single_recipient_despite_duplicates(
    requests: list[tuple[str, int, int]],
) -> None:
    delivery: UnacknowledgedReplies[int] = UnacknowledgedReplies()
    taken: dict[int, tuple[str, int]] = {}
    for frame, (client, number, acknowledged) in enumerate(requests):
        delivery.acknowledge(client, acknowledged, now=float(frame))
        if delivery.is_acknowledged(client, number):
            continue
        found = delivery.find(client, number)
        if found is None:
            delivery.record(client, number, frame)
            found = frame
        assert taken.setdefault(found, (client, number)) == (client, number)


def test_bytes_are_counted_and_freed_frames_returned() -> None:
    delivery: UnacknowledgedReplies[str] = UnacknowledgedReplies()
    delivery.acknowledge("a", 0, now=0.0)
    delivery.record("a", 0, "first", 10)
    delivery.record("a", 1, "second", 20)
    assert delivery.unacknowledged_bytes == 30
    assert delivery.count_unacknowledged("a") == (2, 30)

    delivery.acknowledge("a", 1, now=1.0)
    assert delivery.count_unacknowledged("a") == (1, 20)

    assert delivery.expire_clients(now=100.0, timeout=60.0) == ["second"]
    assert delivery.unacknowledged_bytes == 0
    assert delivery.is_expired("a", 1)
    assert not delivery.is_expired("a", 2)


# --- typed requests: the reply has the declared type, or is an error ------------------------------


class Sum(Message, frozen=True):
    total: int


class Add(TypedRequest[Sum], frozen=True):
    numbers: tuple[int, ...]


class AddTwice(Add, frozen=True):
    """Answered like `Add`."""


Requests: TypeAlias = Ping | Add | AddTwice
Replies: TypeAlias = Done | Sum


def answer(requests: Sequence[Request]) -> None:
    for request in requests:
        match request.message:
            case Ping():
                request.reply(Sum(total=0))
            case Add(numbers=()):
                request.fail(NotFoundError("no numbers"))
            case Add(numbers=numbers):
                request.reply(Sum(total=sum(numbers)))


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = inprocess.serve(answer, request_type=Requests, host="127.0.0.1", port=1)
    try:
        with Stub(inprocess.connect(server.address), "adder") as stub:
            yield stub
    finally:
        server.close()


def test_reply_has_the_type_that_the_request_declares(stub: Stub) -> None:
    assert stub.call(Add(numbers=(1, 2, 3))).total == 6
    assert stub.call(AddTwice(numbers=(4,)), timeout=20.0).total == 4


def test_error_reply_is_raised_unchanged(stub: Stub) -> None:
    with pytest.raises(NotFoundError, match="no numbers"):
        stub.call(Add(numbers=()))


def test_reply_of_another_type_is_an_error_that_names_both(stub: Stub) -> None:
    with pytest.raises(TypeError) as caught:
        stub.call(Ping())
    assert str(caught.value) == (
        "the adder at 127.0.0.1:1 replied to Ping with Sum, expected Done; is it another "
        "version of Headrace?"
    )


def test_released_channel_is_not_closed_with_its_stub(stub: Stub) -> None:
    channel = stub.release()
    stub.close()
    assert channel.call(Add(numbers=(1, 2)), timeout=10)[0] == Sum(total=3)
    channel.close()


def test_request_without_a_reply_type_is_refused() -> None:
    with pytest.raises(TypeError, match="TypedRequest declares no reply type"):
        reply_type(TypedRequest)


def test_reply_type_is_not_sent() -> None:
    sent = msgspec.msgpack.encode(Add(numbers=(1, 2)))
    assert msgspec.msgpack.decode(sent) == {"type": "Add", "numbers": [1, 2]}
    assert msgspec.msgpack.Decoder(Requests).decode(sent) == Add(numbers=(1, 2))


def test_channels_of_the_data_service_support_all_reply_types() -> None:
    for requests, replies in (
        (messages.DispatcherRequest, messages.DispatcherReply),
        (messages.WorkerRequest, messages.WorkerReply),
    ):
        expected = {reply_type(request) for request in requests.__args__}
        assert expected == set(replies.__args__)


# --- heartbeats and pauses ------------------------------------------------------------------------


def test_heartbeats_of_unknown_peers_are_ignored() -> None:
    stamps = LastHeard.all_at(["a", "b"], 10.0)
    assert stamps.record("a", 15.0)
    assert not stamps.record("c", 15.0)
    assert not stamps.record(None, 15.0)
    assert stamps == {"a": 15.0, "b": 10.0}


def test_peers_without_heartbeat_for_the_timeout_are_expired() -> None:
    stamps = LastHeard(a=10.0, b=12.0)
    assert stamps.expired(20.0, 10.0) == []
    assert stamps.expired(21.0, 10.0) == ["a"]
    assert stamps.expired(23.0, 10.0) == ["a", "b"]


def test_pause_extends_deadlines_but_not_into_the_future() -> None:
    stamps = LastHeard(early=0.0, late=9.0)
    stamps.extend(5.0, 10.0)
    assert stamps == {"early": 5.0, "late": 10.0}


@pytest.mark.parametrize("interval", [0.01, 0.25, 1.0])
def test_very_late_tick_counts_as_a_pause(interval: float) -> None:
    pulse = PauseDetector(interval, 100.0)
    assert pulse.measure_pause(100.0 + interval) == 0.0
    assert pulse.measure_pause(100.0 + 3 * interval) == 0.0
    assert pulse.measure_pause(100.0 + 13 * interval) == pytest.approx(10 * interval)
    assert pulse.measure_pause(100.0 + 14 * interval) == 0.0


# --- rates: recent amounts per second, which decay to zero ----------------------------------------


@pytest.mark.parametrize("seconds", [2.0, 10.0, 60.0])
def test_steady_stream_has_its_rate_at_any_time(seconds):
    rate = Rate(100.0)
    for step in range(1, int(seconds * 2) + 1):
        rate.add(50.0, 100.0 + step / 2)
    assert rate.read(100.0 + seconds) == pytest.approx(100.0, rel=0.06)


def test_rate_of_an_ended_stream_drops_within_seconds():
    rate = Rate(0.0)
    for step in range(1, 21):
        rate.add(100.0, float(step))
    assert rate.read(20.0) > 90
    assert rate.read(30.0) < 15
    assert rate.read(60.0) < 0.1


def test_first_element_does_not_inflate_the_rate():
    rate = Rate(0.0)
    rate.add(10.0, 0.001)
    assert rate.read(0.001) < 12


def test_empty_stream_has_rate_zero():
    assert Rate(5.0).read(5.0) == 0.0
