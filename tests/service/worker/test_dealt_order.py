"""Origins in the order in which units were dealt to a task."""

from __future__ import annotations

import gc

from headrace.service.rows import END
from headrace.service.worker.dealt_order import DealtOrder


def test_units_are_numbered_in_the_order_in_which_they_were_dealt() -> None:
    order = DealtOrder()
    order.deal(10, 13)
    order.deal(40, 42)
    order.deal(2, 3)
    assert order.origins([(41, 1, 0, 5), (10, 3, 0, 1), (2, 1, 4, 2)], []) == (
        (4, 1, 0, 5),
        (0, 3, 0, 1),
        (5, 1, 4, 2),
    )


def test_a_run_that_was_dealt_in_pieces_is_several() -> None:
    order = DealtOrder()
    order.deal(12, 14)
    order.deal(10, 12)
    assert order.origins([(10, 4, 0, 1)], []) == ((2, 2, 0, 1), (0, 2, 0, 1))


def test_the_end_of_a_unit_is_all_that_comes_after_its_elements() -> None:
    order = DealtOrder()
    order.deal(7, 9)
    assert order.origins([], [(7, 2, 3)]) == ((0, 2, 3, END - 3),)


def test_a_unit_that_is_dealt_once_more_in_part_is_another() -> None:
    order = DealtOrder()
    order.deal(7, 8)
    order.deal(7, 8, ((3, 5), (9, END)))
    found = order.origins([(7, 1, 0, 2), (7, 1, 3, 2), (7, 1, 6, 1)], [(7, 1, 12)])
    assert found == ((0, 1, 0, 2), (1, 1, 3, 2), (0, 1, 6, 1), (1, 1, 12, END - 12))


def test_of_a_unit_that_is_dealt_in_part_alone_an_early_end_is_known() -> None:
    order = DealtOrder()
    order.deal(7, 8, ((3, 5),))
    assert order.origins([(7, 1, 3, 1)], [(7, 1, 5)]) == ((0, 1, 3, 1), (0, 1, 5, END - 5))


def test_units_of_what_was_dealt_last_and_before_have_their_own_numbers() -> None:
    order = DealtOrder()
    order.deal(100, 110)
    order.deal(110, 120)
    order.deal(50, 60)
    runs = [(112, 3, 0, 1), (108, 4, 0, 1), (50, 10, 0, 2)]
    assert order.origins(runs, [(119, 1, 2)]) == (
        (12, 3, 0, 1),
        (8, 2, 0, 1),
        (10, 2, 0, 1),
        (20, 10, 0, 2),
        (19, 1, 2, END - 2),
    )


def test_an_order_that_goes_on_for_ever_knows_only_what_is_not_done() -> None:
    order = DealtOrder()
    for number in range(10_000):
        order.forget(number - 3)
        order.deal(2 * number, 2 * number + 1)  # the others are dealt to others
        order.forget(number - 3)
        assert order.origins([(2 * number, 1, 0, 1)], []) == ((number, 1, 0, 1),)
    assert held_by(order) < 1000


def test_parts_of_units_are_forgotten_when_they_are_done() -> None:
    order = DealtOrder()
    for number in range(10_000):
        order.forget(number - 3)
        order.deal(number, number + 1, ((3, 5),))
        assert order.origins([(number, 1, 4, 1)], []) == ((number, 1, 4, 1),)
    assert held_by(order) < 2000


def test_that_units_ended_which_are_done_is_left_out() -> None:
    order = DealtOrder()
    for unit in range(1000):
        order.deal(2 * unit, 2 * unit + 1)
    order.forget(999)
    assert order.origins([], [(0, 1, 5), (1990, 9, 5)]) == ((999, 1, 5, END - 5),)


def held_by(order: DealtOrder) -> int:
    """Return how many objects an order keeps alive."""
    seen: set[int] = set()
    left: list[object] = [order]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            left += gc.get_referents(one) if not isinstance(one, type) else []
    return len(seen)
