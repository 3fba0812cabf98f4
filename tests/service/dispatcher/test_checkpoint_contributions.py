"""Clients' contributions to checkpoints, and their results."""

from __future__ import annotations

from headrace.service.dispatcher.checkpoint_contributions import (
    CheckpointCompleted,
    CheckpointContribution,
    CheckpointContributions,
    DeliveredSet,
    merge_delivered,
)
from headrace.service.element_sets import END_ORDINAL

NOTHING = DeliveredSet((), ())


def test_contribution_is_pending_until_its_timeout() -> None:
    contributions = CheckpointContributions()
    contribution = CheckpointContribution(2000, "c", "token", NOTHING)
    contributions.add(contribution, 1.0)
    assert contributions.pending(2000, 3.0) == {"c": contribution}
    assert contributions.pending(2001, 3.0) == {}
    assert contributions.pending(2000, 7.0) == {}


def test_completion_removes_pending_contributions() -> None:
    contributions = CheckpointContributions()
    contributions.add(CheckpointContribution(2000, "c", "token", NOTHING), 1.0)
    contributions.complete(CheckpointCompleted(2000, ("token",), NOTHING))
    assert contributions.pending(2000, 1.0) == {}
    assert contributions.result("token") == NOTHING


def test_forgetting_an_iteration_removes_its_contributions() -> None:
    contributions = CheckpointContributions()
    contributions.add(CheckpointContribution(2000, "c", "token", NOTHING), 1.0)
    contributions.add(CheckpointContribution(2001, "d", "other", NOTHING), 1.0)
    contributions.forget(2000)
    assert contributions.pending(2000, 1.0) == {}
    assert [*contributions.pending(2001, 1.0)] == ["d"]


def test_oldest_results_are_forgotten() -> None:
    contributions = CheckpointContributions()
    requests = [(f"a{number}", f"b{number}") for number in range(100)]
    for tokens in requests:
        contributions.complete(CheckpointCompleted(2000, tokens, NOTHING))
    are_known = [
        [contributions.result(token) is not None for token in tokens] for tokens in requests
    ]
    assert are_known == [[False] * 2] * 36 + [[True] * 2] * 64


def test_partial_splits_that_complete_a_split_are_merged() -> None:
    first = DeliveredSet(((0, 2),), ((5, ((0, 2),)), (6, ((0, 1),))))
    second = DeliveredSet(((2, 3),), ((1, ((0, 1),)), (5, ((2, END_ORDINAL),)), (6, ((3, 4),))))
    assert merge_delivered([first, second]) == DeliveredSet(
        ((0, 3), (5, 6)), ((6, ((0, 1), (3, 4))),)
    )
