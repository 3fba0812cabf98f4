"""What an iteration has lost in the end: how much, with whom, and what was seen of it."""

from __future__ import annotations

import msgspec

from headrace.service import messages
from headrace.service.dispatcher.state import Iteration, Missing, Task, TaskPhase
from headrace.service.ranges import (
    Ranges,
    common,
    count,
    located,
    subtracted,
    united,
)

__all__ = ["lost_copies", "lost_units"]

_MOST_NAMED = 20
_MOST_RANGES = 1000
"""Ranges of lost units that are named; how many units are lost is always exact."""


def lost_copies(iteration: Iteration, tasks: list[Task]) -> tuple[messages.LostUnits, ...]:
    """Return the copies that ended early, of a finished iteration with these tasks."""
    forgotten = [_lost(missing, (), is_copy=True) for missing in iteration.missing]
    cut = [_cut(task) for task in tasks if task.cut]
    return (*forgotten, *cut, *(_lost(task, (), is_copy=True) for task in _lost_copies(tasks)))


def lost_units(iteration: Iteration, tasks: list[Task]) -> tuple[messages.LostUnits, ...]:
    """Return the units that are missing of a finished iteration with these tasks."""
    lost = [
        each
        for missing in iteration.missing
        for each in _lost_of(iteration, missing, missing.units)
    ]
    for task in tasks:
        lost += _lost_of(iteration, task, located(task.runs, task.done, task.missing))
    if iteration.missing_before:
        first = iteration.missing[0]
        lost.append(msgspec.structs.replace(_lost(first, ()), count=iteration.missing_before))
    failed = [task for task in tasks if task.phase is TaskPhase.FAILED]
    if failed:
        # What all that could have taken it failed at.
        end = iteration.next if iteration.ended else iteration.positions or 0
        parts = ((unit, unit + 1) for unit in iteration.parts)
        left = (*iteration.returned, *parts, (iteration.next, end))
        lost.append(_lost(failed[-1], united(each for each in left if each[0] < each[1])))
    return tuple(each for each in lost if each.count)


def _lost_copies(tasks: list[Task]) -> list[Task]:
    """Return the copies of the last attempt that ended early."""
    last = max((task.attempt for task in tasks), default=0)
    return [task for task in tasks if task.phase is TaskPhase.LOST and task.attempt == last]


def _cut(task: Task) -> messages.LostUnits:
    return messages.LostUnits(
        worker_address=task.address,
        task_id=task.task_id,
        units=(),
        count=0,
        is_copy=True,
        # Whatever became of the worker since.
        reason="it was asked to leave",
    )


def _lost_of(
    iteration: Iteration, whence: Task | Missing, lost: Ranges
) -> list[messages.LostUnits]:
    given_up = common(lost, iteration.given_up)
    deaths_at = tuple(
        address
        for start, stop in given_up
        for unit in range(start, stop)
        for address in iteration.deaths.get(unit, ())
    )
    return [
        _lost(whence, subtracted(lost, given_up)),
        _lost(whence, given_up, given_up=True, deaths_at=deaths_at[-_MOST_NAMED:]),
    ]


def _lost(
    whence: Task | Missing,
    units: Ranges,
    *,
    given_up: bool = False,
    deaths_at: tuple[str, ...] = (),
    is_copy: bool = False,
) -> messages.LostUnits:
    client_id = whence.client_id if isinstance(whence, Missing) else ""
    return messages.LostUnits(
        worker_address=whence.address,
        task_id=whence.task_id,
        units=units[:_MOST_RANGES],
        count=count(units),
        given_up=given_up,
        deaths_at=deaths_at,
        client_id=client_id,
        is_copy=is_copy,
        reason="" if client_id else whence.reason,
    )
