"""Deciders: what becomes of elements that were sent to clients which are gone.

A worker that had a task while a client left is asked, in the reply to its heartbeats, what that
client was sent and had not acknowledged. Units that went to it alone are dealt again, except for
those that it said it used, before it left; the others are missing, and said to be. At most once the
worker also says what was acknowledged: should it be lost, a client that is gone cannot say it.
"""

from __future__ import annotations

from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.assignment import derive_events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.splits import validate_partial_splits, validate_splits
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, JobIteration
from headrace.service.dispatcher.tasks import get_worker_task
from headrace.service.ranges import Ranges, at_least, common, subtracted, united
from headrace.service.rows import EVERYTHING, outside

__all__ = ["departed_clients_of", "finish_event", "report_departed_client"]

_MAX_PAIRS = 1000


def departed_clients_of(state: DispatcherState, worker_id: str) -> tuple[tuple[int, str], ...]:
    """Return tasks of a worker with clients that are gone, of which it has still to speak."""
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
    """Take back what a client that is gone had not acknowledged, as far as nobody has any of it.

    Raises:
        ValueError: The task was not dealt these units.
    """
    task = get_worker_task(state, request)
    splits = task.assigned
    units = _held_splits(task, request.unacknowledged)
    lost = _held_splits(task, request.possibly_lost)
    if request.client_id not in task.unconfirmed_clients:
        return DispatcherDecision()
    if state.iterations[task.iteration_id].pool.exactly_once:
        return _report_exactly_once(state.iterations[task.iteration_id], task, request, units)
    settled = _new_delivery_report(task, request)
    returned = subtracted(units, splits.partially_delivered)
    lost = subtracted(united((*lost, *common(units, splits.partially_delivered))), splits.delivered)
    if state.iterations[task.iteration_id].finished:
        returned, lost = (), united((*returned, *lost))
    lost = subtracted(lost, returned)
    dropped = events.DepartedClientReported(
        task_id=task.task_id, client_id=request.client_id, returned=returned, lost=lost
    )
    return DispatcherDecision(events=(*settled, dropped))


def _new_delivery_report(
    task: DispatcherTask, request: messages.ReportDepartedClient
) -> tuple[events.DeliveryReported, ...]:
    """Return what is new of what clients acknowledged."""
    received, touched = (
        _held_splits(task, request.delivered),
        _held_splits(task, request.partially_delivered),
    )
    if not (
        subtracted(received, task.assigned.delivered)
        or subtracted(touched, task.assigned.partially_delivered)
    ):
        return ()
    return (
        events.DeliveryReported(
            task_id=task.task_id, client_id="", delivered=received, partially_delivered=touched
        ),
    )


def _report_exactly_once(
    iteration: JobIteration,
    task: DispatcherTask,
    request: messages.ReportDepartedClient,
    units: Ranges,
) -> DispatcherDecision:
    """Take back, by its ordinals, what a client that is gone had not acknowledged."""
    splits = task.assigned
    returned = () if iteration.finished else subtracted(units, splits.delivered)
    elsewhere = united((*splits.delivered, *splits.returned, *returned))
    used = dict(outside(validate_partial_splits(task, request.partially_acknowledged), elsewhere))
    parts = []
    for unit, rows in outside(
        validate_partial_splits(task, request.partially_unacknowledged), elsewhere
    ):
        wanted = subtracted(splits.remaining_ordinals.get(unit, EVERYTHING), used.get(unit, ()))
        if rows := common(rows, wanted):
            parts.append((unit, rows))
    dropped = events.DepartedClientReported(
        task_id=task.task_id,
        client_id=request.client_id,
        returned=returned,
        lost=(),
        partially_returned=() if iteration.finished else tuple(parts),
        partially_consumed=tuple(used.items()),
    )
    return DispatcherDecision(events=(dropped,))


def _held_splits(task: DispatcherTask, units: Ranges) -> Ranges:
    return subtracted(
        at_least(validate_splits(task, units), task.assigned.num_done), task.assigned.returned
    )


def finish_event(
    state: DispatcherState, iteration: JobIteration, context: DecisionContext
) -> events.IterationFinished | None:
    """Return the end of an iteration that waited for a client, which was heard by now."""
    if iteration.finished or iteration.num_active_tasks or iteration.num_draining_tasks:
        return None
    follows = derive_events(state, iteration.iteration_id, context.is_unheard)
    return next((fact for fact in follows if isinstance(fact, events.IterationFinished)), None)
