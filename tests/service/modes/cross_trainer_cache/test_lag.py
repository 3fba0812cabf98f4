"""What a trainer did not get is said at once, and then once a minute."""

from __future__ import annotations

from headrace.service.modes.cross_trainer_cache.lag import LagReporter


def test_a_warning_comes_at_once_and_the_next_after_a_minute_with_all_in_between() -> None:
    behind = LagReporter("large")
    assert behind.take_warnings(0.0) == []
    behind.add_skipped(0, "w:1")
    assert behind.take_warnings(0.0) == []
    behind.add_skipped(3, "w:1")
    (first,) = behind.take_warnings(1.0)
    assert "'large' fell behind: 3 elements" in first
    behind.add_skipped(2, "w:1")
    assert behind.take_warnings(1.5) == []
    behind.add_skipped(5, "v:1")
    assert behind.take_warnings(60.9) == []
    (second,) = behind.take_warnings(61.0)
    assert "7 elements were gone" in second
    assert "2 of the worker at w:1, 5 of the worker at v:1; 10 in all" in second
    assert behind.take_warnings(200.0) == []
    assert behind.total_skipped == 10
