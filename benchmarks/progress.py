"""Progress of a run: a live line on a terminal, and a line for each finished workload."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from benchmarks.comparisons import fastest_alternatives, measured_text, median_text
from benchmarks.results import Result
from benchmarks.titles import contender_title

__all__ = ["Progress", "about", "duration", "summary"]

_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Shows what is being measured, and when the run is expected to end.

    On a terminal the last line is rewritten for each activity. Elsewhere, in a file or a log of
    continuous integration, only whole lines are written: one per area and one per workload.

    Args:
        planned: Planned seconds of each workload, in order.
        stream: Where to write; by default standard error.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        planned: list[float],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planned = planned
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._live = self._stream.isatty()
        self._began = self._started = clock()
        self._until_finished = 0.0
        self._finished = 0
        self._area = self._workload = ""

    @property
    def finished(self) -> int:
        """The number of finished workloads."""
        return self._finished

    def start(self, area: str, workload: str) -> None:
        """Begin a workload."""
        if area != self._area:
            self._area = area
            self._line(area)
        self._workload = workload
        self._started = self._clock()
        self.activity("")

    def activity(self, text: str) -> None:
        """Show what happens now, such as "round 2 of 5, tf.data", on a terminal only."""
        if not self._live:
            return
        shown = f"[{self._finished + 1}/{len(self._planned)}] {self._times()} · {self._workload}"
        if text:
            shown += f" · {text}"
        width = shutil.get_terminal_size().columns - 1
        self._write(_CLEAR_LINE + (shown if len(shown) <= width else shown[: width - 1] + "…"))

    def finish(self, result: str) -> None:
        """End the workload and write its result."""
        self._started = self._clock()
        self._until_finished = self._started - self._began
        self._finished += 1
        times = "" if self._live else f" ({self._times()})"
        self._line(f"  [{self._finished}/{len(self._planned)}] {self._workload}: {result}{times}")

    def close(self) -> None:
        """Clear the live line."""
        if self._live:
            self._write(_CLEAR_LINE)

    def remaining(self) -> float | None:
        """Return the expected seconds to the end; None before a workload has finished.

        The plan of the workloads to come is multiplied by how much longer, or shorter, than
        planned the run took until the last one finished.
        """
        if not self._finished:
            return None
        factor = self._until_finished / sum(self._planned[: self._finished])
        left = factor * sum(self._planned[self._finished :])
        if self._finished == len(self._planned):
            return 0.0
        current = factor * self._planned[self._finished]
        return left - min(current, self._clock() - self._started)

    def _times(self) -> str:
        elapsed, remaining = duration(self._clock() - self._began), self.remaining()
        return elapsed if remaining is None else f"{elapsed}, {about(remaining)} left"

    def _line(self, text: str) -> None:
        self._write((_CLEAR_LINE if self._live else "") + text + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds: 754 as "12:34"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def about(seconds: float) -> str:
    """Format an estimate: 754 seconds as "about 13 minutes", and up to 90 in seconds."""
    if seconds > 90:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {max(seconds, 0.0):.0f} seconds"


def summary(result: Result) -> str:
    """Return the result of a workload in a line.

    It has the rate of Headrace (of its first row, if there are several), its ratio to the fastest
    peer that ran, and the contenders that did not run.
    """
    first = fastest_alternatives(result)[0]
    text = measured_text(first.ours, result)
    if first.ratio is not None and first.theirs is not None:
        text += f", {median_text(first)} of {contender_title(first.theirs.contender)}"
    others = (m for m in result.measurements if m.problem and m is not first.ours)
    return "; ".join([text, *(f"{contender_title(m.contender)}: {m.problem}" for m in others)])
