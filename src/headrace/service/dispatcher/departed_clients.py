"""Deciders that recover elements that were sent to departed clients.

If a client leaves, the replies to heartbeats ask each worker with a task of its iteration what that
client was sent and had not acknowledged. Splits that were sent only to that client are assigned
again, except those that it reported as consumed before it left; the others are reported as missing.
Without exactly-once delivery the worker also reports what was acknowledged: if it is lost, the
departed client can no longer report it.
"""

from __future__ import annotations

from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.assignment import derive_events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.splits import validate_partial_splits, validate_splits
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, JobIteration
from headrace.service.dispatcher.tasks import get_worker_task
from headrace.service.element_sets import ALL_ORDINALS, exclude_splits
from headrace.service.ranges import Ranges, drop_below, intersect, subtract, union

__all__ = ["departed_clients_of", "finish_event", "report_departed_client"]

_MAX_PAIRS = 1000


def departed_clients_of(state: DispatcherState, worker_id: str) -> tuple[tuple[int, str], ...]:
    """Return (task, departed client) pairs that a worker must still report on."""
    worker = state.workers[worker_id]
    pairs = (
        (task_id, client_id)
        for task_id in sorted(worker.tasks | worker.finished_tasks)
        for client_id in state.tasks[task_id].unconfirmed_clients
    )
    return tuple(pair for pair, _ in zip(pairs, range(_MAX_PAIRS), strict=False))


def report_departed_client(
    state: DispatcherState, request: messages.ReportDepartedClient, context: DecisionContext
) -> DispatcherDecision:
    """Take back what a departed client had not acknowledged and no other client received.

    Raises:
        ValueError: If the splits were not assigned to the task.
    """
    task = get_worker_task(state, request)
    assigned = task.assigned
    unacknowledged = _still_held(task, request.unacknowledged)
    lost = _still_held(task, request.possibly_lost)
    if request.client_id not in task.unconfirmed_clients:
        return DispatcherDecision()
    if state.iterations[task.iteration_id].pool.exactly_once:
        return _report_exactly_once(
            state.iterations[task.iteration_id], task, request, unacknowledged
        )
    delivery_report = _new_delivery_report(task, request)
    returned = subtract(unacknowledged, assigned.partially_delivered)
    lost = subtract(
        union((*lost, *intersect(unacknowledged, assigned.partially_delivered))), assigned.delivered
    )
    if state.iterations[task.iteration_id].finished:
        returned, lost = (), union((*returned, *lost))
    lost = subtract(lost, returned)
    report = events.DepartedClientReported(
        task_id=task.task_id, client_id=request.client_id, returned=returned, lost=lost
    )
    return DispatcherDecision(events=(*delivery_report, report))


def _new_delivery_report(
    task: DispatcherTask, request: messages.ReportDepartedClient
) -> tuple[events.DeliveryReported, ...]:
    """Return the acknowledged splits in a report that were not known before."""
    received, partially_received = (
        _still_held(task, request.delivered),
        _still_held(task, request.partially_delivered),
    )
    if not (
        subtract(received, task.assigned.delivered)
        or subtract(partially_received, task.assigned.partially_delivered)
    ):
        return ()
    return (
        events.DeliveryReported(
            task_id=task.task_id,
            client_id="",
            delivered=received,
            partially_delivered=partially_received,
        ),
    )


def _report_exactly_once(
    iteration: JobIteration,
    task: DispatcherTask,
    request: messages.ReportDepartedClient,
    unacknowledged: Ranges,
) -> DispatcherDecision:
    """Take back, by ordinals, what a departed client had not acknowledged."""
    assigned = task.assigned
    returned = () if iteration.finished else subtract(unacknowledged, assigned.delivered)
    handled = union((*assigned.delivered, *assigned.returned, *returned))
    consumed = dict(
        exclude_splits(validate_partial_splits(task, request.partially_acknowledged), handled)
    )
    partially_returned = []
    for split, ordinals in exclude_splits(
        validate_partial_splits(task, request.partially_unacknowledged), handled
    ):
        remaining = subtract(
            assigned.remaining_ordinals.get(split, ALL_ORDINALS), consumed.get(split, ())
        )
        if ordinals := intersect(ordinals, remaining):
            partially_returned.append((split, ordinals))
    report = events.DepartedClientReported(
        task_id=task.task_id,
        client_id=request.client_id,
        returned=returned,
        lost=(),
        partially_returned=() if iteration.finished else tuple(partially_returned),
        partially_consumed=tuple(consumed.items()),
    )
    return DispatcherDecision(events=(report,))


def _still_held(task: DispatcherTask, splits: Ranges) -> Ranges:
    """Return the given splits that the task still holds, in assignment order."""
    return subtract(
        drop_below(validate_splits(task, splits), task.assigned.num_done), task.assigned.returned
    )


def finish_event(
    state: DispatcherState, iteration: JobIteration, context: DecisionContext
) -> events.IterationFinished | None:
    """Return the end of an iteration that waited for a client's heartbeat, if it is due."""
    if iteration.finished or iteration.num_active_tasks or iteration.num_draining_tasks:
        return None
    derived = derive_events(state, iteration.iteration_id, context.is_unheard)
    return next((event for event in derived if isinstance(event, events.IterationFinished)), None)
