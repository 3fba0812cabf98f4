"""Deciders: units of one stream are dealt to whoever asks, and come back from who leaves.

Which units a task gets next, the policy of its iteration says (`modes`). What was dealt to a task
stays with it, unless its worker hands it back or is lost.
"""

from __future__ import annotations

import msgspec

from headrace.errors import AbortedError, FailedPreconditionError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.modes import policy_of
from headrace.service.dispatcher.policy import Policy
from headrace.service.dispatcher.presence import Dismissed
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task, TaskPhase
from headrace.service.dispatcher.tasks import workers_task
from headrace.service.ranges import (
    Ranges,
    at_least,
    common,
    subtracted,
    united,
)
from headrace.service.rows import END, Parts

__all__ = ["checked_parts", "checked_units", "get_split", "hand_back"]

_NOTHING_LEFT = messages.SplitGranted(start=0, stop=0)


def get_split(state: DispatcherState, request: messages.GetSplit, moment: Moment) -> Decision:
    """Deal the next units to a task.

    Raises:
        FailedPreconditionError: The task's mode deals nothing.
        AbortedError: The task has asked a later question already.
        ValueError: The request makes no sense.
    """
    task = workers_task(state, request)
    splits = task.splits
    iteration = state.iterations[task.iteration_id]
    pool = iteration.splits
    if not iteration.is_dealt:
        raise FailedPreconditionError(
            f"task {request.task_id} reads its dataset whole: only ShardingPolicy.DYNAMIC deals "
            "units"
        )
    policy = policy_of(state, iteration)
    request = msgspec.structs.replace(request, done=policy.done(task, request))
    if request.want < 1:
        raise ValueError(f"want={request.want} must be at least 1")
    if request.number < 0:
        raise ValueError(f"number={request.number} must not be negative")
    if request.number == splits.grants - 1:
        return Decision(reply=_granted(iteration, *splits.last, splits.last_rows))
    _check_progress(task, request)
    if task.phase is TaskPhase.LOST:
        # Its worker, which was paused, hears of that soon; it must not take this for the end.
        return Decision(reply=messages.SplitGranted(start=0, stop=0, wait=True))
    if task.phase is not TaskPhase.RUNNING or state.workers[task.worker_id].leaving:
        # A finished task has no readers, and a leaving worker delivers only what it has.
        return Decision(reply=_NOTHING_LEFT)
    if task.task_id in moment.presence.dismissed:
        return Decision(reply=_NOTHING_LEFT)
    if pool.rest == 0:
        return _nothing_to_deal(policy, state, task, request, moment)
    waited = moment.now - moment.presence.dealt[iteration.iteration_id]
    is_impatient = waited > moment.limits.share_patience
    units = policy.next_units(state, iteration, task, request, is_impatient=is_impatient)
    if units is None:
        return _nothing_to_deal(policy, state, task, request, moment)
    start, stop = units
    dealt = updates.UnitsDealt(
        task_id=task.task_id, number=request.number, start=start, stop=stop, done=request.done
    )
    rows = pool.parts.get(start, ())
    # One round trip less for each pass that a single worker reads.
    is_last = (
        pool.rest == stop - start
        and pool.held == splits.held
        and not _may_come_back(policy, state, iteration)
    )
    return Decision(updates=(dealt,), reply=_granted(iteration, start, stop, rows, last=is_last))


def _nothing_to_deal(
    policy: Policy,
    state: DispatcherState,
    task: Task,
    request: messages.GetSplit,
    moment: Moment,
) -> Decision:
    """Let a task wait for what may come, or end."""
    iteration = state.iterations[task.iteration_id]
    if iteration.splits.rest != 0 or _may_come_back(policy, state, iteration):
        flush = policy.must_flush(state, iteration, task, request)
        wait = messages.SplitGranted(start=0, stop=0, wait=True, flush=flush)
        decision = Decision(reply=wait)
    else:
        decision = Decision(reply=_NOTHING_LEFT, notes=(Dismissed(task.task_id),))
    return policy.while_idle(decision, state, task, request, moment)


def _granted(
    iteration: Iteration, start: int, stop: int, rows: Ranges, *, last: bool = False
) -> messages.SplitGranted:
    alone = bool(common(((start, stop),), iteration.splits.suspects))
    return messages.SplitGranted(start=start, stop=stop, alone=alone, rows=rows, last=last)


def _check_progress(task: Task, request: messages.GetSplit) -> None:
    splits = task.splits
    if request.number < splits.grants:
        raise AbortedError(
            f"task {task.task_id} asked for grant {request.number} again after {splits.grants} "
            "grants: the answer is no longer known"
        )
    if request.number > splits.grants:
        raise ValueError(
            f"task {task.task_id} asked for grant {request.number}, but received {splits.grants}"
        )
    if not splits.done <= request.done <= splits.dealt:
        raise ValueError(
            f"task {task.task_id} says that units before {request.done} are done: it was dealt "
            f"{splits.dealt}, of which {splits.done} were done before"
        )


def _may_come_back(policy: Policy, state: DispatcherState, iteration: Iteration) -> bool:
    handed = (
        policy.awaits_leavers
        and iteration.leavers > 0
        and any(
            task.splits.held and state.workers[task.worker_id].leaving
            for task in state.running_tasks(iteration)
        )
    )
    return handed or state.may_recover(iteration)


def hand_back(state: DispatcherState, request: messages.HandBack, moment: Moment) -> Decision:
    """Take back units that a worker did not deliver and will not.

    Raises:
        FailedPreconditionError: The task is over; its units are where they are.
        ValueError: The task was not dealt these units, or they are done.
    """
    task = workers_task(state, request)
    splits = task.splits
    units = checked_units(task, request.units)
    if units != at_least(units, splits.done):
        raise ValueError(
            f"task {task.task_id} hands back unit {units[0][0]}, but said before that all units "
            f"before {splits.done} are done"
        )
    # What a client said that it has was delivered, whatever the worker knows of it.
    units = subtracted(units, united((*splits.returned, *splits.received)))
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
        if not 0 <= start < stop <= task.splits.dealt:
            raise ValueError(
                f"task {task.task_id} was dealt {task.splits.dealt} units; "
                f"({start}, {stop}) are not a "
                "range of them"
            )
    return united(ranges)


def checked_parts(task: Task, parts: Parts) -> Parts:
    """Return what is said of units in part that are not done.

    Raises:
        ValueError: The task was not dealt all of them, or ordinals are no ranges.
    """
    splits = task.splits
    for unit, rows in parts:
        ascending = rows == united(rows) and all(0 <= start < stop <= END for start, stop in rows)
        if not 0 <= unit < splits.dealt or not rows or not ascending:
            raise ValueError(
                f"task {task.task_id} was dealt {splits.dealt} units; {rows} of unit {unit} are no "
                "elements of one of them"
            )
    if len({unit for unit, _ in parts}) < len(parts):
        raise ValueError(f"a unit of task {task.task_id} is named twice")
    return tuple(each for each in parts if each[0] >= splits.done)
