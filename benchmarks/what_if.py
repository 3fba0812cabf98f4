"""Predictions of `headrace doctor --job` against the measured effects of the changes.

    python -m benchmarks what_if           five rounds of each pipeline; about five minutes
    python -m benchmarks what_if --quick   one short round, a smoke test
    python -m benchmarks what_if map       only the pipelines whose name contains "map"

In each round a pipeline is read with the change, then as it is, watched as by the command, and
again with the change; the measured rate is the mean of both. So prediction and measurement are made
within seconds, and a steady drift of the machine's load cancels out. The error of a pipeline is
that of the median over the rounds of predicted over measured rate. Workers are processes on this
machine, and the reader is this process. Other programs falsify the result: the table has the cores
that they used, for which the prediction becomes a range: its lower end counts.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import numpy as np

import headrace as hr
from headrace.cli.formatting import format_table
from headrace.cli.job_measurement import StatusAt
from headrace.cli.job_report import watch_job
from headrace.execution.what_if import Change
from headrace.service import LocalCluster, distribute

__all__ = ["PIPELINES", "Comparison", "WhatIfPipeline", "compare", "main"]

_TARGET_ERROR = 0.2
_ELEMENTS = 1_000_000_000
_EPOCH = 2_000
_PIXELS = 768
_names = itertools.count()


@dataclass(frozen=True, kw_only=True)
class WhatIfPipeline:
    """A pipeline, a change of it, and the prediction to compare.

    Attributes:
        name: Name in the table.
        change: Kind of the prediction.
        before: Returns the dataset as it is.
        after: Returns the dataset with the change.
        workers: Number of workers with the change; one before.
        step_seconds: Seconds per element in the reading program.
    """

    name: str
    change: Change
    before: Callable[[], hr.Dataset]
    after: Callable[[], hr.Dataset]
    workers: int = 1
    step_seconds: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Rates of one round in elements per second.

    Attributes:
        before: Measured rate without the change.
        predicted: Predicted rate with the change, the lower end of a range.
        at_most: Upper end of the range.
        measured: Measured rate with the change.
        bottleneck: Bottleneck that was named.
        foreign_cores: Cores that other programs than the workers used.
    """

    before: float
    predicted: float
    at_most: float
    measured: float
    bottleneck: str
    foreign_cores: float

    def __str__(self) -> str:
        return (
            f"before {self.before:.1f}/s, predicted {self.predicted:.1f} to {self.at_most:.1f}/s, "
            f"measured {self.measured:.1f}/s; bound by {self.bottleneck}; others use "
            f"{self.foreign_cores:.1f} cores"
        )


def _run_python(value: Any) -> Any:
    """Run Python code for one or two milliseconds."""
    total = 0
    for step in range(60_000):
        total ^= step & 1
    return value


def _augment(value: Any) -> Any:
    """Run Python code for about half a millisecond."""
    total = 0
    for step in range(25_000):
        total ^= step & 1
    return value


def _fetch(value: Any) -> Any:
    """Wait like a read from a remote store."""
    time.sleep(0.008)
    return value


_BASIS = np.cos(np.pi / 8 * (np.arange(8)[:, None] + 0.5) * np.arange(8)).astype(np.float32)


def _decode(pixels: int) -> Callable[[Any], Any]:
    """Return a function that computes an image from coefficients of 8 x 8 blocks, as JPEG does."""

    def decode(number: Any) -> Any:
        blocks = (pixels // 8) * (_PIXELS // 8)
        coefficients = np.full((blocks, 8, 8), int(number) % 7, np.float32)
        image = _BASIS @ (coefficients * 0.5) @ _BASIS.T
        return np.clip(image + 128, 0, 255).astype(np.uint8).mean()

    return decode


def _python_map() -> hr.Dataset:
    return hr.Dataset.range(_ELEMENTS).map(_run_python)


def _remote_files(calls: int | None) -> hr.Dataset:
    fetched = hr.Dataset.range(_ELEMENTS).map(_fetch, calls)
    return fetched.map(_augment)


def _lookup() -> hr.Dataset:
    return hr.Dataset.range(_EPOCH).map(_fetch).map(_run_python).repeat()


@cache
def _saved_lookup() -> hr.Dataset:
    directory = tempfile.mkdtemp(prefix="headrace-what-if-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    # The values of the lookup, saved without its waits.
    hr.Dataset.range(_EPOCH).save(f"{directory}/lookup")
    return hr.Dataset.load(f"{directory}/lookup").map(_run_python).repeat()


def _images(pixels: int) -> hr.Dataset:
    decoded = hr.Dataset.range(_ELEMENTS).map(_decode(pixels))
    return decoded.map(_augment)


PIPELINES = (
    WhatIfPipeline(
        name="Python map: 2nd worker",
        change=Change.ADD_LOCAL_WORKER,
        before=_python_map,
        after=_python_map,
        workers=2,
    ),
    WhatIfPipeline(
        name="map that waits: threads",
        change=Change.PARALLEL_CALLS,
        before=lambda: _remote_files(None),
        after=lambda: _remote_files(4),
    ),
    WhatIfPipeline(
        name="lookup: save and load",
        change=Change.SAVE_OUTPUT,
        before=_lookup,
        after=_saved_lookup,
    ),
    WhatIfPipeline(
        name="NumPy: half the pixels",
        change=Change.SPEED_UP_STEP,
        before=lambda: _images(_PIXELS),
        after=lambda: _images(_PIXELS // 2),
    ),
    WhatIfPipeline(
        name="slow reader: 2nd worker",
        change=Change.ADD_LOCAL_WORKER,
        before=_python_map,
        after=_python_map,
        workers=2,
        step_seconds=0.02,
    ),
)


def compare(pipeline: WhatIfPipeline, seconds: float, warm_up: float) -> Comparison:
    """Read a pipeline without and with the change, and return the rates.

    Args:
        pipeline: The pipeline.
        seconds: Seconds to watch; the change is measured for a third as long, before and after.
        warm_up: Seconds to read before.
    """
    with ExitStack() as stack:
        plain = stack.enter_context(LocalCluster(1))
        changed = stack.enter_context(LocalCluster(pipeline.workers))
        job = f"before-{next(_names)}"
        elements = _open(stack, pipeline, pipeline.before(), plain, job)
        others = _open(stack, pipeline, pipeline.after(), changed, f"after-{next(_names)}")
        step_seconds = pipeline.step_seconds
        _read(others, step_seconds, warm_up)
        first = _read(others, step_seconds, 0.3 * seconds)
        _read(elements, step_seconds, warm_up)
        with ThreadPoolExecutor(1) as threads:
            watching = threads.submit(
                watch_job,
                lambda: StatusAt(plain.dispatcher.stats(), time.monotonic()),
                job,
                seconds,
            )
            before = _read(elements, step_seconds, seconds, watching.done)
            (report,) = watching.result()
        _read(others, step_seconds, warm_up / 2)  # also takes what was buffered
        measured = (first + _read(others, step_seconds, 0.3 * seconds)) / 2
    found = report.diagnosis
    predicted = next((each for each in found.what_ifs if each.kind is pipeline.change), None)
    # A change that is not mentioned changes nothing.
    rate = found.elements_per_second if predicted is None else predicted.elements_per_second
    return Comparison(
        before=before,
        predicted=rate,
        at_most=rate if predicted is None else predicted.at_most or rate,
        measured=measured,
        bottleneck=found.bottleneck.location,
        foreign_cores=report.measured.foreign_cores,
    )


def _open(
    stack: ExitStack, pipeline: WhatIfPipeline, dataset: hr.Dataset, cluster: LocalCluster, job: str
) -> Iterator[Any]:
    remote = dataset.apply(distribute("distributed_epoch", cluster.target, job_name=job))
    return stack.enter_context(iter(remote))


def _read(
    elements: Iterator[Any],
    step_seconds: float,
    seconds: float,
    is_done: Callable[[], bool] | None = None,
) -> float:
    """Read for some time, and return the elements per second.

    Args:
        elements: Elements to read.
        step_seconds: Seconds that the reading program takes for each.
        seconds: Seconds to read.
        is_done: If given, reading lasts until it returns true; at least for `seconds`.
    """
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds or (is_done and not is_done()):
        next(elements)
        count += 1
        if step_seconds:
            time.sleep(step_seconds)
    return count / took


def _exit(number: int, _frame: object) -> NoReturn:
    """End the process as an error does, so that servers stop and files are removed."""
    sys.exit(128 + number)


def main(arguments: list[str]) -> int:
    """Compare predictions with measurements; return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks what_if", description=__doc__)
    parser.add_argument("name", nargs="*", help="parts of names of pipelines; default: all")
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _exit)
    rounds, seconds, warm_up = (1, 4.0, 2.0) if options.quick else (5, 6.0, 2.5)
    chosen = [
        each
        for each in PIPELINES
        if not options.name or any(part in each.name for part in options.name)
    ]
    found: dict[str, list[Comparison]] = {each.name: [] for each in chosen}
    for number in range(rounds):
        for pipeline in chosen:
            comparison = compare(pipeline, seconds, warm_up)
            found[pipeline.name].append(comparison)
            load = os.getloadavg()[0]
            print(f"round {number + 1}, load {load:.1f}, {pipeline.name}: {comparison}", flush=True)
    rows = [("change", "before", "predicted", "at most", "measured", "ratio", "others")]
    within = 0
    for name, comparisons in found.items():
        ratio = statistics.median(each.predicted / each.measured for each in comparisons)
        within += abs(ratio - 1) <= _TARGET_ERROR
        before, predicted, at_most, measured, foreign = (
            statistics.median(getattr(each, field) for each in comparisons)
            for field in ("before", "predicted", "at_most", "measured", "foreign_cores")
        )
        rates = (f"{rate:.0f}/s" for rate in (before, predicted, at_most, measured))
        rows.append((name, *rates, f"{ratio:.2f}", f"{foreign:.1f}"))
    print("\n".join(format_table(rows)))
    print(f"{within} of {len(found)} within {_TARGET_ERROR:.0%}; medians of {rounds} paired runs")
    return 0
