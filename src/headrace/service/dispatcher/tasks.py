"""Deciders for tasks: their definition and their end."""

from __future__ import annotations

import hmac

from headrace.errors import FailedPreconditionError, NotFoundError, UnauthenticatedError
from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy_selection import policy_of
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, TaskPhase
from headrace.service.ranges import Ranges, drop_below, subtract, total_length, union

__all__ = ["fail_task", "finish_task", "get_task", "get_worker_task"]

_MAX_REASON_LENGTH = 4096


def get_worker_task(
    state: DispatcherState,
    request: messages.GetSplit
    | messages.FinishTask
    | messages.FailTask
    | messages.ReturnSplits
    | messages.ReportDepartedClient
    | messages.CommitFiles,
) -> DispatcherTask:
    """Return the task that a worker's request names.

    Raises:
        FailedPreconditionError: If another dispatcher, or one without its journal, created the
            task.
        UnauthenticatedError: If the token is not the task's.
        NotFoundError: If the task does not exist, or belongs to another worker.
    """
    dispatcher_id, dash, _ = request.task_token.partition("-")
    if dash and dispatcher_id != state.dispatcher_id:
        raise FailedPreconditionError(
            f"task {request.task_id} was created by another dispatcher, or before the dispatcher "
            "was restarted without its journal; its iteration no longer exists. Open the iteration "
            "again; set `work_dir` and `fault_tolerant_mode=True` on the dispatcher so that jobs "
            "survive restarts"
        )
    known = state.tasks.get(request.task_id)
    token = state.task_token(request.task_id) if known is None else known.task_token
    if not hmac.compare_digest(request.task_token.encode(errors="replace"), token.encode()):
        raise UnauthenticatedError(
            f"wrong task_token for task {request.task_id}: only the worker and the clients that "
            "the dispatcher assigned to the task receive its token"
        )
    task = state.task(request.task_id)
    if task.worker_id != request.worker_id:
        raise NotFoundError(
            f"task {request.task_id} belongs to worker {task.worker_id}, not to {request.worker_id}"
        )
    return task


def get_task(
    state: DispatcherState, request: messages.GetTask, context: DecisionContext
) -> DispatcherDecision:
    """Return the definition of a task to its worker.

    Raises:
        NotFoundError: If the worker has no such task to run.
    """
    task = state.task(request.task_id)
    iteration = state.iterations[task.iteration_id]
    is_finished = task.phase is TaskPhase.FINISHED
    # A task may finish before its worker first requests it, if nothing was left to assign.
    is_empty = is_finished and iteration.assigns_splits and not task.assigned.num_assigned
    if task.worker_id != request.worker_id or not (task.phase is TaskPhase.RUNNING or is_empty):
        raise NotFoundError(
            f"worker {request.worker_id} cannot run task {request.task_id}: it is "
            f"{task.phase.name.lower()} on worker {task.worker_id}"
        )
    job = state.jobs[iteration.job_id]
    policy, options = policy_of(state, iteration), job.options
    definition = messages.TaskDefinition(
        task_id=task.task_id,
        iteration_id=iteration.iteration_id,
        dataset_id=job.dataset_id,
        digest=state.datasets[job.dataset_id].digest,
        epoch=iteration.epoch,
        seed=policy.seed(state, iteration, task),
        fixed_seeds=iteration.fixed_seeds,
        task_token=task.task_token,
        assigns_splits=iteration.assigns_splits,
        shard_kind=policy.shard_kind,
        delivery_policy=policy.delivery_policy,
        has_element_ids=iteration.pool.exactly_once,
        remainder=options.remainder,
        cost_fn_digest=options.cost_fn_digest,
        partition_mode=options.partition_mode,
    )
    return DispatcherDecision(reply=policy.extend_definition(definition, state, task))


def finish_task(
    state: DispatcherState, request: messages.FinishTask, context: DecisionContext
) -> DispatcherDecision:
    """Record that a task reached its end; repeated requests change nothing."""
    task = get_worker_task(state, request)
    assigned = task.assigned
    if task.phase is not TaskPhase.RUNNING:
        return DispatcherDecision()
    iteration = state.iterations[task.iteration_id]
    new_events: list[AnyEvent] = []
    if request.cut_short and not state.workers[task.worker_id].draining:
        # The worker is draining, and its own message about it has not arrived; the dispatcher may
        # have been down. The dataset has not reached its end.
        new_events.append(events.WorkerDraining(worker_id=task.worker_id))
    unreceived = _unreceived_assignments(task, request.num_assigned)
    if unreceived:
        new_events.append(events.SplitsReturned(task_id=task.task_id, splits=unreceived))
    num_remaining = assigned.num_held - total_length(unreceived)
    reason = policy_of(state, iteration).incomplete_reason(task, num_remaining)
    if reason:
        return DispatcherDecision(events=(events.TaskFailed(task_id=task.task_id, reason=reason),))
    cut_short = request.cut_short and not iteration.assigns_splits
    num_done = (
        request.num_done
        if iteration.pool.exactly_once and request.num_done <= assigned.num_assigned
        else 0
    )
    new_events.append(
        events.TaskFinished(
            task_id=task.task_id, cut_short=cut_short, num_done=max(assigned.num_done, num_done)
        )
    )
    return DispatcherDecision(events=tuple(new_events))


def _unreceived_assignments(task: DispatcherTask, num_assigned: int | None) -> Ranges:
    """Return the splits, in assignment order, that were assigned but not received."""
    assigned = task.assigned
    if num_assigned is None or not 0 <= num_assigned < assigned.num_assigned:
        return ()
    unreceived = drop_below(((num_assigned, assigned.num_assigned),), assigned.num_done)
    return subtract(unreceived, union((*assigned.returned, *assigned.delivered)))


def fail_task(
    state: DispatcherState, request: messages.FailTask, context: DecisionContext
) -> DispatcherDecision:
    """Record that a task ended with an error; undelivered splits are lost."""
    task = get_worker_task(state, request)
    if task.phase is not TaskPhase.RUNNING:
        return DispatcherDecision()
    reason = request.reason[:_MAX_REASON_LENGTH]
    return DispatcherDecision(events=(events.TaskFailed(task_id=task.task_id, reason=reason),))
