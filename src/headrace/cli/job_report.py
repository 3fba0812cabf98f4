"""`headrace doctor --job`: the bottleneck of a running job, and what changes would bring."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from headrace.cli.formatting import (
    escape_controls,
    format_bytes,
    format_rate,
    format_table,
    pluralize,
)
from headrace.cli.job_measurement import EpochObservation, StatusAt, measure_epoch, observe
from headrace.cli.status_client import StatusClient
from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.execution.diagnosis import Diagnosis, analyze
from headrace.execution.pipeline_model import PipelineMeasurement
from headrace.execution.what_if import WhatIf
from headrace.service.messages import DispatcherStatus, JobStatus

__all__ = ["EpochReport", "diagnose_job", "render_report", "report_to_json", "watch_job"]

_POLL_SECONDS = 1.0
_MIN_SECONDS = 3.0
"""Minimum seconds of measurements for a result."""
_MIN_GAIN = 1.05
_MAX_STEPS = 8
_MAX_NAMES = 10
_WIDTH = 80
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class EpochReport:
    """Report on one epoch of a job.

    Attributes:
        job: Name of the job.
        epoch: Number of the epoch; several for nested repeats.
        seconds: Seconds of measurements.
        measured: The measurements.
        diagnosis: Bottleneck and effects of changes.
    """

    job: str
    epoch: tuple[int, ...]
    seconds: float
    measured: PipelineMeasurement
    diagnosis: Diagnosis


def diagnose_job(
    address: str, keys: Path | None, job: str, interval: float, *, as_json: bool
) -> None:
    """Watch a job for `interval` seconds and print the report."""
    with StatusClient(address, keys, _TIMEOUT_SECONDS) as client:

        def fetch() -> StatusAt:
            snapshot = client.fetch()
            if not isinstance(snapshot.status, DispatcherStatus):
                raise FailedPreconditionError(
                    f"the server at {client.address} is a coordinator or parameter server, which "
                    "has no jobs; give the address of the dispatcher of the data service, or use "
                    "`headrace top` for this server"
                )
            return StatusAt(snapshot.status, snapshot.taken_at)

        first = fetch()
        find_jobs(first.status, job)
        print(f"measuring job {escape_controls(job)} for {interval:g} s", file=sys.stderr)
        reports = watch_job(fetch, job, interval, first=first)
    if as_json:
        print(json.dumps([report_to_json(each) for each in reports], indent=2))
    else:
        sys.stdout.write("\n".join(render_report(each) for each in reports))


def find_jobs(status: DispatcherStatus, name: str) -> list[JobStatus]:
    """Return the jobs of a name; a job without a name is found by its number.

    Raises:
        NotFoundError: If there is none.
        FailedPreconditionError: If it is a save.
    """
    found = [job for job in status.jobs if _name(job) == name]
    if not found:
        names = sorted({escape_controls(_name(job)) for job in status.jobs})
        # The most similar ones first: a name was probably misspelt.
        close = difflib.get_close_matches(name, names, _MAX_NAMES)
        listed = [*close, *(each for each in names if each not in close)][:_MAX_NAMES]
        more = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
        known = f"the jobs are: {', '.join(listed)}{more}"
        known = known if names else "the dispatcher has no jobs"
        raise NotFoundError(
            f"there is no job {name!r}; {known} (a job without a name is named by its number)"
        )
    if all(job.path for job in found):
        raise FailedPreconditionError(
            f"job {name!r} is a save, which has no clients; see `headrace top`"
        )
    return found


def watch_job(
    fetch: Callable[[], StatusAt],
    name: str,
    interval: float,
    *,
    first: StatusAt | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[EpochReport]:
    """Watch a job, and return a report for each active epoch.

    If all epochs end before that, the one that was watched longest is reported.

    Args:
        fetch: Returns the present status.
        name: Name of the job.
        interval: Seconds to watch; fewer if all epochs end.
        first: First status, if it is known.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds.

    Raises:
        NotFoundError: If there is no such job.
        FailedPreconditionError: If it does not run, or not for long enough.
    """
    deadline = clock() + interval
    observations: dict[int, EpochObservation] = {}
    status = fetch() if first is None else first
    find_jobs(status.status, name)
    while True:
        observe(observations, status, lambda job: _name(job) == name and not job.path)
        remaining = deadline - clock()
        if remaining <= 0 or not observations:
            break
        sleep(min(_POLL_SECONDS, remaining))
        status = fetch()
    if not observations:
        raise FailedPreconditionError(
            f"job {name!r} has no active epoch: it has finished, or no client has started to read; "
            "run `headrace doctor --job` while it is read"
        )
    long_enough = [
        each for each in observations.values() if each.iteration.elapsed_seconds >= _MIN_SECONDS
    ]
    if not long_enough:
        raise FailedPreconditionError(
            f"the epochs of job {name!r} were observed for less than {_MIN_SECONDS:g} s, which is "
            "too short to find the bottleneck; try again, or with a larger --interval"
        )
    active = [each for each in long_enough if each.after is status]
    chosen = active or [max(long_enough, key=lambda each: each.seconds)]
    return [_report(each) for each in chosen]


def _report(observed: EpochObservation) -> EpochReport:
    measured = measure_epoch(observed)
    return EpochReport(
        job=_name(observed.job),
        epoch=observed.iteration.epoch,
        seconds=observed.seconds,
        measured=measured,
        diagnosis=analyze(measured),
    )


def _name(job: JobStatus) -> str:
    return job.name or str(job.job_id)


# --- output ---------------------------------------------------------------------------------------


def report_to_json(report: EpochReport) -> dict[str, Any]:
    """Return a report as a JSON value: the fields of the records."""
    return {
        "job": report.job,
        "epoch": list(report.epoch),
        "seconds": report.seconds,
        "measured": _to_json(report.measured),
        **_to_json(report.diagnosis),
    }


def _to_json(record: Any) -> Any:
    def convert(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value.value if isinstance(value, Enum) else value for name, value in items}

    return dataclasses.asdict(record, dict_factory=convert)


def render_report(report: EpochReport) -> str:
    """Return a report as lines of text; the first one names the bottleneck."""
    return "".join(f"{escape_controls(line)}\n" for line in _lines(report))


def _lines(report: EpochReport) -> Iterator[str]:
    found, measured = report.diagnosis, report.measured
    epoch = f", epoch {'.'.join(map(str, report.epoch))}" if report.epoch else ""
    first = f"job {report.job}{epoch}: bound by {found.bottleneck.location}"
    if found.cost and len(first) + len(found.cost) + 2 <= _WIDTH:
        yield f"{first}: {found.cost}"
    else:
        yield first
        yield from _wrap(found.cost)
    yield from _wrap(found.bottleneck.advice)
    tasks = (
        f"{pluralize(measured.num_tasks, 'worker')}, {pluralize(measured.num_clients, 'client')}"
    )
    size = f"{format_bytes(measured.bytes_per_element)} per element"
    yield f"now {format_rate(found.elements_per_second)} with {tasks}, {size}"
    rates = [f"{each.name} {format_rate(each.elements_per_second)}" for each in found.capacities]
    if rates:
        yield f"capacity: {', '.join(rates)}"
    if measured.steps:
        yield ""
        yield from _steps(measured)
    if found.what_ifs:
        yield ""
        yield from _advice(found)


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _steps(measured: PipelineMeasurement) -> Iterator[str]:
    total = sum(each.seconds for each in measured.steps)
    rows = [("step on the workers", "per element", "of the steps", "threads")]
    rows += [
        (
            each.name,
            _format_seconds(each.seconds),
            f"{each.seconds / total:.0%}" if total else "-",
            str(each.threads or "-"),
        )
        for each in measured.steps[:_MAX_STEPS]
    ]
    yield from format_table(rows)
    if measured.cpu_seconds is not None:
        yield f"processor time of the workers: {_format_seconds(measured.cpu_seconds)} per element"


def _advice(found: Diagnosis) -> Iterator[str]:
    useful = [each for each in found.what_ifs if _most(found, each) >= _MIN_GAIN]
    useless = [each for each in found.what_ifs if each not in useful]
    if not useful:
        yield "no change of the workers would make the job faster"
        return
    yield "predicted effect of a change"
    rows = [(_format_gain(found, each), each.change) for each in useful]
    for line, each in zip(format_table(rows, left=2), useful, strict=True):
        yield f"  {line}"
        limit = f"then limited by {each.limited_by}" if each.limited_by else ""
        yield from _wrap("; ".join(part for part in (limit, each.note) if part), " " * 6)
    if useless:
        yield from _wrap(f"no gain: {'; '.join(each.change for each in useless)}")


def _most(found: Diagnosis, change: WhatIf) -> float:
    return (change.at_most or change.elements_per_second) / found.elements_per_second


def _format_gain(found: Diagnosis, change: WhatIf) -> str:
    if change.at_most is None:
        return f"{change.gain:.1f}x {format_rate(change.elements_per_second)}"
    return f"{change.gain:.1f}x to {_most(found, change):.1f}x"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"
