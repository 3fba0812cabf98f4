"""Requests, their answers, who was heard from, and how much there was per second."""

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
from headrace.serving.call import Done, Message, Ping, Question, Stub, reply_type
from headrace.serving.conversation import Delivery, Window
from headrace.serving.presence import Pulse, Stamps
from headrace.serving.rates import Rate
from headrace.transport import inprocess
from headrace.transport.channel import Request

# --- the asking end --------------------------------------------------------------------------


def test_answers_are_taken_in_the_order_of_their_numbers() -> None:
    window: Window[str] = Window()
    first, second = window.ask(), window.ask()

    assert window.take(second, "b") == []
    assert window.take(first, "a") == [(0, "a"), (1, "b")]


def test_an_answer_that_comes_twice_is_taken_once() -> None:
    window: Window[str] = Window()
    number = window.ask()

    assert window.take(number, "a") == [(number, "a")]
    assert window.take(number, "a") == []


def test_what_was_used_up_is_acknowledged_and_no_more() -> None:
    window: Window[str] = Window()
    for number in (window.ask(), window.ask(), window.ask()):
        window.take(number, "x")

    window.use_up(1)
    assert window.acknowledged == 0
    window.use_up(0)
    assert window.acknowledged == 2
    assert window.outstanding == 1


def test_after_a_lost_connection_the_unanswered_are_repeated_in_order() -> None:
    window: Window[str] = Window()
    for _ in range(4):
        window.ask()
    window.take(1, "x")

    assert window.to_repeat() == [0, 2, 3]


def test_elements_seen_before_are_not_new() -> None:
    window: Window[str] = Window()

    assert window.is_new(0, 10)
    assert not window.is_new(0, 10)
    assert window.is_new(10, 0)
    assert window.is_new(5, 0)
    assert window.is_new(30, 5)
    assert not window.is_new(9, 2)
    assert not window.is_new(29, 2)
    assert not window.is_new(31, 1)
    assert window.is_new(10, 20)
    assert not window.is_new(20, 1)


def test_elements_that_come_late_because_their_request_was_refused_at_first_are_new() -> None:
    window: Window[str] = Window()

    assert [window.is_new(first, 1) for first in (2, 0, 1)] == [True] * 3
    assert [window.is_new(first, 1) for first in (2, 0, 1)] == [False] * 3


def test_what_was_seen_is_remembered_in_bounded_memory() -> None:
    window: Window[str] = Window()
    # Every other element goes to somebody else.
    for first in range(0, 20_000, 2):
        assert window.is_new(first, 1)
    assert len(window._seen) <= 64
    assert not window.is_new(0, 1)
    assert not window.is_new(19_998, 1)
    assert window.is_new(19_997, 1)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=40))
def test_elements_are_new_once(pieces: list[tuple[int, int]]) -> None:
    window: Window[str] = Window()
    seen: set[int] = set()
    for first, count in pieces:
        elements = set(range(first, first + count))
        if count:
            assert window.is_new(first, count) == (not elements & seen)
            if not elements & seen:
                seen |= elements


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_whatever_is_lost_or_repeated_each_answer_comes_once_in_order(
    count: int, chance: random.Random
) -> None:
    window: Window[int] = Window()
    taken: list[int] = []
    flying: list[int] = []
    while len(taken) < count:
        if window.outstanding < 3:
            flying.append(window.ask())
        if chance.random() < 0.2:
            flying = window.to_repeat() + chance.sample(flying, len(flying) // 2)
        chance.shuffle(flying)
        if flying:
            number = flying.pop()
            for due, answer in window.take(number, number):
                taken.append(answer)
                window.use_up(due)
    assert taken == list(range(len(taken)))
    assert window.acknowledged == len(taken)


# --- the answering end -----------------------------------------------------------------------


def test_a_repeated_number_gets_the_same_frame() -> None:
    delivery: Delivery[str] = Delivery()
    delivery.hear("a", 0, now=0.0)
    delivery.give("a", 0, "frame")

    assert delivery.find("a", 0) == "frame"
    assert delivery.find("a", 1) is None
    assert delivery.find("b", 0) is None


def test_an_acknowledged_frame_is_forgotten_and_its_number_is_over() -> None:
    delivery: Delivery[str] = Delivery()
    delivery.hear("a", 0, now=0.0)
    delivery.give("a", 0, "first")
    delivery.give("a", 1, "second")

    delivery.hear("a", 1, now=1.0)

    assert delivery.find("a", 0) is None
    assert delivery.is_over("a", 0)
    assert delivery.find("a", 1) == "second"
    assert not delivery.is_over("a", 1)
    assert delivery.unacknowledged == 1


def test_an_older_acknowledgement_that_comes_late_changes_nothing() -> None:
    delivery: Delivery[str] = Delivery()
    delivery.hear("a", 5, now=0.0)

    delivery.hear("a", 2, now=1.0)

    assert delivery.is_over("a", 4)


def test_the_frames_of_a_silent_client_are_forgotten_and_others_stay() -> None:
    delivery: Delivery[str] = Delivery()
    for client, now in (("silent", 0.0), ("alive", 90.0)):
        delivery.hear(client, 0, now=now)
        delivery.give(client, 0, client)

    delivery.forget_silent(now=100.0, silence=60.0)

    assert delivery.find("silent", 0) is None
    assert delivery.find("alive", 0) == "alive"
    assert delivery.clients_ever == 2


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 5))))
def test_each_frame_has_one_taker_whatever_is_repeated(
    requests: list[tuple[str, int, int]],
) -> None:
    delivery: Delivery[int] = Delivery()
    taken: dict[int, tuple[str, int]] = {}
    for frame, (client, number, acknowledged) in enumerate(requests):
        delivery.hear(client, acknowledged, now=float(frame))
        if delivery.is_over(client, number):
            continue
        found = delivery.find(client, number)
        if found is None:
            delivery.give(client, number, frame)
            found = frame
        assert taken.setdefault(found, (client, number)) == (client, number)


def test_bytes_are_counted_and_what_is_forgotten_is_returned() -> None:
    delivery: Delivery[str] = Delivery()
    delivery.hear("a", 0, now=0.0)
    delivery.give("a", 0, "first", 10)
    delivery.give("a", 1, "second", 20)
    assert delivery.unacknowledged_bytes == 30
    assert delivery.held_by("a") == (2, 30)

    delivery.hear("a", 1, now=1.0)
    assert delivery.held_by("a") == (1, 20)

    assert delivery.forget_silent(now=100.0, silence=60.0) == ["second"]
    assert delivery.unacknowledged_bytes == 0
    assert delivery.is_forgotten("a", 1)
    assert not delivery.is_forgotten("a", 2)


# --- A request names the type of its reply, and gets that or an error -----------------------------


class Sum(Message, frozen=True):
    total: int


class Add(Question[Sum], frozen=True):
    numbers: tuple[int, ...]


class AddTwice(Add, frozen=True):
    """Answered as `Add` is."""


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


def test_the_reply_is_of_the_type_that_the_question_names(stub: Stub) -> None:
    assert stub.call(Add(numbers=(1, 2, 3))).total == 6
    assert stub.call(AddTwice(numbers=(4,)), timeout=20.0).total == 4


def test_an_error_is_raised_as_it_is(stub: Stub) -> None:
    with pytest.raises(NotFoundError, match="no numbers"):
        stub.call(Add(numbers=()))


def test_a_reply_of_another_type_is_an_error_that_says_so(stub: Stub) -> None:
    with pytest.raises(TypeError) as caught:
        stub.call(Ping())
    assert str(caught.value) == (
        "the adder at 127.0.0.1:1 answered Ping with Sum where Done is due; is it of another "
        "version of Headrace?"
    )


def test_a_channel_that_was_released_is_not_closed_with_its_stub(stub: Stub) -> None:
    channel = stub.release()
    stub.close()
    assert channel.call(Add(numbers=(1, 2)), timeout=10)[0] == Sum(total=3)
    channel.close()


def test_a_question_that_names_no_reply_is_refused() -> None:
    with pytest.raises(TypeError, match="Question names no reply"):
        reply_type(Question)


def test_what_a_question_expects_does_not_travel() -> None:
    sent = msgspec.msgpack.encode(Add(numbers=(1, 2)))
    assert msgspec.msgpack.decode(sent) == {"type": "Add", "numbers": [1, 2]}
    assert msgspec.msgpack.Decoder(Requests).decode(sent) == Add(numbers=(1, 2))


def test_every_request_of_the_data_service_names_a_reply_that_its_channel_understands() -> None:
    for requests, replies in (
        (messages.DispatcherRequest, messages.DispatcherReply),
        (messages.WorkerRequest, messages.WorkerReply),
    ):
        expected = {reply_type(request) for request in requests.__args__}
        assert expected == set(replies.__args__)


# --- who was heard from when, and which silence counts --------------------------------------------


def test_whoever_is_known_is_heard_from_and_others_are_not() -> None:
    stamps = Stamps.of(["a", "b"], 10.0)
    assert stamps.hear("a", 15.0)
    assert not stamps.hear("c", 15.0)
    assert not stamps.hear(None, 15.0)
    assert stamps == {"a": 15.0, "b": 10.0}


def test_who_was_silent_for_longer_is_silent() -> None:
    stamps = Stamps(a=10.0, b=12.0)
    assert stamps.silent(20.0, 10.0) == []
    assert stamps.silent(21.0, 10.0) == ["a"]
    assert stamps.silent(23.0, 10.0) == ["a", "b"]


def test_a_pause_is_nobodys_silence_and_nobody_is_heard_in_the_future() -> None:
    stamps = Stamps(early=0.0, late=9.0)
    stamps.forgive(5.0, 10.0)
    assert stamps == {"early": 5.0, "late": 10.0}


@pytest.mark.parametrize("interval", [0.01, 0.25, 1.0])
def test_a_beat_that_comes_far_too_late_was_a_pause(interval: float) -> None:
    pulse = Pulse(interval, 100.0)
    assert pulse.beat(100.0 + interval) == 0.0
    assert pulse.beat(100.0 + 3 * interval) == 0.0
    assert pulse.beat(100.0 + 13 * interval) == pytest.approx(10 * interval)
    assert pulse.beat(100.0 + 14 * interval) == 0.0


# --- A rate is what there was per second lately, and falls to nothing by itself -------------------


@pytest.mark.parametrize("seconds", [2.0, 10.0, 60.0])
def test_a_steady_stream_has_its_rate_however_long_it_has_run(seconds):
    rate = Rate(100.0)
    for step in range(1, int(seconds * 2) + 1):
        rate.add(50.0, 100.0 + step / 2)
    assert rate.read(100.0 + seconds) == pytest.approx(100.0, rel=0.06)


def test_what_has_ended_is_forgotten_within_seconds():
    rate = Rate(0.0)
    for step in range(1, 21):
        rate.add(100.0, float(step))
    assert rate.read(20.0) > 90
    assert rate.read(30.0) < 15
    assert rate.read(60.0) < 0.1


def test_the_first_moment_is_no_flood():
    rate = Rate(0.0)
    rate.add(10.0, 0.001)
    assert rate.read(0.001) < 12


def test_nothing_has_no_rate():
    assert Rate(5.0).read(5.0) == 0.0
