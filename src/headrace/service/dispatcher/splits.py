"""Deciders: units of one stream are dealt to whoever asks, and come back from who leaves.

Rule 1. A grant is half of an even share of what can still be dealt, at most what is wanted: large
        at first, small near the end, so that few requests deal much and all workers end together.
Rule 2. A task holds at most an even share of what is not done, so that no worker drinks the stream
        into a buffer. One that has its share waits; if nobody was dealt anything for a while, the
        others do not want it, and it gets more all the same.
Rule 3. What was dealt to a task stays with it, unless its worker hands it back or is lost. Units
        that came back are dealt first.
Rule 4. Units that are suspected to kill workers are dealt in small groups, each to a task that
        holds nothing and gets nothing else until they are done; what others hold does not die with
        them. As with rule 2, a task that gets nothing done meanwhile is dealt more all the same.
"""

from __future__ import annotations

from headrace.errors import AbortedError, FailedPreconditionError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.dealing import may_recover
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.ranges import (
    Ranges,
    at_least,
    common,
    count,
    located,
    subtracted,
    united,
)
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task, TaskPhase
from headrace.service.dispatcher.tasks import workers_task

__all__ = ["checked_units", "get_split", "hand_back"]

_NOTHING_LEFT = Decision(reply=messages.SplitGranted(start=0, stop=0))
_WAIT = Decision(reply=messages.SplitGranted(start=0, stop=0, wait=True))
_MOST_WANTED = 1 << 32
_INFINITE_SHARE = 1 << 16
"""Units of a stream without end that a task may hold in any case."""


def get_split(state: DispatcherState, request: messages.GetSplit, moment: Moment) -> Decision:
    """Deal the next units to a task.

    Raises:
        FailedPreconditionError: The task's mode deals nothing.
        AbortedError: The task has asked a later question already.
        ValueError: The request makes no sense.
    """
    task = workers_task(state, request)
    iteration = state.iterations[task.iteration_id]
    if not iteration.is_dealt:
        raise FailedPreconditionError(
            f"task {request.task_id} reads its dataset whole: only ShardingPolicy.DYNAMIC deals "
            "units"
        )
    if request.want < 1:
        raise ValueError(f"want={request.want} must be at least 1")
    if request.number < 0:
        raise ValueError(f"number={request.number} must not be negative")
    if request.number == task.grants - 1:
        return Decision(reply=_granted(iteration, *task.last))
    _check_progress(task, request)
    if task.phase is not TaskPhase.RUNNING or state.workers[task.worker_id].leaving:
        # A finished task has no readers, and a leaving worker delivers only what it has.
        return _NOTHING_LEFT
    if iteration.rest == 0:
        return _WAIT if _may_come_back(state, iteration) else _NOTHING_LEFT
    number = _grant(iteration, task, request, moment)
    units = _choose(iteration, task, request, moment) if number else None
    if units is None:
        return _WAIT
    start, stop = units[0], min(units[1], units[0] + number)
    dealt = updates.UnitsDealt(
        task_id=task.task_id, number=request.number, start=start, stop=stop, done=request.done
    )
    return Decision(updates=(dealt,), reply=_granted(iteration, start, stop))


def _granted(iteration: Iteration, start: int, stop: int) -> messages.SplitGranted:
    alone = bool(common(((start, stop),), iteration.suspects))
    return messages.SplitGranted(start=start, stop=stop, alone=alone)


def _choose(
    iteration: Iteration, task: Task, request: messages.GetSplit, moment: Moment
) -> tuple[int, int] | None:
    """Return a range of units to deal from; None: nothing for this task now."""
    suspects = common(iteration.returned, iteration.suspects)
    others = subtracted(iteration.returned, suspects)
    group: tuple[int, int] | None = None
    if suspects:
        start, stop = suspects[0]
        group = start, min(stop, start + iteration.suspects_at_once)
    held = subtracted(((request.done, task.dealt),), at_least(task.returned, request.done))
    if group is not None and not held:
        return group
    impatient = _is_impatient(iteration, moment)
    if iteration.suspects and not impatient:
        places = located(task.runs, task.done, held)
        if common(places, iteration.suspects):
            return None
    if others:
        return others[0]
    if iteration.positions != iteration.next:
        end = iteration.positions or 0
        return iteration.next, end if end > 0 else iteration.next + _MOST_WANTED
    return group if impatient else None


def _is_impatient(iteration: Iteration, moment: Moment) -> bool:
    waited = moment.now - moment.presence.dealt[iteration.iteration_id]
    return waited > moment.limits.share_patience


def _check_progress(task: Task, request: messages.GetSplit) -> None:
    if request.number < task.grants:
        raise AbortedError(
            f"task {task.task_id} asked for grant {request.number} again after {task.grants} "
            "grants: the answer is no longer known"
        )
    if request.number > task.grants:
        raise ValueError(
            f"task {task.task_id} asked for grant {request.number}, but received {task.grants}"
        )
    if not task.done <= request.done <= task.dealt:
        raise ValueError(
            f"task {task.task_id} says that units before {request.done} are done: it was dealt "
            f"{task.dealt}, of which {task.done} were done before"
        )


def _grant(iteration: Iteration, task: Task, request: messages.GetSplit, moment: Moment) -> int:
    """Return how many units to deal; 0: the task has its share."""
    want = min(request.want, _MOST_WANTED)
    held = task.dealt - request.done - count(at_least(task.returned, request.done))
    impatient = _is_impatient(iteration, moment)
    if iteration.rest is None:
        share = max(4 * want, _INFINITE_SHARE)
        return want if impatient or held + want <= share else 0
    left = iteration.rest + iteration.held - task.held + held
    room = -(-left // iteration.takers) - held
    if room <= 0 and not impatient:
        return 0
    portion = min(want, -(-iteration.rest // (2 * iteration.takers)))
    return portion if impatient else min(portion, room)


def _may_come_back(state: DispatcherState, iteration: Iteration) -> bool:
    handed = iteration.leavers > 0 and any(
        task.held and state.workers[task.worker_id].leaving
        for task in state.running_tasks(iteration)
    )
    return handed or may_recover(state, iteration)


def hand_back(state: DispatcherState, request: messages.HandBack, moment: Moment) -> Decision:
    """Take back units that a worker did not deliver and will not.

    Raises:
        FailedPreconditionError: The task is over; its units are where they are.
        ValueError: The task was not dealt these units, or they are done.
    """
    task = workers_task(state, request)
    units = checked_units(task, request.units)
    if units != at_least(units, task.done):
        raise ValueError(
            f"task {task.task_id} hands back unit {units[0][0]}, but said before that all units "
            f"before {task.done} are done"
        )
    units = subtracted(units, task.returned)
    if not units:
        return Decision()
    if task.phase is not TaskPhase.RUNNING:
        raise FailedPreconditionError(
            f"task {task.task_id} is {task.phase.name.lower()}: its units can be handed back only "
            "while it runs"
        )
    return Decision(updates=(updates.UnitsReturned(task_id=task.task_id, units=units),))


def checked_units(task: Task, ranges: Ranges) -> Ranges:
    """Return units of a task, in dealt order, as a set.

    Raises:
        ValueError: The task was not dealt all of them.
    """
    for start, stop in ranges:
        if not 0 <= start < stop <= task.dealt:
            raise ValueError(
                f"task {task.task_id} was dealt {task.dealt} units; ({start}, {stop}) are not a "
                "range of them"
            )
    return united(ranges)
