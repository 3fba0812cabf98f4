"""What a trainer did not get is said at once, and then once a minute."""

from __future__ import annotations

from headrace.service.modes.cross_trainer_cache.falling_behind import FallingBehind


def test_a_warning_comes_at_once_and_the_next_after_a_minute_with_all_in_between() -> None:
    behind = FallingBehind("large")
    assert behind.due(0.0) == []
    behind.skipped(0, "w:1")
    assert behind.due(0.0) == []
    behind.skipped(3, "w:1")
    (first,) = behind.due(1.0)
    assert "'large' fell behind: 3 elements" in first
    behind.skipped(2, "w:1")
    assert behind.due(1.5) == []
    behind.skipped(5, "v:1")
    assert behind.due(60.9) == []
    (second,) = behind.due(61.0)
    assert "7 elements were gone" in second
    assert "2 of the worker at w:1, 5 of the worker at v:1; 10 in all" in second
    assert behind.due(200.0) == []
    assert behind.total == 10
