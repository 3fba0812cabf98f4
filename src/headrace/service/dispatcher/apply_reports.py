"""Functions that apply clients' reports about tasks. Part of `apply`.

Depending on the iteration, reports name splits, elements (exactly-once delivery) or rounds.
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
from headrace.service.element_sets import ALL_ORDINALS, PartialSplits, exclude_splits
from headrace.service.ranges import Ranges, subtract, union

__all__ = ["clear_awaited_report", "delivery_reported", "elements_consumed", "elements_received"]


def delivery_reported(state: DispatcherState, event: events.DeliveryReported) -> None:
    """Record what a client received of a task."""
    task = clear_awaited_report(state, event.task_id, event.client_id)
    mark_delivered(task, event.delivered)
    mark_partially_delivered(task, (*event.delivered, *event.partially_delivered))


def elements_received(state: DispatcherState, event: events.ElementsReceived) -> None:
    """Record which elements a client received.

    For an unavailable task they are remembered, in case the client departs.
    """
    task = clear_awaited_report(state, event.task_id, event.client_id)
    if task.is_unavailable:
        units, parts = task.assigned.unacknowledged.get(event.client_id, ((), ()))
        has = dict(parts)
        for unit, rows in event.partial_splits:
            has[unit] = union((*has.get(unit, ()), *rows))
        _set_unacknowledged(
            task, event.client_id, union((*units, *event.splits)), tuple(sorted(has.items()))
        )
    _remove_delivered(task, event.splits, event.partial_splits)


def elements_consumed(state: DispatcherState, event: events.ElementsConsumed) -> None:
    """Record which elements a client consumed; the others that it received are unchanged."""
    task = clear_awaited_report(state, event.task_id, event.client_id)
    if task.is_unavailable:
        units, parts = task.assigned.unacknowledged.get(event.client_id, ((), ()))
        said = dict(event.partial_splits)
        begun = tuple((unit, unit + 1) for unit in said)
        parts += tuple((unit, ALL_ORDINALS) for unit in said if contains(unit, units))
        units = subtract(subtract(units, event.splits), begun)
        left = (
            (unit, subtract(rows, said.get(unit, ())))
            for unit, rows in exclude_splits(parts, event.splits)
        )
        _set_unacknowledged(
            task, event.client_id, units, tuple((unit, rows) for unit, rows in left if rows)
        )
    _remove_delivered(task, event.splits, event.partial_splits)


def clear_awaited_report(state: DispatcherState, task_id: int, client_id: str) -> DispatcherTask:
    """Stop waiting for a client's report about a task; return the task."""
    task = state.tasks[task_id]
    task.awaiting_reports.discard(client_id)
    state.iterations[task.iteration_id].version += 1
    return task


def _set_unacknowledged(
    task: DispatcherTask, client_id: str, units: Ranges, parts: PartialSplits
) -> None:
    """Replace the record of what a client has received and not consumed."""
    task.assigned.unacknowledged.pop(client_id, None)
    if units or parts:
        task.assigned.unacknowledged[client_id] = units, parts


def _remove_delivered(task: DispatcherTask, units: Ranges, parts: PartialSplits) -> None:
    """Remove delivered elements from those that a task must deliver."""
    mark_delivered(task, units)
    mark_partially_delivered(task, units)
    for unit, rows in parts:
        if is_held(task, unit):
            mark_partially_delivered(task, ((unit, unit + 1),))
            remove_ordinals(task, unit, rows)
