"""Applies facts about what clients have of a task. A part of `apply`, which says how.

How exactly that is known depends on how the iteration is read: in units, in rounds, or in elements
that each come once.
"""

from __future__ import annotations

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.apply_units import give, is_among, is_held, receive, touch
from headrace.service.dispatcher.state import DispatcherState, Task
from headrace.service.ranges import Ranges, at_least, subtracted, united
from headrace.service.rows import EVERYTHING, Parts, outside

__all__ = ["elements_received", "elements_used", "rounds_settled", "task_settled"]


def task_settled(state: DispatcherState, fact: updates.TaskSettled) -> None:
    """Note what a client received of a task."""
    task = _settled(state, fact)
    receive(task, fact.received)
    touch(task, (*fact.received, *fact.touched))


def rounds_settled(state: DispatcherState, fact: updates.RoundsSettled) -> None:
    """Note how many rounds of a task a consumer received; the fewest of all count."""
    task = _settled(state, fact)
    if task.rounds is None or fact.rounds < task.rounds:
        task.rounds = fact.rounds
        task.received = united(at_least(fact.received, task.done))
        task.touched = ()
        touch(task, (*fact.received, *fact.touched))


def elements_received(state: DispatcherState, fact: updates.ElementsReceived) -> None:
    """Note which elements a client has; of a task that is gone, also for the case that it goes."""
    task = _settled(state, fact)
    if task.gone:
        units, parts = task.kept_by.get(fact.client_id, ((), ()))
        has = dict(parts)
        for unit, rows in fact.parts:
            has[unit] = united((*has.get(unit, ()), *rows))
        _keep(task, fact.client_id, united((*units, *fact.units)), tuple(sorted(has.items())))
    _take(task, fact.units, fact.parts)


def elements_used(state: DispatcherState, fact: updates.ElementsUsed) -> None:
    """Note which elements a client used; what else it has it keeps."""
    task = _settled(state, fact)
    if task.gone:
        units, parts = task.kept_by.get(fact.client_id, ((), ()))
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


def _settled(
    state: DispatcherState,
    fact: updates.TaskSettled
    | updates.RoundsSettled
    | updates.ElementsReceived
    | updates.ElementsUsed,
) -> Task:
    """Return the task, for whose client nobody waits any more."""
    task = state.tasks[fact.task_id]
    task.unsettled.discard(fact.client_id)
    state.iterations[task.iteration_id].version += 1
    return task


def _keep(task: Task, client_id: str, units: Ranges, parts: Parts) -> None:
    """Remember what a client has and has not used, in place of what was known of that."""
    task.kept_by.pop(client_id, None)
    if units or parts:
        task.kept_by[client_id] = units, parts


def _take(task: Task, units: Ranges, parts: Parts) -> None:
    """Take note that elements are no longer the task's to give."""
    receive(task, units)
    touch(task, units)
    for unit, rows in parts:
        if is_held(task, unit):
            touch(task, ((unit, unit + 1),))
            give(task, unit, rows)
