"""Waiting for tasks that start when they like, on a clock that only the test moves."""

from __future__ import annotations

import pytest

from headrace.cluster.resolver import wait_for
from headrace.errors import UnavailableError
from headrace.testing import ManualClock


def wait(clock, look, seconds=60.0):
    return wait_for(look, what="cluster", seconds=seconds, clock=clock, sleep=clock.advance)


def test_what_is_there_is_returned_at_once(clock: ManualClock):
    assert wait(clock, lambda: 7) == 7
    assert clock() == 1000.0


def test_what_is_missing_is_looked_for_until_it_is_there(clock: ManualClock):
    def look():
        if clock() < 1005.0:
            raise UnavailableError("worker 1 is missing")
        return "all"

    assert wait(clock, look) == "all"
    assert 1005.0 <= clock() <= 1006.0


def test_after_ten_seconds_the_log_says_what_is_missing_and_once_a_minute(clock, caplog):
    def look():
        raise UnavailableError("worker 1 is missing")

    with pytest.raises(UnavailableError, match="no cluster after 150 s: worker 1 is missing"):
        wait(clock, look, seconds=150.0)
    assert clock() == pytest.approx(1150.0)
    words = [record.getMessage() for record in caplog.records]
    assert len(words) == 3
    assert words[0].startswith("no cluster after 10 s: worker 1 is missing; it is waited for 150 s")


def test_another_error_is_no_reason_to_wait(clock):
    def look():
        raise ValueError("wrong label")

    with pytest.raises(ValueError, match="wrong label"):
        wait(clock, look)
    assert clock() == 1000.0
