"""Warnings and errors at the end of an epoch that lost elements."""

from __future__ import annotations

from typing import Any

from headrace.service.client.data_loss import describe_loss
from headrace.service.messages import LostSplits


def lost(*splits: tuple[int, int], **fields: Any) -> LostSplits:
    count = sum(stop - start for start, stop in splits)
    return LostSplits(worker_address="w:1", task_id=1, splits=splits, num_splits=count, **fields)


def test_an_epoch_without_losses_has_no_warning() -> None:
    assert describe_loss(()) == []


def test_a_loss_is_described_with_its_size_worker_and_reason() -> None:
    assert describe_loss((lost((35, 42), reason="no heartbeat for 12 s"),)) == [
        "this epoch lost elements of up to 7 splits: 7 lost with worker w:1 (splits 35 to 41): "
        "no heartbeat for 12 s"
    ]


def test_splits_sent_to_an_expired_client_and_abandoned_splits_are_listed() -> None:
    (warning,) = describe_loss(
        (
            lost((3, 4), client_id="host-1"),
            lost((9, 10), abandoned=True, died_workers=("v:1", "w:1")),
        )
    )
    assert warning == (
        "this epoch lost elements of up to 2 splits: 1 sent to client host-1, which left or "
        "expired (split 3); 1 abandoned after 2 worker processes died computing it: v:1, w:1 "
        "(split 9)"
    )


def test_only_the_first_five_of_many_ranges_are_listed() -> None:
    (warning,) = describe_loss((lost(*((n, n + 1) for n in range(0, 20, 2))),))
    assert warning.endswith("(splits 0, 2, 4, 6, 8 and 5 more ranges)")


def test_the_lost_rest_of_a_dataset_copy_is_reported() -> None:
    assert describe_loss((lost(is_copy=True, reason="it left"),)) == [
        "this epoch lacks the rest of the dataset copies of lost workers: w:1: it left"
    ]
