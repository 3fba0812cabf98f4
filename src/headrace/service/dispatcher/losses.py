"""Losses of a finished iteration: number of splits, workers, clients and reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.event_report import describe_job, pluralize
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    MissingSplits,
    TaskPhase,
)
from headrace.service.epochs import format_epoch
from headrace.service.modes.distributed_save.records import SaveFailed
from headrace.service.ranges import (
    Ranges,
    intersect,
    subtract,
    total_length,
    union,
)
from headrace.versions import own_versions, python_mismatch, release_mismatch

__all__ = ["log_message", "lost_copies", "lost_splits"]


_MAX_NAMED = 20

_MAX_RANGES = 1000
"""Maximum number of ranges of lost splits that are listed; the number of lost splits is always
exact."""


def lost_copies(
    iteration: JobIteration, tasks: list[DispatcherTask]
) -> tuple[messages.LostSplits, ...]:
    """Return the copies that ended early, of a finished iteration with these tasks."""
    forgotten = [_loss(missing, (), is_copy=True) for missing in iteration.missing_splits]
    cut_short = [_cut_short(task) for task in tasks if task.cut_short]
    return (
        *forgotten,
        *cut_short,
        *(_loss(task, (), is_copy=True) for task in _lost_copies(tasks)),
    )


def lost_splits(
    iteration: JobIteration, tasks: list[DispatcherTask]
) -> tuple[messages.LostSplits, ...]:
    """Return the missing splits of a finished iteration with these tasks."""
    pool = iteration.pool
    lost = [
        each
        for missing in iteration.missing_splits
        for each in _split_losses(iteration, missing, missing.splits)
    ]
    for task in tasks:
        lost += _split_losses(iteration, task, task.assigned.to_split_indices(task.missing_splits))
    if iteration.num_older_missing:
        oldest = iteration.missing_splits[0]
        lost.append(
            msgspec.structs.replace(_loss(oldest, ()), num_splits=iteration.num_older_missing)
        )
    failed = [task for task in tasks if task.phase is TaskPhase.FAILED]
    if failed:
        # Splits that every eligible worker failed to process.
        end = pool.next_split if iteration.reached_end else pool.num_splits or 0
        partial_splits = ((split, split + 1) for split in pool.partial_splits)
        remaining = (*pool.returned, *partial_splits, (pool.next_split, end))
        lost.append(_loss(failed[-1], union(each for each in remaining if each[0] < each[1])))
    return tuple(each for each in lost if each.num_splits)


def _lost_copies(tasks: list[DispatcherTask]) -> list[DispatcherTask]:
    """Return the copies of the last attempt that ended early."""
    last = max((task.attempt for task in tasks), default=0)
    return [task for task in tasks if task.phase is TaskPhase.LOST and task.attempt == last]


def _cut_short(task: DispatcherTask) -> messages.LostSplits:
    return messages.LostSplits(
        worker_address=task.address,
        task_id=task.task_id,
        splits=(),
        num_splits=0,
        is_copy=True,
        # Regardless of what happened to the worker later.
        reason="worker draining",
    )


def _split_losses(
    iteration: JobIteration, source: DispatcherTask | MissingSplits, lost: Ranges
) -> list[messages.LostSplits]:
    abandoned = intersect(lost, iteration.pool.abandoned)
    died_workers = tuple(
        address
        for start, stop in abandoned
        for split in range(start, stop)
        for address in iteration.pool.died_workers.get(split, ())
    )
    return [
        _loss(source, subtract(lost, abandoned)),
        _loss(source, abandoned, abandoned=True, died_workers=died_workers[-_MAX_NAMED:]),
    ]


def _loss(
    source: DispatcherTask | MissingSplits,
    splits: Ranges,
    *,
    abandoned: bool = False,
    died_workers: tuple[str, ...] = (),
    is_copy: bool = False,
) -> messages.LostSplits:
    client_id = source.client_id if isinstance(source, MissingSplits) else ""
    return messages.LostSplits(
        worker_address=source.address,
        task_id=source.task_id,
        splits=splits[:_MAX_RANGES],
        num_splits=total_length(splits),
        abandoned=abandoned,
        died_workers=died_workers,
        client_id=client_id,
        is_copy=is_copy,
        reason="" if client_id else source.reason,
    )


# --- log messages about losses --------------------------------------------------------------------


def log_message(state: DispatcherState, event: AnyEvent) -> str | None:
    """Return the warning for an event that is about to be applied; None if there is none."""
    describe = _LOG_MESSAGES.get(type(event))
    return None if describe is None else describe(state, event)


def _worker_lost(state: DispatcherState, event: events.WorkerLost) -> str:
    worker = state.workers[event.worker_id]
    return (
        f"worker {worker.address} lost: {event.reason}; "
        f"{pluralize(len(worker.tasks), 'running task')} lost. A restarted process registers as a "
        "new worker."
    )


def _worker_registered(state: DispatcherState, event: events.WorkerRegistered) -> str | None:
    if event.worker_id in state.workers:
        return None
    worker = f"worker {event.address} runs {event.versions}"
    unsupported = {
        iteration.job_id: dataset
        for iteration in state.iterations.values()
        if not iteration.finished
        and python_mismatch(
            event.versions.python, (dataset := state.dataset_of(iteration)).python_version
        )
    }
    if unsupported:
        versions = " and ".join(sorted({each.python_version for each in unsupported.values()}))
        jobs = " and ".join(
            describe_job(state, state.jobs[job_id]) for job_id in sorted(unsupported)
        )
        return (
            f"{worker} and gets no tasks of {jobs}, registered with Python {versions}: run clients "
            "and workers on the same minor version"
        )
    dispatcher_versions = own_versions()
    if release_mismatch(event.versions, dispatcher_versions):
        return (
            f"{worker}, but this dispatcher runs {dispatcher_versions}: use one release "
            "after an upgrade"
        )
    return None


def _task_lost(state: DispatcherState, event: events.TaskLost) -> str | None:
    task = state.tasks[event.task_id]
    if state.jobs[state.iterations[task.iteration_id].job_id].save_id:
        return None  # the failure of the save is logged, not the end of each task
    return (
        f"task {event.task_id} of {_describe_iteration(state, task)} on worker {task.address} "
        f"lost: {event.reason}"
    )


def _departed_client_reported(
    state: DispatcherState, event: events.DepartedClientReported
) -> str | None:
    if not event.lost:
        return None
    task = state.tasks[event.task_id]
    return (
        f"{_describe_iteration(state, task)}: up to {pluralize(total_length(event.lost), 'split')} "
        f"lost: sent to client {event.client_id}, which has left or expired"
    )


def _save_failed(state: DispatcherState, event: SaveFailed) -> str:
    return f"save into {state.saves[event.save_id].path!r} failed: {event.error}"


def _iteration_finished(state: DispatcherState, event: events.IterationFinished) -> str | None:
    save = state.jobs[state.iterations[event.iteration_id].job_id].save_id
    if not (save and event.failure_reason) or state.saves[save].error:
        return None
    return f"save into {state.saves[save].path!r} failed: {event.failure_reason}"


def _describe_iteration(state: DispatcherState, task: DispatcherTask) -> str:
    iteration = state.iterations[task.iteration_id]
    job = state.jobs[iteration.job_id]
    if job.save_id:
        return describe_job(state, job)
    return f"{describe_job(state, job)}, {format_epoch(iteration.epoch)}"


_LOG_MESSAGES: dict[type, Callable[[DispatcherState, Any], str | None]] = {
    events.WorkerLost: _worker_lost,
    events.WorkerRegistered: _worker_registered,
    events.TaskLost: _task_lost,
    events.DepartedClientReported: _departed_client_reported,
    SaveFailed: _save_failed,
    events.IterationFinished: _iteration_finished,
}
