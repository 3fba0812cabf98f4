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
        splits, partial_splits = task.assigned.unacknowledged.get(event.client_id, ((), ()))
        ordinals_by_split = dict(partial_splits)
        for split, ordinals in event.partial_splits:
            ordinals_by_split[split] = union((*ordinals_by_split.get(split, ()), *ordinals))
        _set_unacknowledged(
            task,
            event.client_id,
            union((*splits, *event.splits)),
            tuple(sorted(ordinals_by_split.items())),
        )
    _remove_delivered(task, event.splits, event.partial_splits)


def elements_consumed(state: DispatcherState, event: events.ElementsConsumed) -> None:
    """Record which elements a client consumed; the others that it received are unchanged."""
    task = clear_awaited_report(state, event.task_id, event.client_id)
    if task.is_unavailable:
        splits, partial_splits = task.assigned.unacknowledged.get(event.client_id, ((), ()))
        consumed = dict(event.partial_splits)
        partially_consumed = tuple((split, split + 1) for split in consumed)
        partial_splits += tuple(
            (split, ALL_ORDINALS) for split in consumed if contains(split, splits)
        )
        splits = subtract(subtract(splits, event.splits), partially_consumed)
        remaining = (
            (split, subtract(ordinals, consumed.get(split, ())))
            for split, ordinals in exclude_splits(partial_splits, event.splits)
        )
        _set_unacknowledged(
            task,
            event.client_id,
            splits,
            tuple((split, ordinals) for split, ordinals in remaining if ordinals),
        )
    _remove_delivered(task, event.splits, event.partial_splits)


def clear_awaited_report(state: DispatcherState, task_id: int, client_id: str) -> DispatcherTask:
    """Stop waiting for a client's report about a task; return the task."""
    task = state.tasks[task_id]
    task.awaiting_reports.discard(client_id)
    state.iterations[task.iteration_id].version += 1
    return task


def _set_unacknowledged(
    task: DispatcherTask, client_id: str, splits: Ranges, partial_splits: PartialSplits
) -> None:
    """Replace the record of what a client has received and not consumed."""
    task.assigned.unacknowledged.pop(client_id, None)
    if splits or partial_splits:
        task.assigned.unacknowledged[client_id] = splits, partial_splits


def _remove_delivered(task: DispatcherTask, splits: Ranges, partial_splits: PartialSplits) -> None:
    """Remove delivered elements from those that a task must deliver."""
    mark_delivered(task, splits)
    mark_partially_delivered(task, splits)
    for split, ordinals in partial_splits:
        if is_held(task, split):
            mark_partially_delivered(task, ((split, split + 1),))
            remove_ordinals(task, split, ordinals)
