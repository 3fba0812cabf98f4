"""Curves of a dispatcher's load with 1 to 1,000 peers of each kind, stored as JSON and SVG.

    python -m benchmarks.dispatcher_curves           measure, then draw; about three minutes
    python -m benchmarks.dispatcher_curves --quick   a few counts; stores nothing
    python -m benchmarks.dispatcher_curves --draw    draw the stored figures

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
from benchmarks.report import machine
from benchmarks.workload import Elements, Pipeline

__all__ = ["CURVES", "Curve", "draw", "main", "points"]

COUNTS = (1, 3, 10, 30, 100, 300, 1000)
_QUICK_COUNTS = (1, 10)
_ROUNDS, _SECONDS = 3, 1.0
_DIRECTORY = Path(__file__).parent / "curves"

Point = Callable[[Elements, float], float]
"""Reads for a number of seconds; returns the value of a point."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One plot.

    Attributes:
        name: Name of its files.
        title: Title of the plot.
        unit: Unit of the vertical axis.
        build: Returns the builder of the pipeline, given the number of peers of each kind.
        point: Measures the value of a point.
        target: Target value, drawn as a line; None draws no line.
    """

    name: str
    title: str
    unit: str
    build: Callable[[int], Callable[[Path, ExitStack], Pipeline]]
    point: Point
    target: float | None = None


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
        target=25_000.0,
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
        target=0.1,
    ),
)


def main(arguments: list[str]) -> int:
    """Measure and draw the curves; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatcher_curves")
    parser.add_argument("--quick", action="store_true", help="measure a few counts, store nothing")
    parser.add_argument("--draw", action="store_true", help="draw the stored figures")
    options = parser.parse_args(arguments)
    if options.draw:
        draw(_DIRECTORY)
        return 0
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
                "target": curve.target,
                "machine": machine(),
                "rounds": {str(count): values for count, values in found.items()},
            }
            (_DIRECTORY / f"{curve.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    if not options.quick:
        draw(_DIRECTORY)
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


def draw(directory: Path) -> None:
    """Draw each JSON file of a directory as an SVG file of the same name."""
    import matplotlib as mpl  # noqa: PLC0415  (installed in the environment of the benchmarks only)

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "headrace"  # makes the output deterministic
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot  # noqa: PLC0415  (as above)

    for path in sorted(directory.glob("*.json")):
        content = json.loads(path.read_text())
        counts = [int(count) for count in content["rounds"]]
        rounds = list(content["rounds"].values())
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        middle = [statistics.median(values) for values in rounds]
        axes.fill_between(counts, [*map(min, rounds)], [*map(max, rounds)], alpha=0.2)
        axes.plot(counts, middle, marker="o")
        if content["target"] is not None:
            axes.axhline(content["target"], linestyle="--", color="grey", label="target")
            axes.legend()
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set(title=content["title"], xlabel="workers (and the same number of clients)")
        axes.set_ylabel(content["unit"])
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
