"""Report of the measurements: a table, the machine, RESULTS.md and results.json."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import headrace
from benchmarks.measure import Measurement, ratio
from benchmarks.workload import Bound, Target, Workload

__all__ = ["Result", "code", "machine", "render", "results_table", "store", "thread_round_trip"]

_PACKAGES = (
    "headrace",
    "numpy",
    "pyzmq",
    "google-crc32c",
    "opencv-python-headless",
    "tensorflow",
    "tensorflow-cpu",
    "torch",
    "grain",
)

_HEADER = (
    "workload",
    "contender",
    "rate (median)",
    "slowest to fastest round",
    "first element",
    "CPU per item",
    "headrace speedup",
    "target",
)


#: Ratio of the fastest to the slowest round above which a result is marked as noisy.
_NOISY = 1.5

#: Ratio of Headrace to a limit above which the figures are marked as wrong.
_ABOVE_LIMIT = 1.1


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of a workload.

    Attributes:
        workload: Name of the workload.
        date: Date of the run.
        measurements: Measurements of each contender, for results.json.
        rows: Rows of the table.
        code: State of the library that was measured; see `code`.
        machine: Machine that was used; see `machine`.
    """

    workload: str
    date: str
    measurements: list[dict[str, Any]]
    rows: list[list[str]]
    code: str = ""
    machine: dict[str, str] = field(default_factory=lambda: machine())

    @classmethod
    def of(cls, workload: Workload, measurements: list[Measurement]) -> Result:
        """Return the result of a workload, with targets evaluated."""
        return cls(
            workload=workload.name,
            date=datetime.now(UTC).date().isoformat(),
            measurements=[
                {"rate": m.rate, "first": m.first, "cpu": m.cpu, "unit": workload.unit, **asdict(m)}
                for m in measurements
            ],
            rows=_rows(workload, measurements),
            code=code(Path(headrace.__file__).parent),
        )


def code(library: Path) -> str:
    """Return the short git hash of a directory's tree, with "+" appended if files have changed.

    The hash covers the sources only, so commits of results or documents do not change it. Without
    git the result is "".
    """
    tree = _git(library, "rev-parse", "--short=10", "HEAD:./")
    return tree + "+" if tree and _git(library, "status", "--porcelain", "--", ".") else tree


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def machine() -> dict[str, str]:
    """Return cores, memory and versions, which figures depend on; nothing identifies the host."""
    properties = {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": platform.system(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            properties[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return properties


def thread_round_trip(times: int = 2000) -> float:
    """Measure a round trip between two threads, in microseconds.

    It differs tenfold between machines; so does the ratio of contenders that pass each element
    between threads to contenders that do not.
    """
    request, reply = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(times):
            request.acquire()
            reply.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    began = time.perf_counter()
    for _ in range(times):
        request.release()
        reply.acquire()
    took = time.perf_counter() - began
    thread.join()
    return took / times * 1e6


def results_table(results: Iterable[Result]) -> str:
    """Return a Markdown table with aligned columns."""
    return _table([list(_HEADER), *(row for result in results for row in result.rows)])


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def store(directory: Path, results: list[Result], order: list[str], method: str) -> None:
    """Write results.json and RESULTS.md, and keep stored workloads that were not run this time.

    Results of other machines or versions are kept as well, since contenders are compared within
    a run only; the page names the difference. Results with other columns are dropped.

    Args:
        directory: Directory of the two files.
        results: Results of this run.
        order: Names of all workloads, in the order of the table.
        method: Description of the rounds.
    """
    merged: dict[str, Result] = {}
    stored = directory / "results.json"
    if stored.exists():
        old = json.loads(stored.read_text())
        found = [Result(**entry) for entry in old["results"]]
        merged = {
            result.workload: result
            for result in found
            if all(len(row) == len(_HEADER) for row in result.rows)
        }
    merged |= {result.workload: result for result in results}
    ordered = [merged[name] for name in order if name in merged]
    round_trip = round(thread_round_trip())
    content = {
        "thread_round_trip_us": round_trip,
        "method": method,
        "results": [asdict(result) for result in ordered],
    }
    stored.write_text(json.dumps(content, indent=1) + "\n")
    render(directory)


def render(directory: Path) -> None:
    """Write RESULTS.md from results.json and the stored curves."""
    content = json.loads((directory / "results.json").read_text())
    results = [Result(**entry) for entry in content["results"]]
    method, round_trip = content["method"], content["thread_round_trip_us"]
    plots = [f"{path.parent.name}/{path.name}" for path in sorted(directory.glob("curves/*.svg"))]
    (directory / "RESULTS.md").write_text(
        _page(method, round_trip, results, plots, _scale_table(directory)).rstrip() + "\n"
    )


def _scale_table(directory: Path) -> str:
    """Return the curves of `dispatcher_scale` as a table with one row per curve."""
    curves = [
        json.loads(path.read_text())
        for path in sorted(directory.glob("curves/scale_*"))
        if path.suffix == ".json"
    ]
    if not curves:
        return ""
    counts = [*curves[0]["rounds"]]
    header = ["curve", "unit", *(f"{int(count):,} peers of each kind" for count in counts)]
    rows = [
        [curve["title"], curve["unit"]]
        + [_plain_number(statistics.median(curve["rounds"][count])) for count in counts]
        for curve in curves
    ]
    return _table([header, *rows])


def _plain_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _page(
    method: str, round_trip: int, results: list[Result], plots: list[str], scale_table: str = ""
) -> str:
    properties = _most_common_machine(results)
    described = ", ".join(f"{name} {value}" for name, value in properties.items())
    return (
        "# Benchmarks\n\n"
        "Written by `python -m benchmarks`; the docstring of each benchmark describes its "
        f"workloads.\n\n{results_table(results)}\n\n"
        + _paragraph(f"**Method.** {method}")
        + _paragraph(
            "**Columns.** Rates are medians over the rounds. *Headrace speedup* is the median over "
            "the rounds of Headrace's rate divided by the contender's; above 1 Headrace is faster. "
            "If there are two rows of Headrace, both ratios are given in their order. *First "
            "element* is the time from opening an iterator over a warm pipeline to its first "
            "element. *CPU per item* is the user and system time of all threads and processes, "
            "divided by the number of items; it depends less on other load than rates do. A row in "
            "italics is an upper limit set by the machine or by Python, not a product."
        )
        + _paragraph(f"**Machine.** {described}; {_runs_text(results, properties)}")
        + _paragraph(
            f"A round trip between two threads takes {round_trip} µs on the machine of the last "
            "run."
        )
        + _pictures(plots, scale_table)
    )


def _paragraph(text: str) -> str:
    """Wrap a Markdown paragraph and the list items after it at 120 columns."""
    first, *items = (
        textwrap.fill(
            line, 120, subsequent_indent="  " * (number > 0),
            break_long_words=False, break_on_hyphens=False,
        )
        for number, line in enumerate(text.split("\n"))
    )  # fmt: skip
    return "\n".join([first, *([""] if items else []), *items]) + "\n\n"


def _most_common_machine(results: list[Result]) -> dict[str, str]:
    """Return the machine of most results."""
    machines = [result.machine for result in results]
    return max(machines, key=machines.count, default=machine())


def _runs_text(results: list[Result], usual: dict[str, str]) -> str:
    """Describe the runs: date, code, and differences of the machine from `usual`.

    If there are several runs, the workloads of all but the largest run are listed.
    """
    runs: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        differences = [each for each in result.machine.items() if each not in usual.items()]
        machine_text = "".join(f", {name} {value}" for name, value in differences)
        run = result.date, result.code or "unknown", machine_text
        runs.setdefault(run, []).append(result.workload)
    texts = {run: f"measured {run[0]}, code {run[1]}{run[2]}" for run in sorted(runs)}
    explanation = " (`git rev-parse --short=10 HEAD:src/headrace`)"
    if len(runs) < 2:
        return "".join(texts.values()) + explanation + "."
    latest, *earlier = sorted(runs, key=lambda run: len(runs[run]), reverse=True)
    others = "".join(f"\n* {texts[run]}: {'; '.join(runs[run])}." for run in sorted(earlier))
    return f"{texts[latest]}{explanation}. Exceptions:{others}"


def _pictures(plots: list[str], scale_table: str) -> str:
    if not plots:
        return ""
    scale = [plot for plot in plots if Path(plot).stem.startswith("scale_")]
    shown = _images([plot for plot in plots if plot not in scale])
    text = (
        "## A dispatcher with 1 to 1,000 peers of each kind\n\n"
        + _paragraph(
            "Drawn by `python -m benchmarks.dispatcher_curves`; the figures are in JSON files of "
            "the same names. The shaded area spans the lowest to the highest round."
        )
        + f"{shown}\n"
    )
    if scale:
        text += "\n## A dispatcher in virtual time\n\n" + _paragraph(
            "Measured by `python -m benchmarks.dispatcher_scale`, without sockets; "
            "docs/design/0034-scale.md discusses the curves."
        )
        text += f"{scale_table}\n\n{_images(scale)}\n"
    return text


def _images(plots: list[str]) -> str:
    return "\n".join(f"![{Path(plot).stem}]({plot})" for plot in plots)


def _rows(workload: Workload, measurements: list[Measurement]) -> list[list[str]]:
    ours = [m for m in measurements if m.role == "headrace"]
    rows = []
    for m in measurements:
        compared = [] if m.role == "headrace" else [ratio(headrace, [m]) for headrace in ours]
        rows.append(
            [
                workload.name,
                f"*{m.contender}*" if m.role == "limit" else m.contender,
                m.problem or _rate(m.rate, workload),
                "–" if m.problem else _span(m.rates, workload),
                "–" if m.first is None or workload.self_timed else _duration(m.first),
                "–" if m.cpu is None else _cost(m.cpu),
                " / ".join(_ratio_text(value) for value in compared) or "–",
                _target_outcomes(workload, measurements, m.contender)
                or _limit_warning(m, compared)
                or "–",
            ]
        )
    return rows


def _limit_warning(limit: Measurement, ratios: list[float | None]) -> str:
    """Return a warning if Headrace exceeds a limit by more than noise, else an empty string."""
    if limit.role == "limit" and any(r is not None and r > _ABOVE_LIMIT for r in ratios):
        return "ABOVE THE LIMIT: the figures of this workload are wrong"
    return ""


def _target_outcomes(workload: Workload, measurements: list[Measurement], contender: str) -> str:
    """Return the targets of a contender with their outcomes."""
    by_name = {m.contender: m for m in measurements}
    outcomes: dict[type, Callable[[Any, dict[str, Measurement], Workload], str]] = {
        Target: _rate_outcome,
        Bound: _bound_outcome,
    }
    targets = [target for target in workload.targets if target.by == contender]
    return "; ".join(outcomes[type(target)](target, by_name, workload) for target in targets)


def _rate_outcome(target: Target, by_name: dict[str, Measurement], workload: Workload) -> str:
    measured = by_name[target.by]
    if not target.of:
        target_text = f"at least {_rate(target.at_least, workload)}"
        return f"{target_text}: {_outcome(measured.rate, measured.rate, target.at_least, workload)}"
    of = target.of[0] if len(target.of) == 1 else "the fastest of " + ", ".join(target.of)
    target_text = f"{target.at_least:.3g}x {of}"
    reached = ratio(
        measured,
        [by_name[name] for name in target.of],
        of_best_median=target.of_best_median,
    )
    if target.or_rate is None:
        return f"{target_text}: {_outcome(reached, None, target.at_least, workload)}"
    target_text += f" or {_rate(target.or_rate, workload)}"
    if measured.rate is not None and measured.rate >= target.or_rate:
        return f"{target_text}: {_outcome(measured.rate, measured.rate, target.or_rate, workload)}"
    return f"{target_text}: {_outcome(reached, None, target.at_least, workload)}"


def _bound_outcome(bound: Bound, by_name: dict[str, Measurement], workload: Workload) -> str:
    rate = by_name[bound.by].rate
    outcome = "unknown"
    if rate is not None:
        outcome = ("met" if 1 / rate <= bound.at_most else "MISSED") + f", {_cost(1 / rate)}"
    return f"at most {_cost(bound.at_most)} per item: {outcome}"


def _outcome(reached: float | None, rate: float | None, at_least: float, workload: Workload) -> str:
    """Return the outcome of a target, with the rate, or with the ratio if `rate` is None."""
    if reached is None:
        return "unknown"
    shown = _ratio_text(reached) if rate is None else _rate(rate, workload)
    return ("met" if reached >= at_least else "MISSED") + f", {shown}"


def _rate(rate: float | None, workload: Workload) -> str:
    if rate is None:
        return "–"
    if workload.self_timed:
        return f"{_cost(1 / rate)} per item"
    if workload.item_bytes is not None:
        return f"{rate * workload.item_bytes / 1e9:.2f} GB/s"
    return f"{_number(rate)} {workload.unit}/s"


def _span(rates: list[float], workload: Workload) -> str:
    noisy = ", NOISY" if max(rates) > _NOISY * min(rates) else ""
    if workload.self_timed:
        return f"{_cost(1 / min(rates))} to {_cost(1 / max(rates))}{noisy}"
    scale = 1.0 if workload.item_bytes is None else workload.item_bytes / 1e9
    form = _number if workload.item_bytes is None else "{:.2f}".format
    return f"{form(min(rates) * scale)} to {form(max(rates) * scale)}{noisy}"


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    if value >= 1e4:
        return f"{value / 1e3:.3g} k"
    return f"{value:.4g}"


def _ratio_text(value: float | None) -> str:
    if value is None:
        return "?"
    if value >= 20:
        return f"{value:.0f}x"
    return f"{value:.3g}x" if value > 0.1 else f"{value:.2g}x"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def _cost(seconds: float) -> str:
    """Format seconds per item, which may be far less than a microsecond."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _first_value(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return platform.machine()
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, platform.machine())
