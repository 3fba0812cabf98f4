"""History of rates by interval."""

from __future__ import annotations

from headrace.service.dispatcher.rate_history import RateHistory


def test_read_returns_only_completed_intervals():
    history = RateHistory(100.0)
    assert history.read(100.0) == ()
    history.add(30.0, 101.0)
    history.add(30.0, 102.9)
    assert history.read(102.9) == ()
    history.add(3.0, 103.0)
    assert history.read(105.9) == (20.0,)
    assert history.read(109.5) == (20.0, 1.0, 0.0)


def test_history_is_bounded_and_tolerates_a_clock_that_goes_back():
    history = RateHistory(0.0)
    history.add(6.0, 1.0)
    history.add(6.0, 0.5)
    assert history.read(3.0) == (4.0,)
    assert history.read(10_000.0) == (0.0,) * 39
    history.add(9.0, 10_000.0)
    assert history.read(10_003.0) == (*(0.0,) * 38, 3.0)
