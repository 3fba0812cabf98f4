"""Report of the measurements: RESULTS.md, DETAILS.md and the charts, drawn from results.json.

python -m benchmarks.report    write them again without measuring
"""

from __future__ import annotations

import importlib
import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.areas import AREAS, Area
from benchmarks.charts import Bar, Curve, Group, curve_chart, ratio_chart
from benchmarks.comparisons import (
    Comparison,
    compare,
    exceeds_limit,
    fastest_alternatives,
    measured_text,
    median_text,
    range_text,
    to_each_alternative,
    variant_label,
    variant_of,
)
from benchmarks.formats import cost, duration, lower_is_better
from benchmarks.results import Result, Results, machine
from benchmarks.titles import contender_title, title

__all__ = ["Result", "charts", "machine", "render", "results_table", "store"]

_CAPTION = (
    "Rate of Headrace divided by the other's (median). Right of 1x Headrace is faster. "
    "Lines: lowest to highest round."
)
_LIMITS = " Grey: upper limit."

_CURVES = {
    "scale_splits": "Splits per CPU second, simulated",
    "scale_load": "Load of heartbeats, simulated",
    "scale_opening": "Cost of a client's start, simulated",
}
"""Titles of the panels of the chart of the dispatcher, by name of the stored curve."""


def store(directory: Path, results: list[Result], order: list[str], method: str) -> None:
    """Write results.json, RESULTS.md, DETAILS.md and the charts.

    Stored workloads that were not run this time are kept, also those of other machines or
    versions: contenders are compared within a run only, and DETAILS.md lists the runs.

    Args:
        directory: Directory of the files.
        results: Results of this run.
        order: Names of all workloads, in the order of the pages.
        method: Description of the rounds: a sentence or more, then list items.
    """
    path = directory / "results.json"
    Results.merged(path, results, order, method).save(path)
    render(directory)


def render(directory: Path) -> None:
    """Write the pages and charts from results.json and the stored curves."""
    stored = Results.load(directory / "results.json")
    (directory / "charts").mkdir(exist_ok=True)
    pictures = charts(directory)
    for old in (directory / "charts").glob("*.svg"):
        if old.stem not in pictures:
            old.unlink()
    for name, picture in pictures.items():
        (directory / "charts" / f"{name}.svg").write_text(picture)
    (directory / "RESULTS.md").write_text(_page(directory, stored, pictures).rstrip() + "\n")
    (directory / "DETAILS.md").write_text(_details(stored).rstrip() + "\n")


def charts(directory: Path) -> dict[str, str]:
    """Return the charts as SVG text by name: the overview and each area.

    The chart of the dispatcher's scale has curves instead of ratios.
    """
    by_name = {r.workload: r for r in Results.load(directory / "results.json").results}
    groups = {
        "overview": [_overview_group(area, by_name) for area in AREAS],
        **{area.name: _groups(_results_of(area, by_name)) for area in AREAS},
    }
    shown = {name: [group for group in each if group.bars] for name, each in groups.items()}
    drawn = {
        name: ratio_chart(each, _CAPTION + _LIMITS * _has_limits(each))
        for name, each in shown.items()
        if sum(len(group.bars) for group in each) > 1
    }
    paths = {name: directory / "curves" / f"{name}.json" for name in _CURVES}
    if all(path.exists() for path in paths.values()):
        drawn["scale"] = curve_chart(
            [_curve(path, _CURVES[name]) for name, path in paths.items()],
            "Horizontal: number of workers, and the same number of clients.",
        )
    return drawn


def _has_limits(groups: list[Group]) -> bool:
    return any(bar.is_limit for group in groups for bar in group.bars)


def _overview_group(area: Area, by_name: dict[str, Result]) -> Group:
    bars: list[Bar] = []
    for result in (by_name[name] for name in area.headlines if name in by_name):
        for comparison in fastest_alternatives(result)[:1]:
            other = contender_title(comparison.theirs.contender) if comparison.theirs else ""
            bars += comparison.bars(title(result.workload), f"compared with {other}")
    return Group(heading=area.title, bars=bars)


def _groups(results: list[Result]) -> list[Group]:
    """Return a bar for each workload with one comparison, and a group for each with several."""
    groups: list[Group] = []
    single: list[Bar] = []
    for result in results:
        name, compared = title(result.workload), to_each_alternative(result)
        if len(compared) > 1:
            bars = [bar for each in compared for bar in each.bars(variant_label(each, result))]
            groups += [Group(heading="", bars=single), Group(heading=name, bars=bars)]
            single = []
        for each in compared[:1] * (len(compared) == 1):
            single += each.bars(name, f"compared with {variant_label(each, result)}")
    return [*groups, Group(heading="", bars=single)]


def _curve(path: Path, heading: str) -> Curve:
    stored = json.loads(path.read_text())
    values = {int(count): rounds for count, rounds in stored["rounds"].items()}
    return Curve(title=heading, unit=stored["unit"], values=values)


def _results_of(area: Area, by_name: dict[str, Result]) -> list[Result]:
    modules = [importlib.import_module(f"benchmarks.{name}") for name in area.benchmarks]
    names = [workload.name for module in modules for workload in module.WORKLOADS]
    return [by_name[name] for name in names if name in by_name]


def results_table(results: Iterable[Result], *, show_targets: bool = False) -> str:
    """Return a table, a warning about ratios above a limit, and on request a line on targets."""
    results = list(results)
    wrong = [result.workload for result in results if exceeds_limit(result)]
    targets = {text: met for result in results for text, met in result.targets.items()}
    lines = [_comparison_table(results)]
    if wrong:
        lines.append(f"Faster than an upper limit, so the figures are wrong: {'; '.join(wrong)}.")
    if targets and show_targets:
        missed = [text for text, is_met in targets.items() if not is_met]
        line = f"Targets of development met: {len(targets) - len(missed)} of {len(targets)}."
        lines.append(line + (f" Not met, or unknown: {'; '.join(missed)}." if missed else ""))
    return "\n\n".join(lines)


def _comparison_table(results: Iterable[Result]) -> str:
    header = ["workload", "Headrace", "compared with", "its result", "ratio", "range over rounds"]
    rows = [
        _comparison_row(result, comparison)
        for result in results
        for comparison in fastest_alternatives(result)
    ]
    return _table([header, *rows])


def _comparison_row(result: Result, comparison: Comparison) -> list[str]:
    theirs = comparison.theirs
    name = title(result.workload)
    variant = variant_of(comparison)
    if theirs is None:
        is_cost = lower_is_better(result.unit, self_timed=result.self_timed)
        other = f"– ({'lower' if is_cost else 'higher'} is better)"
    else:
        other = contender_title(theirs.contender) + " (upper limit)" * (theirs.role == "limit")
    return [
        f"{name} ({variant})" if variant else name,
        measured_text(comparison.ours, result),
        other,
        "–" if theirs is None else measured_text(theirs, result),
        median_text(comparison),
        range_text(comparison),
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _page(directory: Path, stored: Results, pictures: dict[str, str]) -> str:
    by_name = {result.workload: result for result in stored.results}
    sections = [
        "# Benchmarks",
        _paragraph(
            "Headrace compared with tf.data, tf.data service, tf.distribute, Grain, PyTorch and "
            "others, on workloads that each of them supports. Each is used as its documentation "
            "recommends, and its results are checked before it is timed."
        ),
        *_picture("overview", "Ratio of rates by area", pictures),
        "## How to read",
        _paragraph(
            "Charts and tables show ratios: 2x means that Headrace delivers twice as many items "
            "per second, or needs half the time, and 0.5x the reverse.\n"
            "* **Ratio**: contenders take turns in rounds of about a second; the ratio is the "
            "median of the ratios of the rounds. It can differ a little from the ratio of the two "
            "results in the row, which are medians over the rounds.\n"
            "* **Range over rounds**: the lowest and the highest ratio of a round. If the range is "
            "wide, other work on the machine disturbed some rounds. If it includes 1x, the "
            "measurement does not show which of the two is faster.\n"
            "* **Compared with**: the fastest of the alternatives, which may be Headrace with "
            "another setting. The charts show up to three. An *upper limit* is a loop of the "
            "machine's own operations, which no library can exceed.\n"
            "* [DETAILS.md](DETAILS.md) has every contender with the time to the first element and "
            "processor time per item, and [results.json](results.json) has every round."
        ),
        "## How to repeat",
        _paragraph(
            "`make bench` creates an environment with all contenders, measures, and writes this "
            "page. `python -m benchmarks jpeg` measures one benchmark, `--list` lists them, and "
            "`python -m benchmarks.report` writes pages and charts without measuring. The "
            "docstring of each benchmark describes its workloads."
        ),
        "## Machine",
        _paragraph(_machine_text(stored)),
        *(section for area in AREAS for section in _area(area, by_name, pictures)),
        *_dispatcher_curves(directory),
    ]
    return "\n\n".join(sections)


def _picture(name: str, text: str, pictures: dict[str, str]) -> list[str]:
    return [f"![{text}](charts/{name}.svg)"] if name in pictures else []


def _area(area: Area, by_name: dict[str, Result], pictures: dict[str, str]) -> list[str]:
    results = _results_of(area, by_name)
    if not results:
        return []
    return [
        f"## {area.title}",
        _paragraph(area.summary),
        *_picture(area.name, f"Chart: {area.title}", pictures),
        _comparison_table(results),
    ]


def _dispatcher_curves(directory: Path) -> list[str]:
    """Return the subsection of the stored curves: a table of each kind, with a row per curve."""
    paths = sorted(directory.glob("curves/*.json"))
    simulated = [path for path in paths if path.stem.startswith("scale_")]
    sockets = [path for path in paths if path not in simulated]
    tables = [
        ("with simulated peers, over sockets", sockets, (1, 10, 100, 1000)),
        ("in virtual time, without sockets", simulated, (100, 1000, 3000, 10_000)),
    ]
    shown = [_curve_table(*table) for table in tables if table[1]]
    if not shown:
        return []
    text = _paragraph(
        "`python -m benchmarks.dispatcher_curves` measures over sockets. `python -m "
        "benchmarks.dispatcher_scale` measures up to 10,000 workers and 10,000 clients in virtual "
        "time and without sockets, so a real dispatcher reaches its limits earlier; "
        "[design 0034](../docs/design/0034-scale.md) discusses these curves."
    )
    return ["### 1 to 10,000 workers and clients", text, *shown]


def _curve_table(heading: str, paths: list[Path], counts: tuple[int, ...]) -> str:
    rows = [[heading, "unit", *(f"{count:,} of each" for count in counts)]]
    for path in paths:
        curve = json.loads(path.read_text())
        medians = {int(count): statistics.median(v) for count, v in curve["rounds"].items()}
        values = [_plain_number(medians[count]) if count in medians else "–" for count in counts]
        rows.append([f"[{curve['title']}](curves/{path.name})", curve["unit"], *values])
    return _table(rows)


def _plain_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _machine_text(stored: Results) -> str:
    properties = dict(_most_common_machine(stored.results))
    dates = sorted({result.date for result in stored.results})
    period = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "never"
    text = (
        f"Measured {period} on {properties.pop('cores', '?')} cores ({properties.pop('cpu', '?')}, "
        f"{properties.pop('memory', '?')}), {properties.pop('system', '?')}, "
        f"Python {properties.pop('python', '?')}"
    )
    versions = "".join(f", {name} {version}" for name, version in properties.items())
    return (
        f"{text}{versions}. All processes of a workload run on this machine. "
        f"A round trip between two threads takes {stored.thread_round_trip_us} µs. "
        "[DETAILS.md](DETAILS.md#runs) lists runs and their differences."
    )


def _most_common_machine(results: list[Result]) -> dict[str, str]:
    """Return the machine of most results."""
    machines = [result.machine for result in results]
    return max(machines, key=machines.count, default=machine())


def _details(stored: Results) -> str:
    """Return DETAILS.md."""
    by_name = {result.workload: result for result in stored.results}
    sections = [
        "# Details of the benchmarks",
        _paragraph(
            "Every contender of the workloads of [RESULTS.md](RESULTS.md). Rates are medians. "
            "*First element* is the time from opening an iterator over a warm pipeline to its "
            "first element. *CPU per item* is the user and system time of all threads and "
            "processes, divided by the number of items; it depends less on other load than rates "
            "do. *Ratio* is the rate of Headrace divided by that of the contender, for each "
            "variant of Headrace. A contender in italics is an upper limit. `python -m benchmarks "
            "--list` shows which benchmark has a workload."
        ),
    ]
    for area in AREAS:
        results = _results_of(area, by_name)
        sections += [f"## {area.title}"] * bool(results)
        for result in results:
            name = f"Workload: `{result.workload}`"
            sections += [f"### {title(result.workload)}", name, _contender_table(result)]
    sections += ["## Method", _paragraph(stored.method)]
    sections += ["## Runs", _paragraph(_runs_text(stored.results))]
    return "\n\n".join(sections)


def _contender_table(result: Result) -> str:
    variants = [m for m in result.measurements if m.role == "headrace"]
    rows = [["contender", "rate", "first element", "CPU per item", "ratio"]]
    for measured in result.measurements:
        ratios = [median_text(compare(ours, measured)) for ours in variants]
        name = contender_title(measured.contender)
        rows.append(
            [
                f"*{name}*" if measured.role == "limit" else name,
                measured_text(measured, result),
                "–" if measured.first is None or result.self_timed else duration(measured.first),
                "–" if measured.cpu is None else cost(measured.cpu),
                "–" if measured.role == "headrace" else " / ".join(ratios),
            ]
        )
    return _table(rows)


def _runs_text(results: list[Result]) -> str:
    """Return a list of the runs: date, code, differences from the usual machine, workloads."""
    usual = _most_common_machine(results)
    runs: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        differences = [each for each in result.machine.items() if each not in usual.items()]
        text = "".join(f", {name} {value}" for name, value in differences)
        runs.setdefault((result.date, result.code or "unknown", text), []).append(result.workload)
    lines = [
        f"* {date}, code `{code}`{machine_text}: {'; '.join(runs[date, code, machine_text])}."
        for date, code, machine_text in sorted(runs)
    ]
    return "\n".join(
        [
            'The code is that of `git rev-parse --short=10 HEAD:src/headrace`; "+" means changes.',
            *lines,
        ]
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
    return "\n".join([first, *([""] if items else []), *items])


if __name__ == "__main__":
    render(Path(__file__).parent)
