"""Applies facts about what clients have of a task. A part of `apply`, which says how.

How exactly that is known depends on how the iteration is read: in units, or in elements that each
come once; or as its mode says.
"""

from __future__ import annotations

from headrace.service.dispatcher import events
from headrace.service.dispatcher.apply_splits import (
    contains,
    is_held,
    mark_delivered,
    mark_partially_delivered,
    remove_ordinals,
)
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask
from headrace.service.ranges import Ranges, subtracted, united
from headrace.service.rows import EVERYTHING, Parts, outside

__all__ = ["clear_awaited_report", "delivery_reported", "elements_consumed", "elements_received"]


def delivery_reported(state: DispatcherState, event: events.DeliveryReported) -> None:
    """Note what a client received of a task."""
    task = clear_awaited_report(state, event.task_id, event.client_id)
    mark_delivered(task, event.delivered)
    mark_partially_delivered(task, (*event.delivered, *event.partially_delivered))


def elements_received(state: DispatcherState, event: events.ElementsReceived) -> None:
    """Note which elements a client has; of a task that is gone, also for the case that it goes."""
    task = clear_awaited_report(state, event.task_id, event.client_id)
    if task.is_unavailable:
        units, parts = task.assigned.unacknowledged.get(event.client_id, ((), ()))
        has = dict(parts)
        for unit, rows in event.partial_splits:
            has[unit] = united((*has.get(unit, ()), *rows))
        _set_unacknowledged(
            task, event.client_id, united((*units, *event.splits)), tuple(sorted(has.items()))
        )
    _remove_delivered(task, event.splits, event.partial_splits)


def elements_consumed(state: DispatcherState, event: events.ElementsConsumed) -> None:
    """Note which elements a client used; what else it has it keeps."""
    task = clear_awaited_report(state, event.task_id, event.client_id)
    if task.is_unavailable:
        units, parts = task.assigned.unacknowledged.get(event.client_id, ((), ()))
        said = dict(event.partial_splits)
        begun = tuple((unit, unit + 1) for unit in said)
        parts += tuple((unit, EVERYTHING) for unit in said if contains(unit, units))
        units = subtracted(subtracted(units, event.splits), begun)
        left = (
            (unit, subtracted(rows, said.get(unit, ())))
            for unit, rows in outside(parts, event.splits)
        )
        _set_unacknowledged(
            task, event.client_id, units, tuple((unit, rows) for unit, rows in left if rows)
        )
    _remove_delivered(task, event.splits, event.partial_splits)


def clear_awaited_report(state: DispatcherState, task_id: int, client_id: str) -> DispatcherTask:
    """Return the task, for whose client nobody waits any more."""
    task = state.tasks[task_id]
    task.awaiting_reports.discard(client_id)
    state.iterations[task.iteration_id].version += 1
    return task


def _set_unacknowledged(task: DispatcherTask, client_id: str, units: Ranges, parts: Parts) -> None:
    """Remember what a client has and has not used, in place of what was known of that."""
    task.assigned.unacknowledged.pop(client_id, None)
    if units or parts:
        task.assigned.unacknowledged[client_id] = units, parts


def _remove_delivered(task: DispatcherTask, units: Ranges, parts: Parts) -> None:
    """Take note that elements are no longer the task's to give."""
    mark_delivered(task, units)
    mark_partially_delivered(task, units)
    for unit, rows in parts:
        if is_held(task, unit):
            mark_partially_delivered(task, ((unit, unit + 1),))
            remove_ordinals(task, unit, rows)
