"""What an iteration has lost in the end: how much, with whom, and what was seen of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.state import DispatcherState, Iteration, Missing, Task, TaskPhase
from headrace.service.dispatcher.story import whose
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.distributed_save.records import SaveFailed
from headrace.service.passes import pass_in_words
from headrace.service.ranges import (
    Ranges,
    common,
    count,
    subtracted,
    united,
)
from headrace.versions import own_versions, python_mismatch, release_mismatch

__all__ = ["lost_copies", "lost_units", "notice"]


_MOST_NAMED = 20

_MOST_RANGES = 1000

"""Ranges of lost units that are named; how many units are lost is always exact."""


def lost_copies(iteration: Iteration, tasks: list[Task]) -> tuple[messages.LostUnits, ...]:
    """Return the copies that ended early, of a finished iteration with these tasks."""
    forgotten = [_lost(missing, (), is_copy=True) for missing in iteration.missing]
    cut = [_cut(task) for task in tasks if task.cut]
    return (*forgotten, *cut, *(_lost(task, (), is_copy=True) for task in _lost_copies(tasks)))


def lost_units(iteration: Iteration, tasks: list[Task]) -> tuple[messages.LostUnits, ...]:
    """Return the units that are missing of a finished iteration with these tasks."""
    pool = iteration.splits
    lost = [
        each
        for missing in iteration.missing
        for each in _lost_of(iteration, missing, missing.units)
    ]
    for task in tasks:
        lost += _lost_of(iteration, task, task.splits.located(task.missing))
    if iteration.missing_before:
        first = iteration.missing[0]
        lost.append(msgspec.structs.replace(_lost(first, ()), count=iteration.missing_before))
    failed = [task for task in tasks if task.phase is TaskPhase.FAILED]
    if failed:
        # What all that could have taken it failed at.
        end = pool.next if iteration.ended else pool.positions or 0
        parts = ((unit, unit + 1) for unit in pool.parts)
        left = (*pool.returned, *parts, (pool.next, end))
        lost.append(_lost(failed[-1], united(each for each in left if each[0] < each[1])))
    return tuple(each for each in lost if each.count)


def _lost_copies(tasks: list[Task]) -> list[Task]:
    """Return the copies of the last attempt that ended early."""
    last = max((task.attempt for task in tasks), default=0)
    return [task for task in tasks if task.phase is TaskPhase.LOST and task.attempt == last]


def _cut(task: Task) -> messages.LostUnits:
    return messages.LostUnits(
        worker_address=task.address,
        task_id=task.task_id,
        units=(),
        count=0,
        is_copy=True,
        # Whatever became of the worker since.
        reason="it was asked to leave",
    )


def _lost_of(
    iteration: Iteration, whence: Task | Missing, lost: Ranges
) -> list[messages.LostUnits]:
    given_up = common(lost, iteration.splits.given_up)
    deaths_at = tuple(
        address
        for start, stop in given_up
        for unit in range(start, stop)
        for address in iteration.splits.deaths.get(unit, ())
    )
    return [
        _lost(whence, subtracted(lost, given_up)),
        _lost(whence, given_up, given_up=True, deaths_at=deaths_at[-_MOST_NAMED:]),
    ]


def _lost(
    whence: Task | Missing,
    units: Ranges,
    *,
    given_up: bool = False,
    deaths_at: tuple[str, ...] = (),
    is_copy: bool = False,
) -> messages.LostUnits:
    client_id = whence.client_id if isinstance(whence, Missing) else ""
    return messages.LostUnits(
        worker_address=whence.address,
        task_id=whence.task_id,
        units=units[:_MOST_RANGES],
        count=count(units),
        given_up=given_up,
        deaths_at=deaths_at,
        client_id=client_id,
        is_copy=is_copy,
        reason="" if client_id else whence.reason,
    )


# --- what the log of the dispatcher says of a loss, whoever else hears of it ----------------------


def notice(state: DispatcherState, fact: Update) -> str | None:
    """Return what is to be said of a fact that is about to be applied; None: nothing."""
    say = _SAY.get(type(fact))
    return None if say is None else say(state, fact)


def _worker_lost(state: DispatcherState, fact: updates.WorkerLost) -> str:
    worker = state.workers[fact.worker_id]
    tasks = "1 running task" if len(worker.tasks) == 1 else f"{len(worker.tasks)} running tasks"
    return (
        f"the worker at {worker.address} counts as lost: {fact.reason}. It had {tasks}; if it "
        "comes back, it begins again as another worker"
    )


def _worker_registered(state: DispatcherState, fact: updates.WorkerRegistered) -> str | None:
    if fact.worker_id in state.workers:
        return None
    mine, worker = own_versions(), f"the worker at {fact.address} runs {fact.versions}"
    unfit = {
        iteration.job_id: dataset
        for iteration in state.iterations.values()
        if not iteration.finished
        and python_mismatch(fact.versions.python, (dataset := state.dataset_of(iteration)).python)
    }
    if unfit:
        pythons = " and ".join(sorted({each.python for each in unfit.values()}))
        jobs = " and ".join(whose(state, state.jobs[job_id]) for job_id in sorted(unfit))
        return (
            f"{worker}, and gets no tasks of {jobs}, registered by Python {pythons}: run clients "
            "and workers on the same minor version"
        )
    if release_mismatch(fact.versions, mine):
        return f"{worker}, and this dispatcher {mine}: the same release everywhere is tested"
    return None


def _task_lost(state: DispatcherState, fact: updates.TaskLost) -> str | None:
    task = state.tasks[fact.task_id]
    if state.jobs[state.iterations[task.iteration_id].job_id].save:
        return None  # why the save failed is said, not that its tasks end
    return (
        f"task {fact.task_id} of {_reading(state, task)} on the worker at {task.address} is given "
        f"up: {fact.reason}"
    )


def _client_dropped(state: DispatcherState, fact: updates.ClientDropped) -> str | None:
    if not fact.lost:
        return None
    task = state.tasks[fact.task_id]
    return (
        f"up to {count(fact.lost)} positions of {_reading(state, task)} are missing: they were "
        f"sent to client {fact.client_id}, which is gone"
    )


def _save_failed(state: DispatcherState, fact: SaveFailed) -> str:
    return f"the save into {state.saves[fact.save].path!r} has failed: {fact.error}"


def _iteration_finished(state: DispatcherState, fact: updates.IterationFinished) -> str | None:
    save = state.jobs[state.iterations[fact.iteration_id].job_id].save
    if not (save and fact.failed) or state.saves[save].error:
        return None
    return f"the save into {state.saves[save].path!r} has failed: {fact.failed}"


def _reading(state: DispatcherState, task: Task) -> str:
    iteration = state.iterations[task.iteration_id]
    job = state.jobs[iteration.job_id]
    if job.save:
        return whose(state, job)
    return f"{whose(state, job)}, {pass_in_words(iteration.pass_number)}"


_SAY: dict[type, Callable[[DispatcherState, Any], str | None]] = {
    updates.WorkerLost: _worker_lost,
    updates.WorkerRegistered: _worker_registered,
    updates.TaskLost: _task_lost,
    updates.ClientDropped: _client_dropped,
    SaveFailed: _save_failed,
    updates.IterationFinished: _iteration_finished,
}
