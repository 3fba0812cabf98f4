"""Backups: in order, one slow worker keeps all that comes after its unit; another is dealt it too.

Rule 1. Where the oldest unit that somebody holds is not done, and of its task none got done for
        longer than a second and than thrice what units usually take, a task that has nothing to do
        is dealt what that task holds: the units are taken over (`UnitsTakenOver`) and dealt again.
Rule 2. The slow one is told nothing. Whatever comes first of either counts, for whoever reads in
        order drops what it has. Only the other is to give these units: if one of the two is lost,
        no third is dealt them for the slow one's sake.
Rule 3. Each unit is dealt so once. If all are slow, all of them need not try.
Rule 4. Where a client says that it waits for a unit (`ClientHeartbeat.wanted`), what its task holds
        is taken over while there is more to deal, too, and goes to whoever asks next. As a rule
        nobody would: of what comes before its turn there is so much that tasks wait for room. So
        the client is told whom to ask all the same, until the unit has come (`helpers`). Before
        any unit is done nobody knows how long one takes, and none is taken over for a client.

What tasks have done since they were dealt something is in no journal: after a restart, all begin to
be slow again.
"""

from __future__ import annotations

from headrace.service.dispatcher.activity import done_of
from headrace.service.dispatcher.decision import Moment
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task
from headrace.service.dispatcher.updates import UnitsTakenOver
from headrace.service.ranges import Ranges, at_least, count, subtracted

__all__ = ["helpers", "others_hold", "overdue", "overdue_for_client"]

_LEAST_SECONDS = 1.0
_TIMES_USUAL = 3.0


def others_hold(
    state: DispatcherState, iteration: Iteration, task: Task, moment: Moment
) -> list[tuple[Task, Ranges]]:
    """Return other tasks that hold units, with those, in dealt order, as far as is known."""
    found = [
        (other, _held(other, moment.presence.reported.get(other.task_id, 0)))
        for other in state.running_tasks(iteration)
        if other is not task
    ]
    return [each for each in found if each[1]]


def overdue(
    state: DispatcherState, iteration: Iteration, task: Task, done: int, moment: Moment
) -> UnitsTakenOver | None:
    """Return what a task that has nothing to do takes over from another, if anything is due.

    Args:
        state: What is known.
        iteration: Whose units.
        task: Which asks for units, of which none are left for it.
        done: How many of its units are done.
        moment: When.
    """
    if _held(task, done):
        return None
    places = {
        other.task_id: (other.splits.located(held)[0][0], held)
        for other, held in others_hold(state, iteration, task, moment)
    }
    if not places:
        return None
    slow = min(places, key=lambda task_id: places[task_id][0])
    oldest, held = places[slow]
    backed = moment.presence.backed.get(iteration.iteration_id, ())
    if not _is_slow(state, iteration, slow, held, moment) or _is_in(backed, oldest):
        return None
    return UnitsTakenOver(task_id=slow, units=held)


def overdue_for_client(
    state: DispatcherState, iteration: Iteration, unit: int, moment: Moment
) -> UnitsTakenOver | None:
    """Return what is taken over from the task that holds a unit, if that is due.

    Args:
        state: What is known.
        iteration: Whose units.
        unit: Which a client waits for; -1: none.
        moment: When.
    """
    if unit < 0:
        return None
    running = state.running_tasks(iteration)
    backed = moment.presence.backed.get(iteration.iteration_id, ())
    if len(running) == 1 or _is_in(backed, unit) or _done(state, iteration, moment) <= 0:
        return None
    for task in running:
        held = _held(task, moment.presence.reported.get(task.task_id, 0))
        if held and _is_in(task.splits.located(held), unit):
            if not _is_slow(state, iteration, task.task_id, held, moment):
                return None
            return UnitsTakenOver(task_id=task.task_id, units=held)
    return None


def helpers(
    state: DispatcherState, iteration: Iteration, unit: int, moment: Moment
) -> tuple[int, ...]:
    """Return the tasks that a client may ask for a unit, however much it has of what comes later.

    Args:
        state: What is known.
        iteration: Whose units.
        unit: Which the client waits for; -1: none.
        moment: When.
    """
    if unit < 0:
        return ()
    holders: list[int] = []
    others: list[int] = []
    for task in state.running_tasks(iteration):
        splits = task.splits
        dealt = splits.located(((splits.done, splits.dealt),))
        if not _is_in(dealt, unit):
            if _may_be_dealt(state, task, moment):
                others.append(task.task_id)
        elif _is_in(splits.located(_held(task, splits.done)), unit):
            holders.append(task.task_id)
    if holders or not (_is_in(iteration.splits.returned, unit) or unit in iteration.splits.parts):
        return tuple(holders)
    # What came back is dealt first, so one of them suffices: the one that got on last.
    got_on = moment.presence.got_on
    others.sort(key=lambda task_id: got_on.get(task_id, 0.0))
    return tuple(others[-1:])


def _may_be_dealt(state: DispatcherState, task: Task, moment: Moment) -> bool:
    is_dismissed = task.task_id in moment.presence.dismissed
    return not (is_dismissed or state.workers[task.worker_id].leaving)


def _is_slow(
    state: DispatcherState, iteration: Iteration, task_id: int, held: Ranges, moment: Moment
) -> bool:
    waited = moment.now - moment.presence.got_on.get(task_id, moment.now)
    usual = count(held) * _usual(state, iteration, moment)
    return waited > max(_LEAST_SECONDS, _TIMES_USUAL * usual)


def _is_in(units: Ranges, unit: int) -> bool:
    return not subtracted(((unit, unit + 1),), units)


def _held(task: Task, done: int) -> Ranges:
    splits = task.splits
    done = max(done, splits.done)
    return (
        subtracted(((done, splits.dealt),), at_least(splits.returned, done)) if splits.held else ()
    )


def _usual(state: DispatcherState, iteration: Iteration, moment: Moment) -> float:
    """Return how long a task took for a unit, on average, until one last got on."""
    work = moment.presence.activity.iterations[iteration.iteration_id]
    got_on = moment.presence.got_on
    until = max(got_on.get(task_id, work.began) for task_id in iteration.tasks)
    units = max(1, _done(state, iteration, moment))
    return iteration.takers * max(0.0, until - work.began) / units


def _done(state: DispatcherState, iteration: Iteration, moment: Moment) -> int:
    """Return how many units were done here, as far as is known."""
    work = moment.presence.activity.iterations[iteration.iteration_id]
    return done_of(state, iteration) - work.done_before
