"""A history has each interval that is over, those without anything, too, and is bounded."""

from __future__ import annotations

from headrace.service.dispatcher.rate_history import RateHistory


def test_intervals_that_are_over_have_their_rates_and_the_one_that_runs_is_not_there():
    history = RateHistory(100.0)
    assert history.read(100.0) == ()
    history.add(30.0, 101.0)
    history.add(30.0, 102.9)
    assert history.read(102.9) == ()
    history.add(3.0, 103.0)
    assert history.read(105.9) == (20.0,)
    assert history.read(109.5) == (20.0, 1.0, 0.0)


def test_what_is_long_ago_is_forgotten_and_a_clock_that_stands_still_does_no_harm():
    history = RateHistory(0.0)
    history.add(6.0, 1.0)
    history.add(6.0, 0.5)
    assert history.read(3.0) == (4.0,)
    assert history.read(10_000.0) == (0.0,) * 39
    history.add(9.0, 10_000.0)
    assert history.read(10_003.0) == (*(0.0,) * 38, 3.0)
