"""What clients said of where they stand is kept until all have heard the answer, and no longer."""

from __future__ import annotations

from headrace.service.dispatcher.checkpoint_contributions import (
    CheckpointCompleted,
    CheckpointContribution,
    CheckpointContributions,
    DeliveredSet,
    merge_delivered,
)
from headrace.service.element_sets import END_ORDINAL

NOWHERE = DeliveredSet((), ())


def test_who_waits_is_known_while_it_asks_again() -> None:
    gathered = CheckpointContributions()
    said = CheckpointContribution(2000, "c", "token", NOWHERE)
    gathered.add(said, 1.0)
    assert gathered.pending(2000, 3.0) == {"c": said}
    assert gathered.pending(2001, 3.0) == {}
    assert gathered.pending(2000, 7.0) == {}


def test_with_an_answer_nobody_waits_any_more() -> None:
    gathered = CheckpointContributions()
    gathered.add(CheckpointContribution(2000, "c", "token", NOWHERE), 1.0)
    gathered.complete(CheckpointCompleted(2000, ("token",), NOWHERE))
    assert gathered.pending(2000, 1.0) == {}
    assert gathered.result("token") == NOWHERE


def test_with_an_iteration_it_is_forgotten_who_waits_for_it() -> None:
    gathered = CheckpointContributions()
    gathered.add(CheckpointContribution(2000, "c", "token", NOWHERE), 1.0)
    gathered.add(CheckpointContribution(2001, "d", "other", NOWHERE), 1.0)
    gathered.forget(2000)
    assert gathered.pending(2000, 1.0) == {}
    assert [*gathered.pending(2001, 1.0)] == ["d"]


def test_old_answers_are_forgotten_whole() -> None:
    gathered = CheckpointContributions()
    questions = [(f"a{number}", f"b{number}") for number in range(100)]
    for tokens in questions:
        gathered.complete(CheckpointCompleted(2000, tokens, NOWHERE))
    known = [[gathered.result(token) is not None for token in tokens] for tokens in questions]
    assert known == [[False] * 2] * 36 + [[True] * 2] * 64


def test_parts_that_are_a_unit_together_are_one() -> None:
    first = DeliveredSet(((0, 2),), ((5, ((0, 2),)), (6, ((0, 1),))))
    second = DeliveredSet(((2, 3),), ((1, ((0, 1),)), (5, ((2, END_ORDINAL),)), (6, ((3, 4),))))
    assert merge_delivered([first, second]) == DeliveredSet(
        ((0, 3), (5, 6)), ((6, ((0, 1), (3, 4))),)
    )
