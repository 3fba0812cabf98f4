"""A rate is what there was per second lately, and falls to nothing by itself."""

from __future__ import annotations

import pytest

from headrace.serving.rates import Rate


@pytest.mark.parametrize("seconds", [2.0, 10.0, 60.0])
def test_a_steady_stream_has_its_rate_however_long_it_has_run(seconds):
    rate = Rate(100.0)
    for step in range(1, int(seconds * 2) + 1):
        rate.add(50.0, 100.0 + step / 2)
    assert rate.read(100.0 + seconds) == pytest.approx(100.0, rel=0.06)


def test_what_has_ended_is_forgotten_within_seconds():
    rate = Rate(0.0)
    for step in range(1, 21):
        rate.add(100.0, float(step))
    assert rate.read(20.0) > 90
    assert rate.read(30.0) < 15
    assert rate.read(60.0) < 0.1


def test_the_first_moment_is_no_flood():
    rate = Rate(0.0)
    rate.add(10.0, 0.001)
    assert rate.read(0.001) < 12


def test_nothing_has_no_rate():
    assert Rate(5.0).read(5.0) == 0.0
