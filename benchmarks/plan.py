"""The plan of a run: which workloads to measure, in which order, and about how long they take."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

from benchmarks.areas import AREAS, Area
from benchmarks.measure import LONG_ROUNDS, Effort
from benchmarks.workload import Contender, Workload

__all__ = ["BENCHMARKS", "Task", "all_workloads", "choose", "load", "method"]

BENCHMARKS = tuple(name for area in AREAS for name in area.benchmarks)

#: Seconds to start and stop a contender's process, by the slowest framework that it needs: mostly
#: imports and the check of elements. Chosen so that plans match runs on two idle cores.
_START_SECONDS = {"tensorflow": 15.0, "torch": 15.0, "grain": 12.0, "jax": 9.0}
_OTHER_START_SECONDS = 6.0

#: Seconds of a round that are neither warm-up nor timed: opening, the first element, closing.
_ROUND_OVERHEAD_SECONDS = 0.5


#: Workloads of an area in a quick run.
_QUICK_WORKLOADS = 3


@dataclass(frozen=True, kw_only=True)
class Task:
    """A workload to measure, with its benchmark and area."""

    area: Area
    benchmark: str
    workload: Workload

    def seconds(self, effort: Effort, cores: int = 2) -> float:
        """Return the planned duration: starts, which use all cores, and rounds, one by one."""
        sessions = effort.repeats if self.workload.repeated else 1
        contenders = self.workload.contenders
        starts = sum(_start_seconds(contender) for contender in contenders)
        length = LONG_ROUNDS if self.workload.long_rounds else 1
        element = self.workload.element_seconds
        starts += 2 * element * len(contenders)  # its check, and an untimed round
        a_round = max((effort.ramp + effort.seconds) * length, element) + _ROUND_OVERHEAD_SECONDS
        in_parallel = max(1, min(cores, len(contenders))) if self.workload.in_turns else 1
        return sessions * (starts / in_parallel + effort.rounds * a_round * len(contenders))


def _start_seconds(contender: Contender) -> float:
    return max((_START_SECONDS.get(m, 0.0) for m in contender.needs), default=0.0) or (
        _OTHER_START_SECONDS
    )


def load(benchmark: str) -> ModuleType:
    """Import the module of a benchmark."""
    return importlib.import_module(f"benchmarks.{benchmark}")


def choose(names: Sequence[str] = (), *, headlines_only: bool = False) -> list[Task]:
    """Return the tasks of the named areas and benchmarks, or all, in the order of `AREAS`.

    Args:
        names: Names of areas and of benchmarks; empty for all.
        headlines_only: Whether to keep of each area only the first three workloads of the overview
            chart (one if the chart has none). Benchmarks that are named themselves keep all.

    Raises:
        ValueError: If there is no area or benchmark of a name.
    """
    areas = {area.name for area in AREAS}
    for name in names:
        if name not in areas and name not in BENCHMARKS:
            raise ValueError(_unknown(name, [*areas, *BENCHMARKS]))
    tasks = []
    for area in AREAS:
        whole = not names or area.name in names
        found = [
            Task(area=area, benchmark=benchmark, workload=workload)
            for benchmark in area.benchmarks
            if whole or benchmark in names
            for workload in load(benchmark).WORKLOADS
        ]
        if headlines_only:
            first = tuple(task.workload.name for task in found[:1])
            shown = area.headlines[:_QUICK_WORKLOADS] or first
            found = [t for t in found if t.workload.name in shown or t.benchmark in names]
        tasks += found
    return tasks


def _unknown(name: str, known: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, sorted(known), n=3)
    hint = f"did you mean {' or '.join(similar)}? " if similar else ""
    return f"no benchmark or area is called {name!r}; {hint}--list shows all"


def all_workloads() -> list[Workload]:
    """Return the workloads of all benchmarks, in the order of the page."""
    return [task.workload for task in choose()]


def method(effort: Effort) -> str:
    """Describe the rounds, for the page of results."""
    workloads = all_workloads()
    long = [w.name for w in workloads if w.long_rounds]
    repeated = [w.name for w in workloads if w.repeated]
    one_by_one = [w.name for w in workloads if not w.in_turns]
    return (
        f"{effort.rounds} rounds. In each, the contenders take turns, each in its own process, "
        f"with {effort.ramp:g} s of untimed and {effort.seconds:g} s of timed reading."
        f"\n* Slow elements, {LONG_ROUNDS} times as long: {'; '.join(long)}."
        f"\n* Small differences, {effort.repeats} times, with new processes: {'; '.join(repeated)}."
        f"\n* One contender after the other, not in turns: {'; '.join(one_by_one)}."
    )
