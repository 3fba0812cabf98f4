"""Elements delivered up to a position, by split of the stream and ordinal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import FailedPreconditionError
from headrace.execution.delivered_elements import END_ORDINAL, DeliveredElements
from headrace.service.client.delivery_progress import DeliveryProgress, delivered_elements
from tests.service.answers import answer_of

TWO_SPLITS = ((0, 1, 0, 2), (1, 1, 0, 2), (0, 2, 2, END_ORDINAL - 2))
"""Units 0 and 1 of two elements each, which both have ended."""


@pytest.mark.parametrize(
    ("count", "given"),
    [
        (0, []),
        (1, [(0, 1, 0, 1)]),
        (2, [(0, 1, 0, 2), (0, 1, 2, END_ORDINAL - 2)]),
        (3, [(0, 1, 0, 2), (1, 1, 0, 1), (0, 1, 2, END_ORDINAL - 2)]),
        (4, [*TWO_SPLITS]),
    ],
)
def test_the_last_element_of_a_split_includes_its_end(count: int, given: Any) -> None:
    answer = answer_of(num_elements=4, origins=TWO_SPLITS)
    assert [*delivered_elements(answer, count, 4)] == given


@pytest.mark.parametrize(("count", "given"), [(1, [(0, 1, 0, 2)]), (2, [(0, 1, 0, 3)])])
def test_elements_with_several_ids_are_returned_with_all_of_them(count: int, given: Any) -> None:
    answer = answer_of(
        num_elements=3, origins=((0, 1, 0, 3), (1, 1, 0, 1)), ids_per_element=(2, 1, 1)
    )
    assert [*delivered_elements(answer, count, 3)] == given


def test_ids_per_element_may_be_omitted_if_equal() -> None:
    answer = answer_of(num_elements=2, origins=((0, 1, 0, 6),))
    assert [*delivered_elements(answer, 1, 2)] == [(0, 1, 0, 3)]


def test_permuted_ids_are_returned_in_element_order() -> None:
    order = np.array([2, 0, 3, 1], "<u4").tobytes()
    answer = answer_of(num_elements=4, origins=TWO_SPLITS, is_permuted=True, permutation=order)
    assert [*delivered_elements(answer, 2, 4)] == [(0, 2, 1, 1), (0, 2, 2, END_ORDINAL - 2)]
    with pytest.raises(FailedPreconditionError, match="another version of Headrace"):
        delivered_elements(answer_of(num_elements=4, origins=TWO_SPLITS, is_permuted=True), 2, 4)


def test_interleaved_splits_return_the_ids_of_the_first_elements() -> None:
    # 7 7 | 3 3 | 5 5 | 7 7 | 3: the first element of 7 came before.
    turns = ((7, 3, 5), 2, 1, 8)
    origins = ((3, 1, 4, 3), (5, 1, 0, 2), (7, 1, 1, 3))
    answer = answer_of(num_elements=8, origins=origins, is_permuted=True, interleaving=turns)
    assert [*delivered_elements(answer, 4, 8)] == [(3, 1, 4, 2), (5, 1, 0, 1), (7, 1, 1, 1)]
    assert [*delivered_elements(answer, 6, 8)] == [(3, 1, 4, 2), (5, 1, 0, 2), (7, 1, 1, 2)]
    with pytest.raises(FailedPreconditionError, match="another version of Headrace"):
        delivered_elements(
            answer_of(num_elements=8, origins=origins[:2], is_permuted=True, interleaving=turns),
            4,
            8,
        )


def test_a_late_split_end_belongs_to_the_assigned_split() -> None:
    progress = DeliveryProgress(DeliveredElements())
    first = answer_of(num_elements=2, origins=((0, 1, 0, 2),), assigned=((0, 1, 7, 0),))
    progress.add(1, first, 0, 2)
    # The split is finished and no longer among those of the task.
    late = answer_of(
        num_elements=1,
        origins=((1, 1, 0, 1), (0, 1, 2, END_ORDINAL - 2)),
        assigned=((1, 1, 30, 0),),
        num_done=1,
    )
    progress.add(1, late, 2, 1)
    assert progress.delivered_before(2).to_json() == {
        "watermark": 0,
        "partial_splits": [[7, 1, [[0, 2]]]],
    }
    assert progress.delivered_before(3).to_json() == {
        "watermark": 0,
        "delivered": [[7, 8]],
        "partial_splits": [[30, 1, [[0, 1]]]],
    }


def test_a_position_includes_all_tasks_and_the_base() -> None:
    before = DeliveredElements()
    before.add([(0, 3, 0, END_ORDINAL)])
    progress = DeliveryProgress(before)
    whole = {"num_elements": 1, "origins": ((0, 1, 0, 1), (0, 1, 1, END_ORDINAL - 1))}
    progress.add(1, answer_of(assigned=((0, 1, 3, 0),), **whole), 0, 1)
    progress.add(2, answer_of(assigned=((0, 1, 5, 0),), **whole), 1, 1)
    assert [progress.delivered_before(place).complete_splits for place in range(3)] == [
        ((0, 3),),
        ((0, 4),),
        ((0, 4), (5, 6)),
    ]
    progress.forget(1)
    with pytest.raises(FailedPreconditionError, match="no longer known"):
        progress.delivered_before(0)
    assert progress.delivered_before(1).complete_splits == ((0, 4),)


def test_later_assignments_do_not_change_earlier_positions() -> None:
    progress = DeliveryProgress(DeliveredElements())
    first = ((0, 2, 40, 0),)
    progress.add(
        1,
        answer_of(
            num_elements=2, origins=((0, 2, 0, 1), (0, 2, 1, END_ORDINAL - 1)), assigned=first
        ),
        0,
        2,
    )
    later = ((2, 2, 10, 0),)
    progress.add(
        1,
        answer_of(
            first_element=2,
            num_elements=1,
            origins=((1, 2, 0, 1),),
            assigned=(*first, *later),
            num_done=2,
        ),
        2,
        1,
    )
    progress.add(
        1,
        answer_of(first_element=3, num_elements=1, origins=((3, 1, 0, 1),), assigned=later),
        3,
        1,
    )
    assert progress.delivered_before(2).complete_splits == ((40, 42),)
    assert progress.delivered_before(4).partial_splits == ((10, ((0, 1),)), (11, ((0, 1),)))
    progress.forget(4)
    assert (
        progress.delivered_before(4).complete_splits,
        progress.delivered_before(4).watermark,
    ) == (((40, 42),), 0)


def test_positions_are_known_from_the_last_discarded_one_on() -> None:
    progress = DeliveryProgress(DeliveredElements())
    for place in range(50):
        ended = ((place, 1, 0, 1), (place, 1, 1, END_ORDINAL - 1))
        progress.add(
            7, answer_of(num_elements=1, origins=ended, assigned=((0, 50, 100, 0),)), place, 1
        )
        if place % 4 == 3:
            progress.forget(place - 1)
    assert progress.delivered_before(50).complete_splits == ((100, 150),)
    assert progress.delivered_before(46).complete_splits == ((100, 146),)
    with pytest.raises(FailedPreconditionError, match="no longer known"):
        progress.delivered_before(45)
