"""Curves of a dispatcher's load with 1 to 1,000 peers of each kind, stored as JSON.

    python -m benchmarks.dispatcher_curves           measure, then render; about three minutes
    python -m benchmarks.dispatcher_curves --quick   a few counts; stores nothing

The docstring of `dispatcher` describes the measurements: durable splits per second, processor time
per heartbeat, and the fraction of a core used by heartbeats of idle peers. Each point is the median
of several rounds, which measure all counts in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.dispatcher import assigned_splits, heartbeats, idle_seconds
from benchmarks.report import machine, render
from benchmarks.workload import Elements, Pipeline

__all__ = ["CURVES", "Curve", "main", "points"]

COUNTS = (1, 3, 10, 30, 100, 300, 1000)
_QUICK_COUNTS = (1, 10)
_ROUNDS, _SECONDS = 3, 1.0
_DIRECTORY = Path(__file__).parent / "curves"

Point = Callable[[Elements, float], float]
"""Reads for a number of seconds; returns the value of a point."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve.

    Attributes:
        name: Name of its file.
        title: Title of the curve.
        unit: Unit of the vertical axis.
        build: Returns the builder of the pipeline, given the number of peers of each kind.
        point: Measures the value of a point.
    """

    name: str
    title: str
    unit: str
    build: Callable[[int], Callable[[Path, ExitStack], Pipeline]]
    point: Point


def _per_second(elements: Elements, seconds: float) -> float:
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        count += sum(next(elements) for _ in range(50))
    return count / elapsed


def _seconds_per_item(elements: Elements, seconds: float) -> float:
    items, took, end = 0.0, 0.0, time.perf_counter() + seconds
    while not items or time.perf_counter() < end:
        count, duration = next(elements)
        items += count
        took += duration
    return took / items


def _microseconds_per_item(elements: Elements, seconds: float) -> float:
    return _seconds_per_item(elements, seconds) * 1e6


CURVES = (
    Curve(
        name="splits",
        title="Durable splits assigned per second",
        unit="splits per second",
        build=assigned_splits,
        point=_per_second,
    ),
    Curve(
        name="heartbeat",
        title="Processor time of the dispatcher per heartbeat",
        unit="microseconds",
        build=heartbeats,
        point=_microseconds_per_item,
    ),
    Curve(
        name="idle",
        title="Processor time of the dispatcher with idle peers",
        unit="cores",
        build=lambda count: idle_seconds(count, 0.5),
        point=_seconds_per_item,
    ),
)


def main(arguments: list[str]) -> int:
    """Measure and draw the curves; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatcher_curves")
    parser.add_argument("--quick", action="store_true", help="measure a few counts, store nothing")
    options = parser.parse_args(arguments)
    counts = _QUICK_COUNTS if options.quick else COUNTS
    seconds = 0.1 if options.quick else _SECONDS
    for curve in CURVES:
        found = points(curve, counts, rounds=1 if options.quick else _ROUNDS, seconds=seconds)
        for count, values in found.items():
            print(f"{curve.name}  {count:>5}  {statistics.median(values):.4g} {curve.unit}")
        if not options.quick:
            _DIRECTORY.mkdir(exist_ok=True)
            content = {
                "title": curve.title,
                "unit": curve.unit,
                "machine": machine(),
                "rounds": {str(count): values for count, values in found.items()},
            }
            (_DIRECTORY / f"{curve.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    if not options.quick:
        render(_DIRECTORY.parent)
    return 0


def points(
    curve: Curve, counts: Sequence[int], *, rounds: int, seconds: float
) -> dict[int, list[float]]:
    """Measure a curve; return the values of each round by count."""
    found: dict[int, list[float]] = {count: [] for count in counts}
    with ExitStack() as stack:
        ready = {count: curve.build(count)(Path(), stack)() for count in counts}
        for elements in ready.values():
            curve.point(elements, 0.0)  # warm-up
        for _ in range(rounds):
            for count, elements in ready.items():
                found[count].append(curve.point(elements, seconds))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
