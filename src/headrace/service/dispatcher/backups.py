"""Backups: in order, one slow worker keeps all that comes after its unit; another is dealt it too.

Rule 1. Where the oldest unit that somebody holds is not done, and of its task none got done for
        longer than a second and than thrice what units usually take, a task that has nothing to do
        is dealt what that task holds: the units are taken over (`UnitsTakenOver`) and dealt again.
Rule 2. The slow one is told nothing. Whatever comes first of either counts, for whoever reads in
        order drops what it has. Only the other is to give these units: if one of the two is lost,
        no third is dealt them for the slow one's sake.
Rule 3. Each unit is dealt so once. If all are slow, all of them need not try.

What tasks have done since they were dealt something is in no journal: after a restart, all begin to
be slow again.
"""

from __future__ import annotations

from headrace.service.dispatcher.activity import done_of
from headrace.service.dispatcher.decision import Moment
from headrace.service.dispatcher.ranges import Ranges, at_least, count, located, subtracted
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task
from headrace.service.dispatcher.updates import UnitsTakenOver

__all__ = ["has_backups", "others_hold", "overdue"]

_LEAST_SECONDS = 1.0
_TIMES_USUAL = 3.0


def has_backups(state: DispatcherState, iteration: Iteration) -> bool:
    """Whether what one task holds may be dealt to another too: it is read in order."""
    return iteration.exactly_once and state.jobs[iteration.job_id].terms.ordered


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
        other.task_id: (located(other.runs, other.done, held)[0][0], held)
        for other, held in others_hold(state, iteration, task, moment)
    }
    if not places:
        return None
    slow = min(places, key=lambda task_id: places[task_id][0])
    oldest, held = places[slow]
    backed = moment.presence.backed.get(iteration.iteration_id, ())
    waited = moment.now - moment.presence.got_on.get(slow, moment.now)
    patience = max(_LEAST_SECONDS, _TIMES_USUAL * count(held) * _usual(state, iteration, moment))
    if waited <= patience or not subtracted(((oldest, oldest + 1),), backed):
        return None
    return UnitsTakenOver(task_id=slow, units=held)


def _held(task: Task, done: int) -> Ranges:
    done = max(done, task.done)
    return subtracted(((done, task.dealt),), at_least(task.returned, done)) if task.held else ()


def _usual(state: DispatcherState, iteration: Iteration, moment: Moment) -> float:
    """Return how long a task took for a unit, on average, until one last got on."""
    work = moment.presence.activity.iterations[iteration.iteration_id]
    got_on = moment.presence.got_on
    until = max(got_on.get(task_id, work.began) for task_id in iteration.tasks)
    units = done_of(state, iteration) - work.done_before
    return iteration.takers * max(0.0, until - work.began) / max(1, units)
