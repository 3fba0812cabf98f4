"""Measurements of the last hour."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headrace.dashboard.history import History

START = 1_000_000_200.0


def filled(seconds: int) -> History:
    history = History()
    for second in range(seconds):
        history.add(START + second, {"rate": float(second)})
    return history


def test_recent_measurements_have_full_resolution():
    points = filled(60).points()
    assert [point.time for point in points] == [START + second for second in range(60)]
    assert [point.values["rate"] for point in points] == list(range(60))


def test_old_measurements_are_means_over_longer_intervals():
    points = filled(7200).points()
    steps = [later.time - earlier.time for earlier, later in pairwise(points)]
    assert sorted(set(steps)) == [1.0, 5.0, 30.0]
    assert steps == sorted(steps, reverse=True)
    assert points[0].values["rate"] == points[0].time - START + 14.5


@pytest.mark.parametrize("seconds", [1, 59, 121, 700, 5000])
@pytest.mark.parametrize("offset", [0.0, 7.3, 29.0])
def test_each_measurement_counts_once(offset: float, seconds: int):
    history = History()
    for second in range(seconds):
        history.add(START + offset + second, {"rate": 1.0})
    points = history.points()
    assert points[0].time >= START + offset
    assert all(later.time > earlier.time for earlier, later in pairwise(points))
    # At a change of the resolution, at most one long interval is incomplete.
    assert all(later.time - earlier.time < 60 for earlier, later in pairwise(points))
    assert {point.values["rate"] for point in points} == {1.0}


def test_measurements_older_than_an_hour_are_dropped():
    points = filled(10_000).points()
    assert 3500 < points[-1].time - points[0].time <= 3600
    assert len(points) < 360


def test_a_pause_longer_than_an_hour_leaves_only_the_new_measurements():
    history = filled(100)
    history.add(START + 10_000, {"rate": 1.0})
    assert [point.time for point in history.points()] == [START + 10_000]


def test_missing_replies_are_points_without_values():
    history = History()
    history.add(START, {"rate": 1.0})
    history.add(START + 1, {})
    assert [dict(point.values) for point in history.points()] == [{"rate": 1.0}, {}]


@pytest.mark.parametrize("seconds", [1.0, 4000.0])
def test_a_clock_that_is_set_back_does_not_disturb_the_order(seconds: float):
    history = filled(10)
    history.add(START + 9 - seconds, {"rate": 99.0})
    times = [point.time for point in history.points()]
    assert times == sorted(times)
    assert len(times) == 10
