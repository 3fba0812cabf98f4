"""Which frame each client got under which number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.service.worker.delivery import Delivery


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
