"""Statistics of an iterator as data and as a table, and the step that limits its speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.execution.bottleneck import WAITING_SHARE, Bottleneck
from headrace.execution.statistics import Measurements, StepMeasurements
from headrace.execution.step_registry import Activity, name_step
from headrace.plan.buffering import Prefetch
from headrace.plan.elements import FromSource, GatherIndices, ReadIndices
from headrace.plan.node import AUTOTUNE, Node

__all__ = ["IteratorStats", "StepStats", "summarize"]

_MIN_SECONDS = 0.1
"""Minimum seconds of measurements for a bottleneck."""
_MIN_SHOWN_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Statistics of one step."""

    name: str
    """Kind of the step, such as "map"; indented steps are inputs."""
    location: str
    """File and line of the user's call, such as "train.py:5"; empty if unknown."""
    function: str
    """Name of the user's function; empty for lambdas and steps without one."""
    depth: int
    """Number of steps between it and the end of the plan."""
    is_nested: bool
    """Whether it belongs to the datasets that a function returned."""
    elements: int
    """Elements that it returned."""
    bytes: int | None
    """Their approximate size; None if unknown."""
    user_seconds: float
    """Seconds in functions of the user, summed over threads."""
    own_seconds: float
    """Seconds in the step itself, including its reads of files, summed over threads."""
    input_wait_seconds: float
    """Seconds that its threads waited for input, or for the workers of a data service."""
    consumer_wait_seconds: float
    """Seconds that its threads waited until its consumer took elements: its buffer was full."""
    num_parallel_calls: int | None
    """Number of threads that call its function; None for steps without such threads."""


@dataclass(frozen=True, kw_only=True)
class IteratorStats:
    """Statistics of an iterator, from its first read on.

    Times are samples, a hundred per second; a step of a plan with several threads may have more
    seconds than the iterator.

    >>> import headrace as hr
    >>> iterator = hr.Dataset.range(6).map(lambda x: x + 1).iterate(stats=True)
    >>> _ = list(iterator)
    >>> [(step.name, step.elements) for step in iterator.stats().steps]
    [('map', 6), ('gather', 6), ('indices', 6)]
    """

    steps: tuple[StepStats, ...]
    """Steps of the plan as executed, last step first; then those of nested datasets."""
    seconds: float
    """Seconds from the first read to the last one, or until now."""
    consumer_seconds: float
    """Seconds that the reading program spent outside of the iterator."""
    bottleneck: Bottleneck | None
    """What limits the speed; None if it was measured too briefly."""

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as a JSON value."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        header = ("step", "elements", "bytes", "user code", "own code", "input wait", "full buffer")
        rows = [header, *(_format_step(step) for step in self.steps)]
        outside = self.consumer_seconds / self.seconds if self.seconds else 0.0
        lines = [
            *_format_table(rows),
            f"{self.seconds:.2f} s, of which the reading program took {outside:.0%}",
            str(self.bottleneck or "measured too briefly to find the bottleneck"),
        ]
        return "\n".join(lines)


def summarize(measured: Measurements) -> IteratorStats:
    """Return the statistics of measurements."""
    steps = [_summarize_step(step) for step in measured.steps]
    num_plan_steps = sum([not step.is_nested for step in steps])
    return IteratorStats(
        steps=(*steps[:num_plan_steps][::-1], *steps[num_plan_steps:]),
        seconds=round(measured.seconds, 3),
        consumer_seconds=round(measured.consumer_seconds, 3),
        bottleneck=_find_bottleneck(measured),
    )


def _summarize_step(step: StepMeasurements) -> StepStats:
    node, seconds = step.node, step.seconds
    return StepStats(
        name=node.kind or type(node).__name__,
        location=node.location,
        function=_function_name(node),
        depth=step.depth or 0,
        is_nested=step.depth is None,
        elements=step.elements,
        bytes=step.bytes or None,
        user_seconds=round(seconds[Activity.USER_CODE], 3),
        own_seconds=round(seconds[Activity.OWN_CODE], 3),
        input_wait_seconds=round(seconds[Activity.INPUT_WAIT], 3),
        consumer_wait_seconds=round(seconds[Activity.CONSUMER_WAIT], 3),
        num_parallel_calls=step.threads,
    )


def _function_name(node: Node) -> str:
    """Return the name of a step's function, which tells steps on one line of a program apart."""
    function = getattr(node, "fn", None) or getattr(node, "predicate", None)
    name: str = getattr(function, "__name__", "")
    return "" if name == "<lambda>" else name


def _in_parentheses(name: str) -> str:
    return f" ({name})" if name else ""


# --- The bottleneck -------------------------------------------------------------------------------
#
# The reading program is the bottleneck if it seldom waits. Otherwise it is the step that keeps one
# thread busiest, where the threads of a parallel map count as one with their mean.


def _find_bottleneck(measured: Measurements) -> Bottleneck | None:
    seconds = measured.seconds
    if seconds < _MIN_SECONDS:
        return None
    outside = measured.consumer_seconds / seconds
    if outside > 1.0 - WAITING_SHARE:
        return Bottleneck(
            "the reading program",
            f"it takes {outside:.0%} of the time, so a faster dataset would gain little",
        )
    step, share = _busiest_step(measured.steps, seconds)
    source = max(measured.steps, key=_service_wait)
    waiting = _service_wait(source) / seconds
    if waiting > max(share, WAITING_SHARE):
        return Bottleneck(
            f"the data service, {name_step(source.node)}",
            f"{waiting:.0%} of the time it waits for workers; see `headrace top`",
        )
    if step is None or share < WAITING_SHARE:
        return Bottleneck("waits", "no step is busy; see the columns of waits")
    name = name_step(step.node) + _in_parentheses(_function_name(step.node))
    overlaps = any(isinstance(each.node, Prefetch) for each in measured.steps)
    advice = [f"{share:.0%} of the time", _advise(step)]
    if outside >= WAITING_SHARE and not overlaps:
        advice.append("to compute elements while the program uses others, end with prefetch()")
    return Bottleneck(name, "; ".join(filter(None, advice)))


def _service_wait(step: StepMeasurements) -> float:
    """Return the seconds that a step waited for a data service: it has no other input."""
    return 0.0 if step.node.inputs else step.seconds[Activity.INPUT_WAIT]


def _busiest_step(
    steps: Sequence[StepMeasurements], seconds: float
) -> tuple[StepMeasurements | None, float]:
    """Return the step that works most on the busiest thread, and its share of the time."""
    by_thread: dict[int, float] = {}
    for step in steps:
        if step.threads is None:
            for thread, busy in step.work_by_thread.items():
                by_thread[thread] = by_thread.get(thread, 0.0) + busy
    found: tuple[StepMeasurements | None, float] = None, 0.0
    best = (0.0, 0.0)
    for step in steps:
        busy_by_thread = step.work_by_thread
        if not busy_by_thread:
            continue
        if step.threads is not None:
            share = sum(busy_by_thread.values()) / step.threads / seconds
            rank = share, share
        else:
            thread = max(busy_by_thread, key=busy_by_thread.__getitem__)
            share = busy_by_thread[thread] / seconds
            rank = by_thread[thread] / seconds, share
        if rank > best:
            best, found = rank, (step, share)
    return found


def _advise(step: StepMeasurements) -> str:
    node = step.node
    if hasattr(node, "num_parallel_calls"):
        calls = node.num_parallel_calls
        if calls is None:
            return (
                "more threads: num_parallel_calls=hr.AUTOTUNE, or more processes if its function "
                "holds the interpreter lock: in_processes(n), or hr.service.distribute"
            )
        if calls != AUTOTUNE:
            return f"more threads than num_parallel_calls={calls}: hr.AUTOTUNE"
        return "more processes: in_processes(n), or hr.service.distribute"
    if isinstance(node, FromSource | ReadIndices | GatherIndices):
        return "read several files at once: interleave(..., num_parallel_calls=hr.AUTOTUNE)"
    return ""


# --- The table ------------------------------------------------------------------------------------


def _format_step(step: StepStats) -> tuple[str, ...]:
    place = f" at {step.location}" if step.location else ""
    threads = f", {step.num_parallel_calls} threads" if step.num_parallel_calls else ""
    indent = "nested: " if step.is_nested else "  " * min(step.depth, 20)
    return (
        f"{indent}{step.name}{place}{_in_parentheses(step.function)}{threads}",
        f"{step.elements:,}",
        "" if step.bytes is None else _format_bytes(step.bytes),
        _format_seconds(step.user_seconds),
        _format_seconds(step.own_seconds),
        _format_seconds(step.input_wait_seconds),
        _format_seconds(step.consumer_wait_seconds),
    )


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= _MIN_SHOWN_SHARE else ""


def _format_bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _format_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
