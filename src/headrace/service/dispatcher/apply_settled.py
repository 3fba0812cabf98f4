"""Applies facts about what clients have of a task. A part of `apply`, which says how.

How exactly that is known depends on how the iteration is read: in units, or in elements that each
come once; or as its mode says.
"""

from __future__ import annotations

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.apply_units import give, is_among, is_held, receive, touch
from headrace.service.dispatcher.state import DispatcherState, Task
from headrace.service.ranges import Ranges, subtracted, united
from headrace.service.rows import EVERYTHING, Parts, outside

__all__ = ["elements_received", "elements_used", "settled", "task_settled"]


def task_settled(state: DispatcherState, fact: updates.TaskSettled) -> None:
    """Note what a client received of a task."""
    task = settled(state, fact.task_id, fact.client_id)
    receive(task, fact.received)
    touch(task, (*fact.received, *fact.touched))


def elements_received(state: DispatcherState, fact: updates.ElementsReceived) -> None:
    """Note which elements a client has; of a task that is gone, also for the case that it goes."""
    task = settled(state, fact.task_id, fact.client_id)
    if task.gone:
        units, parts = task.splits.kept_by.get(fact.client_id, ((), ()))
        has = dict(parts)
        for unit, rows in fact.parts:
            has[unit] = united((*has.get(unit, ()), *rows))
        _keep(task, fact.client_id, united((*units, *fact.units)), tuple(sorted(has.items())))
    _take(task, fact.units, fact.parts)


def elements_used(state: DispatcherState, fact: updates.ElementsUsed) -> None:
    """Note which elements a client used; what else it has it keeps."""
    task = settled(state, fact.task_id, fact.client_id)
    if task.gone:
        units, parts = task.splits.kept_by.get(fact.client_id, ((), ()))
        said = dict(fact.parts)
        begun = tuple((unit, unit + 1) for unit in said)
        parts += tuple((unit, EVERYTHING) for unit in said if is_among(unit, units))
        units = subtracted(subtracted(units, fact.units), begun)
        left = (
            (unit, subtracted(rows, said.get(unit, ())))
            for unit, rows in outside(parts, fact.units)
        )
        _keep(task, fact.client_id, units, tuple((unit, rows) for unit, rows in left if rows))
    _take(task, fact.units, fact.parts)


def settled(state: DispatcherState, task_id: int, client_id: str) -> Task:
    """Return the task, for whose client nobody waits any more."""
    task = state.tasks[task_id]
    task.unsettled.discard(client_id)
    state.iterations[task.iteration_id].version += 1
    return task


def _keep(task: Task, client_id: str, units: Ranges, parts: Parts) -> None:
    """Remember what a client has and has not used, in place of what was known of that."""
    task.splits.kept_by.pop(client_id, None)
    if units or parts:
        task.splits.kept_by[client_id] = units, parts


def _take(task: Task, units: Ranges, parts: Parts) -> None:
    """Take note that elements are no longer the task's to give."""
    receive(task, units)
    touch(task, units)
    for unit, rows in parts:
        if is_held(task, unit):
            touch(task, ((unit, unit + 1),))
            give(task, unit, rows)
