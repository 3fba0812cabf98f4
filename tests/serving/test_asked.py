"""What was asked on a channel is known until it is answered, lost or old."""

from __future__ import annotations

from headrace.serving.asked import Asked


def test_an_answer_belongs_to_what_was_asked_under_its_ticket_and_comes_once() -> None:
    asked: Asked[str] = Asked()
    asked.sent(1, "one", 0.0)
    asked.sent(2, "two", 0.0)
    assert asked.answered(2) == "two"
    assert asked.answered(2) is None
    assert asked.answered(1) == "one"


def test_with_the_connection_everything_is_lost_that_was_not_answered() -> None:
    asked: Asked[str] = Asked()
    for ticket, request in enumerate(["one", "two", "three"]):
        asked.sent(ticket, request, 0.0)
    asked.answered(1)
    assert asked.lost() == ["one", "three"]
    assert asked.lost() == []


def test_what_is_asked_in_vain_again_and_again_does_not_pile_up() -> None:
    asked: Asked[int] = Asked()
    for second in range(1000):
        asked.sent(second, second, float(second))
    assert len(asked) == 31
    assert asked.answered(968) is None
    assert asked.answered(969) == 969
