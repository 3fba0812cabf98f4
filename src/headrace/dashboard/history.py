"""Measurements of the last hour, at a resolution that decreases with age."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["History", "Point"]

_TIERS = ((1.0, 120), (5.0, 120), (30.0, 120))
"""Seconds of an interval and number of intervals: two minutes, ten minutes, one hour."""


@dataclass(frozen=True)
class Point:
    """Values at one time.

    Attributes:
        time: Time of the first measurement in the interval, in seconds since the epoch.
        values: Mean of each value in the interval; empty if the server did not answer.
    """

    time: float
    values: Mapping[str, float]


@dataclass
class _Interval:
    start: float
    first: float
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def mean(self) -> Point:
        return Point(
            self.first, {name: total / self.counts[name] for name, total in self.sums.items()}
        )


class History:
    """Measurements by time; old ones are means over longer intervals, and then dropped."""

    def __init__(self) -> None:
        self._tiers = [(seconds, deque[_Interval](maxlen=count)) for seconds, count in _TIERS]

    def add(self, time: float, values: Mapping[str, float]) -> None:
        """Add the values measured at a time; none if the server did not answer.

        Args:
            time: Seconds since the epoch. Values from before the latest ones are ignored.
            values: Values by name.
        """
        for seconds, intervals in self._tiers:
            start = time // seconds * seconds
            if intervals and start < intervals[-1].start:
                continue  # the clock was set back
            if not intervals or start > intervals[-1].start:
                intervals.append(_Interval(start, time))
            intervals[-1].add(values)

    def points(self) -> list[Point]:
        """Return all points, oldest first."""
        return list(self._points())

    def _points(self) -> Iterator[Point]:
        ends = [intervals[0].start if intervals else 0.0 for _, intervals in self._tiers]
        newest = self._tiers[0][1][-1].start if self._tiers[0][1] else 0.0
        for tier in range(len(self._tiers) - 1, -1, -1):
            seconds, intervals = self._tiers[tier]
            # Only intervals that end before a finer tier begins. Those older than an hour are not
            # shown, even if nothing was measured since.
            end = ends[tier - 1] if tier else float("inf")
            for interval in intervals:
                if interval.start + seconds <= end and interval.start > newest - _HISTORY_SECONDS:
                    yield interval.mean()


_HISTORY_SECONDS = _TIERS[-1][0] * _TIERS[-1][1]
