"""Warnings about skipped elements: the first at once, then one per minute."""

from __future__ import annotations

from headrace.service.modes.cross_trainer_cache.lag import LagReporter


def test_the_first_warning_is_immediate_and_later_ones_cover_a_minute() -> None:
    reporter = LagReporter("large")
    assert reporter.take_warnings(0.0) == []
    reporter.add_skipped(0, "w:1")
    assert reporter.take_warnings(0.0) == []
    reporter.add_skipped(3, "w:1")
    (first,) = reporter.take_warnings(1.0)
    assert "'large' skipped 3 elements" in first
    reporter.add_skipped(2, "w:1")
    assert reporter.take_warnings(1.5) == []
    reporter.add_skipped(5, "v:1")
    assert reporter.take_warnings(60.9) == []
    (second,) = reporter.take_warnings(61.0)
    assert "skipped 7 elements" in second
    assert "2 of the worker at w:1, 5 of the worker at v:1; 10 in total" in second
    assert reporter.take_warnings(200.0) == []
    assert reporter.total_skipped == 10
