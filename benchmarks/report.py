"""What was measured, as one table, with the machine that it was measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
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

__all__ = ["Result", "code", "machine", "results_table", "store", "thread_round_trip"]

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
    "CPU an item",
    "headrace is",
    "target",
)


#: Rounds further apart than this are called noisy: something else was using the machine.
_NOISY = 1.5

#: A ratio to a limit above this is called impossible: the limit was disturbed, or is none.
_ABOVE_LIMIT = 1.1


@dataclass(frozen=True, kw_only=True)
class Result:
    """A workload that was run: its name, its measurements and its table rows.

    Attributes:
        workload: Its name.
        date: When it was run.
        measurements: What was measured, for results.json.
        rows: The same for the table.
        code: Which state of the library was measured; see `code`.
        machine: Where; see `machine`.
    """

    workload: str
    date: str
    measurements: list[dict[str, Any]]
    rows: list[list[str]]
    code: str = ""
    machine: dict[str, str] = field(default_factory=lambda: machine())

    @classmethod
    def of(cls, workload: Workload, measurements: list[Measurement]) -> Result:
        """Judge the measurements of a workload."""
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
    """Return a directory's tree in git, shortened, "+" after it where files differ; "": no git.

    It is that of the sources alone, so that a commit of results or of documents leaves it as it is.
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
    """Cores, memory, versions: what a figure depends on, and nothing that names the machine."""
    facts = {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": platform.system(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts


def thread_round_trip(times: int = 2000) -> float:
    """Microseconds for two threads to wake each other in turn: what handing over an element costs.

    It differs tenfold between machines, and so do the ratios of contenders that hand every element
    from thread to thread to those that do not.
    """
    there, back = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(times):
            there.acquire()
            back.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    began = time.perf_counter()
    for _ in range(times):
        there.release()
        back.acquire()
    took = time.perf_counter() - began
    thread.join()
    return took / times * 1e6


def results_table(results: Iterable[Result]) -> str:
    """One Markdown table, readable as plain text."""
    rows = [list(_HEADER), *(row for result in results for row in result.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def store(directory: Path, results: list[Result], order: list[str], how: str) -> None:
    """Write results.json and RESULTS.md; keep stored workloads that were not run this time.

    Those that were run on another machine, or with other versions, are kept as well, and the page
    says so: each compares contenders of one run. Those of other columns are dropped.

    Args:
        directory: Where the two files are.
        results: What was run.
        order: The names of all workloads, in the table's order.
        how: One sentence on rounds and seconds.
    """
    kept: dict[str, Result] = {}
    stored = directory / "results.json"
    if stored.exists():
        old = json.loads(stored.read_text())
        found = [Result(**entry) for entry in old["results"]]
        kept = {
            result.workload: result
            for result in found
            if all(len(row) == len(_HEADER) for row in result.rows)
        }
    kept |= {result.workload: result for result in results}
    ordered = [kept[name] for name in order if name in kept]
    round_trip = round(thread_round_trip())
    how += (
        f" Two threads wake each other in turn in {round_trip} µs on the machine of the last run."
    )
    content = {
        "thread_round_trip_us": round_trip,
        "how": how,
        "results": [asdict(result) for result in ordered],
    }
    stored.write_text(json.dumps(content, indent=1) + "\n")
    plots = [f"{path.parent.name}/{path.name}" for path in sorted(directory.glob("curves/*.svg"))]
    (directory / "RESULTS.md").write_text(_page(how, ordered, plots))


def _page(how: str, results: list[Result], plots: list[str]) -> str:
    facts = _usual(results)
    described = ", ".join(f"{name} {value}" for name, value in facts.items())
    return (
        "# Benchmarks\n\n"
        "Written by `python -m benchmarks`; each workload is described at the top of its file.\n\n"
        f"{results_table(results)}\n\n"
        f"**How.** {how} Rates are medians over the rounds. *headrace is* compares round by round: "
        "the median of the rounds' ratios, so above 1 Headrace is the faster one; where Headrace "
        "runs in two ways, both are given in the order of their rows. *First element* is the time "
        "from opening an iterator over a pipeline that is built and warm. *CPU an item* is the "
        "processor time of all threads and processes, user and system, divided by the rows, images "
        "or batches that were read: it changes less than rates do when others use the machine. A "
        "row in italics is a bound set by the machine or by Python, not a product.\n\n"
        f"**Machine.** {described}; {_when(results, facts)}.\n" + _pictures(plots)
    )


def _usual(results: list[Result]) -> dict[str, str]:
    """Return the machine that most of these were run on."""
    machines = [result.machine for result in results]
    return max(machines, key=machines.count, default=machine())


def _when(results: list[Result], usual: dict[str, str]) -> str:
    """Say when, of which code, and on which other machine.

    Where runs differ, it is said of each which workloads it has.
    """
    runs: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        unlike = [each for each in result.machine.items() if each not in usual.items()]
        where = "".join(f", {name} {value}" for name, value in unlike)
        run = result.date, result.code or "unknown", where
        runs.setdefault(run, []).append(result.workload)
    said = {run: f"measured {run[0]} of code {run[1]}{run[2]}" for run in sorted(runs)}
    explained = " (`git rev-parse --short=10 HEAD:src/headrace`)"
    if len(runs) < 2:
        return "".join(said.values()) + explained
    latest, *earlier = sorted(runs, key=lambda run: len(runs[run]), reverse=True)
    others = "; ".join(f"{said[run]}: {', '.join(runs[run])}" for run in sorted(earlier))
    return f"{said[latest]}{explained}, but for these: {others}"


def _pictures(plots: list[str]) -> str:
    if not plots:
        return ""
    shown = "\n".join(f"![{Path(plot).stem}]({plot})" for plot in plots)
    return (
        "\n## A dispatcher with 1 to 1,000 peers of each kind\n\n"
        "Drawn by `python -m benchmarks.dispatcher_curves`; the figures lie beside each plot as "
        f"JSON. The shade is from the lowest round to the highest.\n\n{shown}\n"
    )


def _rows(workload: Workload, measurements: list[Measurement]) -> list[list[str]]:
    ours = [m for m in measurements if m.role == "headrace"]
    rows = []
    for m in measurements:
        compared = [] if m.role == "headrace" else [ratio(own, [m]) for own in ours]
        rows.append(
            [
                workload.name,
                f"*{m.contender}*" if m.role == "limit" else m.contender,
                m.problem or _rate(m.rate, workload),
                "–" if m.problem else _span(m.rates, workload),
                "–" if m.first is None or workload.own_clock else _duration(m.first),
                "–" if m.cpu is None else _cost(m.cpu),
                " / ".join(_times(value) for value in compared) or "–",
                _verdicts(workload, measurements, m.contender) or _doubt(m, compared) or "–",
            ]
        )
    return rows


def _doubt(limit: Measurement, ratios: list[float | None]) -> str:
    """What to say of a limit that Headrace seems to exceed; empty if it does not."""
    if limit.role == "limit" and any(r is not None and r > _ABOVE_LIMIT for r in ratios):
        return "ABOVE THE LIMIT: do not trust this workload's figures"
    return ""


def _verdicts(workload: Workload, measurements: list[Measurement], contender: str) -> str:
    """The targets of one contender, each with what became of it."""
    by_name = {m.contender: m for m in measurements}
    judge: dict[type, Callable[[Any, dict[str, Measurement], Workload], str]] = {
        Target: _judged_by_rate,
        Bound: _judged_by_time,
    }
    targets = [target for target in workload.targets if target.by == contender]
    return "; ".join(judge[type(target)](target, by_name, workload) for target in targets)


def _judged_by_rate(target: Target, by_name: dict[str, Measurement], workload: Workload) -> str:
    own = by_name[target.by]
    if not target.of:
        wanted = f"at least {_rate(target.at_least, workload)}"
        return f"{wanted}: {_outcome(own.rate, own.rate, target.at_least, workload)}"
    of = target.of[0] if len(target.of) == 1 else "the best of " + ", ".join(target.of)
    wanted = f"{target.at_least:.3g}x {of}"
    reached = ratio(own, [by_name[name] for name in target.of])
    if target.or_rate is None:
        return f"{wanted}: {_outcome(reached, None, target.at_least, workload)}"
    wanted += f" or {_rate(target.or_rate, workload)}"
    if own.rate is not None and own.rate >= target.or_rate:
        return f"{wanted}: {_outcome(own.rate, own.rate, target.or_rate, workload)}"
    return f"{wanted}: {_outcome(reached, None, target.at_least, workload)}"


def _judged_by_time(bound: Bound, by_name: dict[str, Measurement], workload: Workload) -> str:
    rate = by_name[bound.by].rate
    outcome = "unknown"
    if rate is not None:
        outcome = ("met" if 1 / rate <= bound.at_most else "MISSED") + f", {_cost(1 / rate)}"
    return f"at most {_cost(bound.at_most)} an item: {outcome}"


def _outcome(reached: float | None, rate: float | None, at_least: float, workload: Workload) -> str:
    """What became of a target: a ratio that was reached, or a rate."""
    if reached is None:
        return "unknown"
    shown = _times(reached) if rate is None else _rate(rate, workload)
    return ("met" if reached >= at_least else "MISSED") + f", {shown}"


def _rate(rate: float | None, workload: Workload) -> str:
    if rate is None:
        return "–"
    if workload.own_clock:
        return f"{_cost(1 / rate)} an item"
    if workload.item_bytes is not None:
        return f"{rate * workload.item_bytes / 1e9:.2f} GB/s"
    return f"{_number(rate)} {workload.unit}/s"


def _span(rates: list[float], workload: Workload) -> str:
    noisy = ", NOISY" if max(rates) > _NOISY * min(rates) else ""
    if workload.own_clock:
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


def _times(value: float | None) -> str:
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
    """The processor time of an item, which may be far less than a microsecond."""
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
