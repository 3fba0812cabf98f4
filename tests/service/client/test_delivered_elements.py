"""What a reader has given of answers, at any place: by units of the stream and ordinals."""

from __future__ import annotations

from typing import Any

from headrace.execution.delivered_elements import DeliveredElements
from headrace.service.client.delivery_progress import DeliveryProgress
from headrace.service.element_sets import END_ORDINAL
from tests.service.answers import answer_of

UNITS_FROM_50 = ((0, 3, 50, 0),)
"""A task's numbers 0 to 2 are units 50 to 52 of the stream."""


def said(progress: DeliveryProgress, place: int) -> dict[str, Any]:
    return progress.delivered_before(place).to_json()


def test_of_an_answer_in_part_those_units_are_whole_whose_last_element_was_given() -> None:
    progress = DeliveryProgress(DeliveredElements())
    # Three elements of each of three units, which end with them.
    origins = ((0, 3, 0, 3), (0, 3, 3, END_ORDINAL - 3))
    progress.add(1, answer_of(num_elements=9, origins=origins, assigned=UNITS_FROM_50), 0, 9)
    assert said(progress, 0) == {"watermark": 0}
    assert said(progress, 2) == {"watermark": 0, "partial_splits": [[50, 1, [[0, 2]]]]}
    assert said(progress, 3) == {"watermark": 0, "delivered": [[50, 51]]}
    assert said(progress, 7) == {
        "watermark": 0,
        "delivered": [[50, 52]],
        "partial_splits": [[52, 1, [[0, 1]]]],
    }
    assert said(progress, 9) == {"watermark": 0, "delivered": [[50, 53]]}


def test_an_end_is_heard_of_in_the_answer_after_the_unit_counts_as_done() -> None:
    progress = DeliveryProgress(DeliveredElements())
    dealt = ((0, 1, 50, 0), (1, 2, 51, 0))
    progress.add(1, answer_of(num_elements=2, origins=((0, 1, 0, 2),), assigned=dealt), 0, 2)
    # Number 0 is in `dealt` no more: it was delivered and acknowledged meanwhile.
    late = answer_of(
        num_elements=1,
        origins=((1, 1, 0, 1), (0, 1, 2, END_ORDINAL - 2)),
        assigned=dealt[1:],
        num_done=1,
    )
    progress.add(1, late, 2, 1)
    assert said(progress, 2) == {"watermark": 0, "partial_splits": [[50, 1, [[0, 2]]]]}
    assert said(progress, 3) == {
        "watermark": 0,
        "delivered": [[50, 51]],
        "partial_splits": [[51, 1, [[0, 1]]]],
    }


def test_elements_that_have_several_origins_each_count_with_all_of_them() -> None:
    progress = DeliveryProgress(DeliveredElements())
    # Two batches, of three rows and of one: sizes differ.
    origins = ((0, 1, 0, 4), (0, 1, 4, END_ORDINAL - 4))
    answer = answer_of(
        num_elements=2, origins=origins, assigned=UNITS_FROM_50, ids_per_element=(3, 1)
    )
    progress.add(1, answer, 0, 2)
    assert said(progress, 1) == {"watermark": 0, "partial_splits": [[50, 1, [[0, 3]]]]}
    assert said(progress, 2) == {"watermark": 0, "delivered": [[50, 51]]}
