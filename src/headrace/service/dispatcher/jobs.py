"""Deciders: jobs, their iterations, and the tasks that carry them out.

An iteration is one pass of a job, shared by all its clients. Each worker has one task of each
unfinished iteration, one that joins later too. An iteration is finished when no task is running
and at least one reached its end. Where all tasks were lost and none reached its end, it goes on
when a worker joins: until then its clients wait, as they do where there was no worker at all.
"""

from __future__ import annotations

from headrace.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.liveness import leave
from headrace.service.dispatcher.state import (
    Dataset,
    DispatcherState,
    Iteration,
    Job,
    TaskPhase,
)
from headrace.service.dispatcher.updates import Update

__all__ = ["client_heartbeat", "close_iteration", "finish_task", "get_task", "open_iteration"]

_OFFERED = (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)


def open_iteration(
    state: DispatcherState, request: messages.OpenIteration, moment: Moment
) -> Decision:
    """Let a client join an iteration, which is made if it does not exist.

    A client reads one iteration at a time: opening another one closes the one before.

    Raises:
        NotFoundError: The dataset is not registered.
        AlreadyExistsError: The job's name belongs to a job that differs.
        FailedPreconditionError: The dataset cannot be processed in this mode.
    """
    dataset = state.dataset(request.dataset_id)
    _check_mode(dataset, request)
    job = _find_job(state, request)
    if job is not None:
        _check_same_job(state, job, dataset, request)
    iteration_id = None if job is None else job.iterations.get(request.repetition)
    current = state.clients.get(request.client_id)
    if current is not None and current == iteration_id:
        return Decision(reply=_opened(state, state.iterations[current]))
    facts: list[Update] = [] if current is None else leave(state, request.client_id)
    if job is not None and updates.JobForgotten(job.job_id) in facts:
        # The client's own job lives on when the client goes to another repetition of it.
        facts.remove(updates.JobForgotten(job.job_id))
    if iteration_id is not None:
        iteration = state.iterations.get(iteration_id)
        if iteration is None or iteration.finished:
            reply = messages.IterationOpened(iteration_id=iteration_id, tasks=(), finished=True)
            if iteration is not None:
                facts.append(_joined(request, iteration_id))
            return Decision(updates=tuple(facts), reply=reply)
        facts.append(_joined(request, iteration_id))
        return Decision(updates=tuple(facts), reply=_opened(state, iteration))
    job_id = state.next_job if job is None else job.job_id
    if job is None:
        facts.append(_job_created(job_id, request))
    return _create_iteration(state, request, job_id, facts)


def _create_iteration(
    state: DispatcherState, request: messages.OpenIteration, job_id: int, facts: list[Update]
) -> Decision:
    iteration_id = state.next_iteration
    facts.append(
        updates.IterationCreated(
            iteration_id=iteration_id, job_id=job_id, repetition=request.repetition
        )
    )
    tasks = []
    for task_id, worker in enumerate(state.workers.values(), start=state.next_task):
        facts.append(
            updates.TaskCreated(
                task_id=task_id, iteration_id=iteration_id, worker_id=worker.worker_id
            )
        )
        tasks.append(
            messages.TaskAddress(
                task_id=task_id, worker_id=worker.worker_id, worker_address=worker.address
            )
        )
    facts.append(_joined(request, iteration_id))
    reply = messages.IterationOpened(iteration_id=iteration_id, tasks=tuple(tasks), finished=False)
    return Decision(updates=tuple(facts), reply=reply)


def _find_job(state: DispatcherState, request: messages.OpenIteration) -> Job | None:
    """Return the job of that name, or the client's own."""
    if request.job_name is not None:
        job_id = state.names.get(request.job_name)
    else:
        job_id = state.owners.get(request.client_id)
    return None if job_id is None else state.jobs[job_id]


def _check_mode(dataset: Dataset, request: messages.OpenIteration) -> None:
    mode = request.processing_mode
    if mode not in _OFFERED:
        names = {int(policy): policy.name for policy in ShardingPolicy}
        raise FailedPreconditionError(
            "this dispatcher offers the processing modes OFF and DYNAMIC; got "
            f"{names.get(mode, mode)}"
        )
    if mode == ShardingPolicy.DYNAMIC and not dataset.splittable:
        raise FailedPreconditionError(
            f"dataset {dataset.dataset_id} cannot be read with ShardingPolicy.DYNAMIC: it has a "
            "source that cannot be split (such as a generator that one worker must run whole, or a "
            "dataset read from a service). Use ShardingPolicy.OFF, or a source with indices: "
            "files, arrays, a range, Dataset.from_source"
        )


def _check_same_job(
    state: DispatcherState, job: Job, dataset: Dataset, request: messages.OpenIteration
) -> None:
    known = state.datasets[job.dataset_id]
    differences = []
    if job.processing_mode != request.processing_mode:
        differences.append(
            f"Existing processing mode: <{ShardingPolicy(job.processing_mode).name}>; "
            f"got <{ShardingPolicy(request.processing_mode).name}>"
        )
    if job.target_workers != request.target_workers:
        differences.append(
            f"Existing target workers: <{job.target_workers}>; got <{request.target_workers}>"
        )
    if known.fingerprint != dataset.fingerprint:
        differences.append(
            f"Existing dataset: <{known.dataset_id}>; got <{dataset.dataset_id}>, which says "
            "something else"
        )
    if differences:
        name = request.job_name or f"(client {request.client_id}'s own)"
        raise AlreadyExistsError(
            f"Tried to create job with name {name}, but found an existing job with different "
            f"parameters: {'; '.join(differences)}. Choose another job_name."
        )


def _job_created(job_id: int, request: messages.OpenIteration) -> updates.JobCreated:
    return updates.JobCreated(
        job_id=job_id,
        name=request.job_name,
        owner=request.client_id if request.job_name is None else None,
        dataset_id=request.dataset_id,
        processing_mode=request.processing_mode,
        target_workers=request.target_workers,
    )


def _joined(request: messages.OpenIteration, iteration_id: int) -> updates.ClientJoined:
    return updates.ClientJoined(client_id=request.client_id, iteration_id=iteration_id)


def _opened(state: DispatcherState, iteration: Iteration) -> messages.IterationOpened:
    return messages.IterationOpened(
        iteration_id=iteration.iteration_id,
        tasks=_addresses(state, iteration),
        finished=iteration.finished,
    )


def _addresses(state: DispatcherState, iteration: Iteration) -> tuple[messages.TaskAddress, ...]:
    return tuple(
        messages.TaskAddress(
            task_id=task.task_id,
            worker_id=task.worker_id,
            worker_address=state.workers[task.worker_id].address,
        )
        for task in state.running_tasks(iteration)
    )


def client_heartbeat(
    state: DispatcherState, request: messages.ClientHeartbeat, moment: Moment
) -> Decision:
    """Tell a client what there is to read."""
    iteration = state.client_iteration(request.client_id)
    return Decision(
        reply=messages.ClientUpdate(tasks=_addresses(state, iteration), finished=iteration.finished)
    )


def close_iteration(
    state: DispatcherState, request: messages.CloseIteration, moment: Moment
) -> Decision:
    """Let a client go; one that is not known has gone already."""
    if request.client_id not in state.clients:
        return Decision()
    return Decision(updates=tuple(leave(state, request.client_id)))


def get_task(state: DispatcherState, request: messages.GetTask, moment: Moment) -> Decision:
    """Tell a worker what a task of its own is about.

    Raises:
        NotFoundError: There is no such task for this worker to run.
    """
    task = state.task(request.task_id)
    if task.worker_id != request.worker_id or task.phase is not TaskPhase.RUNNING:
        raise NotFoundError(
            f"task {request.task_id} is not for worker {request.worker_id} to run: it is "
            f"{task.phase.name.lower()} on worker {task.worker_id}"
        )
    iteration = state.iterations[task.iteration_id]
    job = state.jobs[iteration.job_id]
    return Decision(
        reply=messages.TaskDefinition(
            task_id=task.task_id,
            iteration_id=iteration.iteration_id,
            dataset_id=job.dataset_id,
            processing_mode=job.processing_mode,
            repetition=iteration.repetition,
        )
    )


def finish_task(state: DispatcherState, request: messages.FinishTask, moment: Moment) -> Decision:
    """Note that a task reached its end; of one that is over already, nothing is noted.

    Raises:
        NotFoundError: There is no such task, or it is another worker's.
    """
    task = state.task(request.task_id)
    if task.worker_id != request.worker_id:
        raise NotFoundError(
            f"task {request.task_id} belongs to worker {task.worker_id}, not to {request.worker_id}"
        )
    if task.phase is not TaskPhase.RUNNING:
        return Decision()
    facts: list[Update] = [updates.TaskFinished(task_id=task.task_id)]
    running = state.running_tasks(state.iterations[task.iteration_id])
    if len(running) == 1:
        facts.append(updates.IterationFinished(iteration_id=task.iteration_id))
    return Decision(updates=tuple(facts))
