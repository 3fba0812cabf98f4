"""Garbage collection, which bounds the size of a dispatcher that runs for months.

Iterations are removed when they had no client for `DispatcherLimits.gc_timeout`.

Anonymous datasets, which `distribute` registers, are removed when they were unused for
`DispatcherLimits.dataset_timeout`; datasets whose id was given to a caller (`register_dataset`) are
kept. A plan is removed with its last dataset; a plan without a dataset, and without a job that uses
it as cost function, after `DispatcherLimits.client_timeout`. All plans together may take
`DispatcherLimits.max_plan_bytes`: to make room for another one, anonymous datasets unused for
`DispatcherLimits.client_timeout` are removed early, the longest unused first.

An iteration keeps its most recently lost tasks; the losses of older ones are remembered without
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import DecisionContext
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    TaskPhase,
)

__all__ = ["discard_idle_iterations", "forget_lost_tasks", "forget_unused", "make_room_for_plan"]

_MAX_LOST_TASKS = 200
_MIN_FORGOTTEN_TASKS = 50


def discard_idle_iterations(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Discard iterations that had no client for too long, and forget the finished ones.

    A named DYNAMIC iteration is kept unless `DispatcherLimits.gc_dynamic` is set: restarting it
    would deliver its elements twice.
    """
    timeout = context.limits.gc_timeout
    if timeout is None:
        return []
    return [
        events.IterationForgotten(iteration_id=iteration.iteration_id)
        if iteration.finished
        else events.IterationDiscarded(iteration_id=iteration.iteration_id)
        for iteration in _idle_iterations(state, context, timeout)
        if iteration.finished or context.limits.gc_dynamic or not iteration.assigns_splits
    ]


def _idle_iterations(
    state: DispatcherState, context: DecisionContext, timeout: float
) -> Iterable[JobIteration]:
    for iteration_id, idle_since in context.soft_state.idle_since.items():
        iteration = state.iterations[iteration_id]
        is_client_job = not state.jobs[
            iteration.job_id
        ].save_id  # a save's is removed with the save
        if is_client_job and not iteration.clients and context.now - idle_since > timeout:
            yield iteration


def forget_unused(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Forget datasets and plans that were unused for long."""
    timeout, idle_times = context.limits.dataset_timeout, context.soft_state.idle_times
    idle_datasets = _idle_datasets(state)
    in_use = state.plans_in_use
    unreferenced = [digest for digest in state.plan_sizes if digest not in in_use]
    idle_times.watch([*idle_datasets, *unreferenced], context.now)
    new_events: list[AnyEvent] = []
    if timeout is not None:
        new_events += [
            events.DatasetForgotten(dataset_id=dataset_id)
            for dataset_id in idle_datasets
            if idle_times.idle_seconds(dataset_id, context.now) > timeout
        ]
    new_events += [
        events.PlanForgotten(digest=digest)
        for digest in unreferenced
        if idle_times.idle_seconds(digest, context.now) > context.limits.client_timeout
    ]
    return new_events


def _idle_datasets(state: DispatcherState) -> list[str]:
    used = {job.dataset_id for job in state.jobs.values()}
    return [
        dataset_id
        for dataset_id, dataset in state.datasets.items()
        if dataset.anonymous and dataset_id not in used
    ]


def make_room_for_plan(
    state: DispatcherState, digest: bytes, size: int, context: DecisionContext
) -> list[events.DatasetForgotten]:
    """Return the datasets to forget for a plan of `size` bytes that is about to be received.

    Raises:
        FailedPreconditionError: If there is no room for it beside the plans in use.
    """
    limits, idle_times = context.limits, context.soft_state.idle_times
    uploading = sum(
        upload.total_bytes for key, upload in context.soft_state.uploads.items() if key != digest
    )
    excess = sum(state.plan_sizes.values()) + uploading + size - limits.max_plan_bytes
    idle_seconds = {key: idle_times.idle_seconds(key, context.now) for key in _idle_datasets(state)}
    users = Counter(dataset.digest for dataset in state.datasets.values())
    users.update(job.options.cost_fn_digest for job in state.jobs.values())
    new_events = []
    for dataset_id in sorted(idle_seconds, key=idle_seconds.__getitem__, reverse=True):
        if excess <= 0 or idle_seconds[dataset_id] <= limits.client_timeout:
            break
        new_events.append(events.DatasetForgotten(dataset_id=dataset_id))
        plan = state.datasets[dataset_id].digest
        users[plan] -= 1
        if not users[plan]:
            excess -= state.plan_sizes[plan]
    if excess > 0:
        raise FailedPreconditionError(
            f"no room for a plan of {size:,} bytes: it exceeds "
            f"max_plan_bytes={limits.max_plan_bytes:,} by {excess:,} bytes. Plans of datasets that "
            "were registered with `register_dataset`, are being read, or were used in the last "
            f"{limits.client_timeout:g} s cannot be removed. Let workers read files instead of "
            "arrays in the plan, or start the dispatcher with a larger `max_plan_bytes` "
            "(--max-plan-bytes)"
        )
    return new_events


def forget_lost_tasks(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Forget the oldest lost tasks of iterations that have had very many."""
    new_events: list[AnyEvent] = []
    for iteration_id, iteration in state.iterations.items():
        if len(iteration.tasks) <= _MAX_LOST_TASKS + _MIN_FORGOTTEN_TASKS or iteration.finished:
            continue
        lost = [
            task.task_id for task in state.tasks_of(iteration) if _may_be_forgotten(iteration, task)
        ]
        if len(lost) > _MAX_LOST_TASKS:
            new_events.append(
                events.TasksForgotten(
                    iteration_id=iteration_id, task_ids=tuple(lost[:-_MAX_LOST_TASKS])
                )
            )
    return new_events


def _may_be_forgotten(iteration: JobIteration, task: DispatcherTask) -> bool:
    is_reported = task.phase is TaskPhase.LOST and not (
        task.awaiting_reports or task.assigned.unacknowledged
    )
    return is_reported and not iteration.recoverable_splits(task)
