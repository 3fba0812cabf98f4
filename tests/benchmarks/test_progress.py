"""Tests of the progress display: lines, the live line, the remaining time and results."""

from __future__ import annotations

import io

import pytest

from benchmarks.measure import Measurement
from benchmarks.progress import Progress, about, duration, summary
from benchmarks.results import Result


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _measured(rate: float | None, contender: str, role: str = "peer") -> Measurement:
    if rate is None:
        return Measurement(contender=contender, role=role, problem="not installed")
    return Measurement(contender=contender, role=role, rates=[rate] * 3)


def test_without_a_terminal_there_is_a_line_per_area_and_result() -> None:
    stream, clock = io.StringIO(), _Clock()
    progress = Progress([60.0, 30.0, 30.0], stream, clock)
    for area, workload in (("Files", "a"), ("Files", "b"), ("Service", "c")):
        progress.start(area, workload)
        progress.activity("round 1 of 5, tf.data")
        clock.now += 30
        progress.finish("1 row/s")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "Files",
        "  [1/3] a: 1 row/s (0:30, about 30 seconds left)",
        "  [2/3] b: 1 row/s (1:00, about 20 seconds left)",
        "Service",
        "  [3/3] c: 1 row/s (1:30, about 0 seconds left)",
    ]


def test_on_a_terminal_the_live_line_is_rewritten_and_cleared() -> None:
    stream, clock = _Terminal(), _Clock()
    progress = Progress([60.0, 60.0], stream, clock)
    progress.start("Files", "a")
    clock.now += 15
    progress.activity("round 1 of 5, tf.data")
    shown = stream.getvalue().rpartition("\r\x1b[K")[2]
    assert shown.startswith("[1/2] 0:15 · a · round 1 of 5")
    progress.finish("1 row/s")
    assert stream.getvalue().endswith("\r\x1b[K  [1/2] a: 1 row/s\n")
    progress.close()
    assert stream.getvalue().endswith("\n\r\x1b[K")


def test_the_live_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = _Terminal()
    progress = Progress([60.0], stream, _Clock())
    progress.start("Files", "a workload with a long name")
    progress.activity("round 1 of 5, a contender with a long name")
    shown = stream.getvalue().rpartition("\r\x1b[K")[2]
    assert len(shown) == 39
    assert shown.endswith("…")


def test_the_remaining_time_follows_the_pace_of_finished_workloads() -> None:
    clock = _Clock()
    progress = Progress([10.0, 20.0, 30.0], io.StringIO(), clock)
    progress.start("Files", "a")
    assert progress.remaining() is None
    clock.now += 20  # twice as long as planned
    progress.finish("")
    progress.start("Files", "b")
    assert progress.remaining() == 100.0
    clock.now += 90  # longer than expected; the third is still to come
    assert progress.remaining() == 60.0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.7, "1:00"), (754.0, "12:34")])
def test_durations_are_minutes_and_seconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-0.1, "0 seconds"), (89.7, "90 seconds"), (1657.0, "28 minutes")]
)
def test_estimates_are_rounded_and_have_a_unit(seconds: float, text: str) -> None:
    assert about(seconds) == f"about {text}"


def _result(*measurements: Measurement) -> Result:
    return Result(workload="rows", unit="rows", date="", measurements=[*measurements])


def test_a_summary_compares_with_the_fastest_peer_that_ran() -> None:
    ours, slow = _measured(300.0, "headrace", "headrace"), _measured(100.0, "slow")
    limit = _measured(1000.0, "copy", "limit")
    both = _result(ours, slow, _measured(200.0, "fast"), limit)
    assert summary(both) == "300 rows/s, 1.5x of fast"
    one = _result(ours, slow, _measured(None, "fast"), limit)
    assert summary(one) == "300 rows/s, 3x of slow; fast: not installed"


def test_a_summary_without_peers_is_the_rate() -> None:
    assert summary(_result(_measured(300.0, "headrace", "headrace"))) == "300 rows/s"


def test_a_summary_of_a_failure_is_its_message() -> None:
    failed = Measurement(contender="headrace", role="headrace", problem="failed: OSError")
    assert summary(_result(failed, _measured(1.0, "fast"))) == "failed: OSError"
