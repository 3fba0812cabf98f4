"""Numbered requests and what answers them: nothing is lost, doubled or out of order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.conversation import Delivery, Window

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
