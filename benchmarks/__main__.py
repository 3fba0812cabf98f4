"""Command line of the benchmarks; the docstring of the package describes its use."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import what_if
from benchmarks.measure import FULL, QUICK, Effort, measure, usable_cores, write_inputs
from benchmarks.plan import Task, all_workloads, choose, load, method
from benchmarks.progress import Progress, about, summary
from benchmarks.report import results_table, store
from benchmarks.results import Result
from benchmarks.titles import title

__all__ = ["main"]

_INTERRUPTED = 130
"""The exit status of a program that Ctrl-C ends, 128 plus the number of the signal."""


def main(arguments: list[str]) -> int:
    """Run the chosen benchmarks; return 1 if a contender failed, 130 after Ctrl-C, else 0."""
    if arguments[:1] == [what_if.__name__.rpartition(".")[2]]:  # measures predictions, not peers
        return what_if.main(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        tasks = choose(options.name, headlines_only=options.quick)
    except ValueError as error:
        parser.error(str(error))
    effort = QUICK if options.quick else FULL
    if options.list:
        print(listing(tasks, effort))
        return 0
    return _run(tasks, effort, store_results=not options.quick, show_targets=options.targets)


def _run(tasks: list[Task], effort: Effort, *, store_results: bool, show_targets: bool) -> int:
    print(_plan(tasks, effort), file=sys.stderr)
    planned = [task.seconds(effort, usable_cores()) for task in tasks]
    progress = Progress(planned)
    order, method_text = [workload.name for workload in all_workloads()], method(effort)
    results: list[Result] = []
    status = 0
    try:
        with _acknowledged_interrupt():
            for benchmark, group in groupby(tasks, key=lambda task: task.benchmark):
                with tempfile.TemporaryDirectory() as inputs:
                    if hasattr(load(benchmark), "write_inputs"):
                        progress.activity(f"writing the inputs of {benchmark}")
                        write_inputs(benchmark, Path(inputs))
                    for task in group:
                        workload = task.workload
                        progress.start(task.area.title, title(workload.name))
                        measured = measure(
                            benchmark, workload, effort, Path(inputs), progress.activity
                        )
                        results.append(Result.of(workload, measured))
                        progress.finish(summary(results[-1]))
                        if any((m.problem or "").startswith("failed") for m in measured):
                            status = 1
                        # After each workload, so that an interrupted run keeps its results.
                        if store_results:
                            store(Path(__file__).parent, results, order, method_text)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    progress.close()
    if results:
        print(results_table(results, show_targets=show_targets))
    if status == _INTERRUPTED:
        kept = "; --quick stores no results"
        if store_results:
            kept = "; their results are stored" if results else ""
        print(f"interrupted: {len(results)} of {len(tasks)} workloads finished{kept}")
    return status


@contextmanager
def _acknowledged_interrupt() -> Iterator[None]:
    """Make the first Ctrl-C print a line at once, and ignore others while contenders stop."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler:  # ignored, as in a background job of a shell
        yield
        return

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(2, b"\nstopping ...\n")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _plan(tasks: list[Task], effort: Effort) -> str:
    planned = about(sum(task.seconds(effort) for task in tasks))
    return f"{len(tasks)} workload{'s' * (len(tasks) != 1)}, {planned} on two idle cores"


def listing(tasks: list[Task], effort: Effort) -> str:
    """List areas, their benchmarks, workloads and contenders, with planned durations."""
    lines = [_plan(tasks, effort)]
    for area, in_area in groupby(tasks, key=lambda task: task.area):
        chosen = list(in_area)
        took = about(sum(task.seconds(effort) for task in chosen))
        lines += ["", f"{area.name}: {area.title} ({took})"]
        for benchmark, group in groupby(chosen, key=lambda task: task.benchmark):
            lines.append(f"  {benchmark}: {(load(benchmark).__doc__ or '').splitlines()[0]}")
            for task in group:
                names = " / ".join(contender.name for contender in task.workload.contenders)
                lines.append(f"    {task.workload.name}: {names}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare Headrace with other libraries; write RESULTS.md and results.json.",
    )
    parser.add_argument(
        "name", nargs="*", help="an area, a benchmark, or what_if; by default all areas"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run short rounds of up to three workloads per area, or of the named benchmarks; "
        "write nothing",
    )
    parser.add_argument(
        "--targets", action="store_true", help="say which targets of development are missed"
    )
    parser.add_argument("--list", action="store_true", help="list what would run, and exit")
    return parser


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more
        status = 1
    sys.exit(status)
