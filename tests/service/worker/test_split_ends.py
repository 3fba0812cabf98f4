"""When a worker reports the end of a unit."""

from __future__ import annotations

from headrace.service.worker.split_ends import SplitEnds


def test_in_order_an_end_waits_for_what_is_before_it() -> None:
    ends = SplitEnds(is_ordered=True)
    assert ends.take_due(((0, 3, 0, 2),), 1) == ((0, 1, 0, 2),)
    assert ends.take_due(((4, 1, 0, 5),), 1) == ()
    assert ends.take_due((), 3) == ((1, 2, 0, 2),)
    assert ends.take_due((), 5) == ((4, 1, 0, 5),)
    assert ends.take_due((), 9) == ()


def test_in_any_order_an_end_is_said_at_once() -> None:
    ends = SplitEnds(is_ordered=False)
    assert ends.take_due(((4, 1, 0, 5),), 0) == ((4, 1, 0, 5),)
    assert ends.take_due((), 9) == ()
