"""Backups: in order, one slow worker keeps all that comes after its unit; another is dealt it too.

Rule 1. Where the oldest unit that somebody holds is not done, and of its task none got done for
        longer than a second and than thrice what units usually take, a task that has nothing to do
        is dealt what that task holds: the units are taken over (`SplitsReassigned`) and dealt
        again.
Rule 2. The slow one is told nothing. Whatever comes first of either counts, for whoever reads in
        order drops what it has. Only the other is to give these units: if one of the two is lost,
        no third is dealt them for the slow one's sake.
Rule 3. Each unit is dealt so once. If all are slow, all of them need not try.
Rule 4. Where a client says that it waits for a unit (`ClientHeartbeat.wanted_split`), what its task
        holds is taken over while there is more to deal, too, and goes to whoever asks next. As a
        rule nobody would: of what comes before its turn there is so much that tasks wait for room.
        So the client is told whom to ask all the same, until the unit has come (`helpers`). Before
        any unit is done nobody knows how long one takes, and none is taken over for a client.

What tasks have done since they were dealt something is in no journal: after a restart, all begin to
be slow again.
"""

from __future__ import annotations

from headrace.service.dispatcher.activity import count_done_splits
from headrace.service.dispatcher.decision import DecisionContext
from headrace.service.dispatcher.events import SplitsReassigned
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, JobIteration
from headrace.service.ranges import Ranges, at_least, count, subtracted

__all__ = ["helpers", "others_hold", "overdue", "overdue_for_client"]

_LEAST_SECONDS = 1.0
_TIMES_USUAL = 3.0


def others_hold(
    state: DispatcherState, iteration: JobIteration, task: DispatcherTask, context: DecisionContext
) -> list[tuple[DispatcherTask, Ranges]]:
    """Return other tasks that hold units, with those, in dealt order, as far as is known."""
    found = [
        (other, _held(other, context.soft_state.reported_done.get(other.task_id, 0)))
        for other in state.running_tasks(iteration)
        if other is not task
    ]
    return [each for each in found if each[1]]


def overdue(
    state: DispatcherState,
    iteration: JobIteration,
    task: DispatcherTask,
    done: int,
    context: DecisionContext,
) -> SplitsReassigned | None:
    """Return what a task that has nothing to do takes over from another, if anything is due.

    Args:
        state: What is known.
        iteration: Whose units.
        task: Which asks for units, of which none are left for it.
        done: How many of its units are done.
        context: When.
    """
    if _held(task, done):
        return None
    places = {
        other.task_id: (other.assigned.to_split_indices(held)[0][0], held)
        for other, held in others_hold(state, iteration, task, context)
    }
    if not places:
        return None
    slow = min(places, key=lambda task_id: places[task_id][0])
    oldest, held = places[slow]
    backed = context.soft_state.reassigned_splits.get(iteration.iteration_id, ())
    if not _is_slow(state, iteration, slow, held, context) or _is_in(backed, oldest):
        return None
    return SplitsReassigned(task_id=slow, splits=held)


def overdue_for_client(
    state: DispatcherState, iteration: JobIteration, unit: int, context: DecisionContext
) -> SplitsReassigned | None:
    """Return what is taken over from the task that holds a unit, if that is due.

    Args:
        state: What is known.
        iteration: Whose units.
        unit: Which a client waits for; -1: none.
        context: When.
    """
    if unit < 0:
        return None
    running = state.running_tasks(iteration)
    backed = context.soft_state.reassigned_splits.get(iteration.iteration_id, ())
    if len(running) == 1 or _is_in(backed, unit) or _done(state, iteration, context) <= 0:
        return None
    for task in running:
        held = _held(task, context.soft_state.reported_done.get(task.task_id, 0))
        if held and _is_in(task.assigned.to_split_indices(held), unit):
            if not _is_slow(state, iteration, task.task_id, held, context):
                return None
            return SplitsReassigned(task_id=task.task_id, splits=held)
    return None


def helpers(
    state: DispatcherState, iteration: JobIteration, unit: int, context: DecisionContext
) -> tuple[int, ...]:
    """Return the tasks that a client may ask for a unit, however much it has of what comes later.

    Args:
        state: What is known.
        iteration: Whose units.
        unit: Which the client waits for; -1: none.
        context: When.
    """
    if unit < 0:
        return ()
    holders: list[int] = []
    others: list[int] = []
    for task in state.running_tasks(iteration):
        splits = task.assigned
        dealt = splits.to_split_indices(((splits.num_done, splits.num_assigned),))
        if not _is_in(dealt, unit):
            if _may_be_dealt(state, task, context):
                others.append(task.task_id)
        elif _is_in(splits.to_split_indices(_held(task, splits.num_done)), unit):
            holders.append(task.task_id)
    if holders or not (
        _is_in(iteration.pool.returned, unit) or unit in iteration.pool.partial_splits
    ):
        return tuple(holders)
    # What came back is dealt first, so one of them suffices: the one that got on last.
    got_on = context.soft_state.last_progress
    others.sort(key=lambda task_id: got_on.get(task_id, 0.0))
    return tuple(others[-1:])


def _may_be_dealt(state: DispatcherState, task: DispatcherTask, context: DecisionContext) -> bool:
    is_dismissed = task.task_id in context.soft_state.tasks_without_work
    return not (is_dismissed or state.workers[task.worker_id].draining)


def _is_slow(
    state: DispatcherState,
    iteration: JobIteration,
    task_id: int,
    held: Ranges,
    context: DecisionContext,
) -> bool:
    waited = context.now - context.soft_state.last_progress.get(task_id, context.now)
    usual = count(held) * _usual(state, iteration, context)
    return waited > max(_LEAST_SECONDS, _TIMES_USUAL * usual)


def _is_in(units: Ranges, unit: int) -> bool:
    return not subtracted(((unit, unit + 1),), units)


def _held(task: DispatcherTask, done: int) -> Ranges:
    splits = task.assigned
    done = max(done, splits.num_done)
    return (
        subtracted(((done, splits.num_assigned),), at_least(splits.returned, done))
        if splits.num_held
        else ()
    )


def _usual(state: DispatcherState, iteration: JobIteration, context: DecisionContext) -> float:
    """Return how long a task took for a unit, on average, until one last got on."""
    work = context.soft_state.activity.iterations[iteration.iteration_id]
    got_on = context.soft_state.last_progress
    until = max(got_on.get(task_id, work.started_at) for task_id in iteration.tasks)
    units = max(1, _done(state, iteration, context))
    return iteration.num_active_tasks * max(0.0, until - work.started_at) / units


def _done(state: DispatcherState, iteration: JobIteration, context: DecisionContext) -> int:
    """Return how many units were done here, as far as is known."""
    work = context.soft_state.activity.iterations[iteration.iteration_id]
    return count_done_splits(state, iteration) - work.initially_done
