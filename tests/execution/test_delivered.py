"""Which elements were delivered: the form in which states say it, for ever."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import FailedPreconditionError
from headrace.execution.delivered import END, Delivered, DeliveryLog, missing_in, with_ends


def test_a_place_is_written_in_this_form() -> None:
    delivered = Delivered()
    delivered.add([(0, 2, 0, END), (4, 1, 0, END), (6, 2, 0, 2), (6, 2, 4, END - 4), (9, 1, 1, 1)])
    place = {
        "frontier": 2,
        "delivered": [[4, 5]],
        "parts": [[6, 2, [[0, 2], [4, None]]], [9, 1, [[1, 2]]]],
    }
    assert delivered.to_json() == place
    assert Delivered.from_json(place).to_json() == place


def test_what_is_not_there_is_not_said() -> None:
    assert Delivered().to_json() == {"frontier": 0}
    assert not Delivered.from_json({"frontier": 0})


@pytest.mark.parametrize("place", [None, {}, {"frontier": "x"}, {"frontier": 0, "parts": [[1]]}])
def test_what_says_nothing_of_the_kind_is_refused(place: Any) -> None:
    with pytest.raises(FailedPreconditionError, match="which elements were delivered"):
        Delivered.from_json(place)


def test_a_unit_of_which_all_came_in_parts_is_whole() -> None:
    delivered = Delivered()
    delivered.add([(3, 1, 0, 2), (3, 1, 2, END - 2), (0, 3, 0, END)])
    assert (delivered.whole, delivered.parts, delivered.frontier) == (((0, 4),), (), 4)


def test_with_the_last_element_of_a_unit_comes_its_end() -> None:
    ends = [(5, 2, 3, END - 3)]
    assert with_ends([(5, 1, 0, 3), (6, 1, 0, 2)], ends) == [
        (5, 1, 0, 3),
        (6, 1, 0, 2),
        (5, 1, 3, END - 3),
    ]


def test_what_is_missing_in_a_unit_is_the_rest_of_it() -> None:
    assert missing_in(((1, 2), (4, END))) == ((0, 1), (2, 4))
    assert missing_in(((0, 2),)) == ((2, END),)


def test_a_place_in_the_middle_of_a_delivery_has_its_first_elements() -> None:
    log = DeliveryLog()
    log.add(0, 3, lambda count: [(0, 1, 0, count)])
    log.add(3, 2, lambda count: [(1, 1, 0, count)])
    assert log.until(2).parts == ((0, ((0, 2),)),)
    assert log.until(4).parts == ((0, ((0, 3),)), (1, ((0, 1),)))
    log.forget(3)
    assert log.until(3).parts == ((0, ((0, 3),)),)
    with pytest.raises(FailedPreconditionError, match="the reading went on to element 3"):
        log.until(2)
