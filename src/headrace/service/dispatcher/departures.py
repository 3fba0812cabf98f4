"""Deciders: what becomes of elements that were sent to clients which are gone.

A worker that had a task while a client left is asked, in the reply to its heartbeats, what that
client was sent and had not acknowledged. Units that went to it alone are dealt again, except for
those that it said it used, before it left; the others are missing, and said to be. At most once the
worker also says what was acknowledged: should it be lost, a client that is gone cannot say it.
"""

from __future__ import annotations

from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.assignment import consequences
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.splits import checked_parts, checked_units
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task
from headrace.service.dispatcher.tasks import workers_task
from headrace.service.ranges import Ranges, at_least, common, subtracted, united
from headrace.service.rows import EVERYTHING, outside

__all__ = ["departed_from", "drop_client", "finished_now"]

_MOST_AT_ONCE = 1000


def departed_from(state: DispatcherState, worker_id: str) -> tuple[tuple[int, str], ...]:
    """Return tasks of a worker with clients that are gone, of which it has still to speak."""
    worker = state.workers[worker_id]
    pairs = (
        (task_id, client_id)
        for task_id in sorted(worker.tasks | worker.finished)
        for client_id in state.tasks[task_id].departed
    )
    return tuple(pair for pair, _ in zip(pairs, range(_MOST_AT_ONCE), strict=False))


def drop_client(state: DispatcherState, request: messages.DropClient, moment: Moment) -> Decision:
    """Take back what a client that is gone had not acknowledged, as far as nobody has any of it.

    Raises:
        ValueError: The task was not dealt these units.
    """
    task = workers_task(state, request)
    splits = task.splits
    units = _held(task, request.units)
    lost = _held(task, request.lost)
    if request.client_id not in task.departed:
        return Decision()
    if state.iterations[task.iteration_id].splits.exactly_once:
        return _drop_exactly(state.iterations[task.iteration_id], task, request, units)
    settled = _settled(task, request)
    returned = subtracted(units, splits.touched)
    lost = subtracted(united((*lost, *common(units, splits.touched))), splits.received)
    if state.iterations[task.iteration_id].finished:
        returned, lost = (), united((*returned, *lost))
    lost = subtracted(lost, returned)
    dropped = updates.ClientDropped(
        task_id=task.task_id, client_id=request.client_id, returned=returned, lost=lost
    )
    return Decision(updates=(*settled, dropped))


def _settled(task: Task, request: messages.DropClient) -> tuple[updates.TaskSettled, ...]:
    """Return what is new of what clients acknowledged."""
    received, touched = _held(task, request.received), _held(task, request.touched)
    if not (subtracted(received, task.splits.received) or subtracted(touched, task.splits.touched)):
        return ()
    return (
        updates.TaskSettled(task_id=task.task_id, client_id="", received=received, touched=touched),
    )


def _drop_exactly(
    iteration: Iteration, task: Task, request: messages.DropClient, units: Ranges
) -> Decision:
    """Take back, by its ordinals, what a client that is gone had not acknowledged."""
    splits = task.splits
    returned = () if iteration.finished else subtracted(units, splits.received)
    elsewhere = united((*splits.received, *splits.returned, *returned))
    used = dict(outside(checked_parts(task, request.used), elsewhere))
    parts = []
    for unit, rows in outside(checked_parts(task, request.parts), elsewhere):
        wanted = subtracted(splits.rows.get(unit, EVERYTHING), used.get(unit, ()))
        if rows := common(rows, wanted):
            parts.append((unit, rows))
    dropped = updates.ClientDropped(
        task_id=task.task_id,
        client_id=request.client_id,
        returned=returned,
        lost=(),
        parts=() if iteration.finished else tuple(parts),
        used=tuple(used.items()),
    )
    return Decision(updates=(dropped,))


def _held(task: Task, units: Ranges) -> Ranges:
    return subtracted(at_least(checked_units(task, units), task.splits.done), task.splits.returned)


def finished_now(
    state: DispatcherState, iteration: Iteration, moment: Moment
) -> updates.IterationFinished | None:
    """Return the end of an iteration that waited for a client, which was heard by now."""
    if iteration.finished or iteration.takers or iteration.leavers:
        return None
    follows = consequences(state, iteration.iteration_id, moment.is_silent)
    return next((fact for fact in follows if isinstance(fact, updates.IterationFinished)), None)
