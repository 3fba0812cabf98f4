"""Timing of the reports that splits have ended."""

from __future__ import annotations

from headrace.service.worker.split_ends import SplitEnds


def test_ordered_ends_wait_for_earlier_splits() -> None:
    ends = SplitEnds(is_ordered=True)
    assert ends.take_due(((0, 3, 0, 2),), 1) == ((0, 1, 0, 2),)
    assert ends.take_due(((4, 1, 0, 5),), 1) == ()
    assert ends.take_due((), 3) == ((1, 2, 0, 2),)
    assert ends.take_due((), 5) == ((4, 1, 0, 5),)
    assert ends.take_due((), 9) == ()


def test_unordered_ends_are_reported_at_once() -> None:
    ends = SplitEnds(is_ordered=False)
    assert ends.take_due(((4, 1, 0, 5),), 0) == ((4, 1, 0, 5),)
    assert ends.take_due((), 9) == ()
