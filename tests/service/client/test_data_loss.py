"""What is said at the end of a pass that lost something."""

from __future__ import annotations

from typing import Any

from headrace.service.client.data_loss import describe_loss
from headrace.service.messages import LostSplits


def lost(*units: tuple[int, int], **fields: Any) -> LostSplits:
    count = sum(stop - start for start, stop in units)
    return LostSplits(worker_address="w:1", task_id=1, splits=units, num_splits=count, **fields)


def test_nothing_is_said_of_a_whole_pass() -> None:
    assert describe_loss(()) == []


def test_how_many_where_and_why_is_said() -> None:
    assert describe_loss((lost((35, 42), reason="it was not heard of for 12 s"),)) == [
        "this pass lost up to 7 positions of the dataset: 7 with the worker at w:1 (positions 35 "
        "to 41): it was not heard of for 12 s"
    ]


def test_what_went_to_a_client_that_is_gone_is_named_with_it() -> None:
    (said,) = describe_loss(
        (
            lost((3, 4), client_id="host-1"),
            lost((9, 10), abandoned=True, died_workers=("v:1", "w:1")),
        )
    )
    assert said == (
        "this pass lost up to 2 positions of the dataset: 1 sent to client host-1, which is gone "
        "(positions 3); 1 given up after 2 worker processes ended while computing it (v:1, w:1) "
        "(positions 9)"
    )


def test_many_ranges_are_counted_and_not_listed() -> None:
    (said,) = describe_loss((lost(*((n, n + 1) for n in range(0, 20, 2))),))
    assert said.endswith("(positions 0, 2, 4, 6, 8 and 5 more ranges)")


def test_a_lost_copy_is_said_to_be_incomplete() -> None:
    assert describe_loss((lost(is_copy=True, reason="it left"),)) == [
        "this pass lacks the rest of the copy of the worker at w:1: it left"
    ]
