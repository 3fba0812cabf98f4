"""Elements delivered up to any position, by split of the stream and ordinal."""

from __future__ import annotations

from typing import Any

from headrace.execution.delivered_elements import DeliveredElements
from headrace.service.client.delivery_progress import DeliveryProgress
from headrace.service.element_sets import END_ORDINAL
from tests.service.answers import answer_of

SPLITS_FROM_50 = ((0, 3, 50, 0),)
"""A task's numbers 0 to 2 are splits 50 to 52 of the stream."""


def delivered_json(progress: DeliveryProgress, place: int) -> dict[str, Any]:
    return progress.delivered_before(place).to_json()


def test_splits_of_a_partial_reply_are_complete_with_their_last_element() -> None:
    progress = DeliveryProgress(DeliveredElements())
    # Three elements of each of three splits, which end with them.
    origins = ((0, 3, 0, 3), (0, 3, 3, END_ORDINAL - 3))
    progress.add(1, answer_of(num_elements=9, origins=origins, assigned=SPLITS_FROM_50), 0, 9)
    assert delivered_json(progress, 0) == {"watermark": 0}
    assert delivered_json(progress, 2) == {"watermark": 0, "partial_splits": [[50, 1, [[0, 2]]]]}
    assert delivered_json(progress, 3) == {"watermark": 0, "delivered": [[50, 51]]}
    assert delivered_json(progress, 7) == {
        "watermark": 0,
        "delivered": [[50, 52]],
        "partial_splits": [[52, 1, [[0, 1]]]],
    }
    assert delivered_json(progress, 9) == {"watermark": 0, "delivered": [[50, 53]]}


def test_a_split_end_may_be_reported_one_reply_late() -> None:
    progress = DeliveryProgress(DeliveredElements())
    assigned = ((0, 1, 50, 0), (1, 2, 51, 0))
    progress.add(1, answer_of(num_elements=2, origins=((0, 1, 0, 2),), assigned=assigned), 0, 2)
    # Number 0 is no longer in `assigned`: it was delivered and acknowledged.
    late = answer_of(
        num_elements=1,
        origins=((1, 1, 0, 1), (0, 1, 2, END_ORDINAL - 2)),
        assigned=assigned[1:],
        num_done=1,
    )
    progress.add(1, late, 2, 1)
    assert delivered_json(progress, 2) == {"watermark": 0, "partial_splits": [[50, 1, [[0, 2]]]]}
    assert delivered_json(progress, 3) == {
        "watermark": 0,
        "delivered": [[50, 51]],
        "partial_splits": [[51, 1, [[0, 1]]]],
    }


def test_elements_with_several_ids_count_with_all_of_them() -> None:
    progress = DeliveryProgress(DeliveredElements())
    # Two batches, of three rows and of one: sizes differ.
    origins = ((0, 1, 0, 4), (0, 1, 4, END_ORDINAL - 4))
    answer = answer_of(
        num_elements=2, origins=origins, assigned=SPLITS_FROM_50, ids_per_element=(3, 1)
    )
    progress.add(1, answer, 0, 2)
    assert delivered_json(progress, 1) == {"watermark": 0, "partial_splits": [[50, 1, [[0, 3]]]]}
    assert delivered_json(progress, 2) == {"watermark": 0, "delivered": [[50, 51]]}
