"""Who was heard from when, and which silence counts."""

from __future__ import annotations

import pytest

from headrace.serving.presence import Pulse, Stamps


def test_whoever_is_known_is_heard_from_and_others_are_not() -> None:
    stamps = Stamps.of(["a", "b"], 10.0)
    assert stamps.hear("a", 15.0)
    assert not stamps.hear("c", 15.0)
    assert not stamps.hear(None, 15.0)
    assert stamps == {"a": 15.0, "b": 10.0}


def test_who_was_silent_for_longer_is_silent() -> None:
    stamps = Stamps(a=10.0, b=12.0)
    assert stamps.silent(20.0, 10.0) == []
    assert stamps.silent(21.0, 10.0) == ["a"]
    assert stamps.silent(23.0, 10.0) == ["a", "b"]


def test_a_pause_is_nobodys_silence_and_nobody_is_heard_in_the_future() -> None:
    stamps = Stamps(early=0.0, late=9.0)
    stamps.forgive(5.0, 10.0)
    assert stamps == {"early": 5.0, "late": 10.0}


@pytest.mark.parametrize("interval", [0.01, 0.25, 1.0])
def test_a_beat_that_comes_far_too_late_was_a_pause(interval: float) -> None:
    pulse = Pulse(interval, 100.0)
    assert pulse.beat(100.0 + interval) == 0.0
    assert pulse.beat(100.0 + 3 * interval) == 0.0
    assert pulse.beat(100.0 + 13 * interval) == pytest.approx(10 * interval)
    assert pulse.beat(100.0 + 14 * interval) == 0.0
