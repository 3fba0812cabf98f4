"""Deciders: jobs and their iterations begin."""

from __future__ import annotations

import msgspec

from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.assignment import assign, staying
from headrace.service.dispatcher.clients import addresses, leave
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.state import Dataset, DispatcherState, Iteration, Job, Readers
from headrace.service.dispatcher.updates import Update

__all__ = ["open_iteration"]

_OFFERED = (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
_DEEPEST_PASS = 32
_NUMBERS = range(-(1 << 63), 1 << 63)


def open_iteration(
    state: DispatcherState, request: messages.OpenIteration, moment: Moment
) -> Decision:
    """Let a client join an iteration, which is made if it does not exist.

    A client reads one iteration at a time: opening another one closes the one before.

    Raises:
        NotFoundError: The dataset is not registered.
        AlreadyExistsError: The job's name belongs to a job that differs.
        FailedPreconditionError: The dataset cannot be processed in this mode.
        ValueError: The request makes no sense.
    """
    _check_sense(request)
    dataset = state.dataset(request.dataset_id)
    _check_mode(dataset, request)
    job = _find_job(state, request)
    if job is not None:
        _check_same_job(state, job, dataset, request)
    iteration_id = None if job is None else job.iterations.get(request.pass_number)
    current = state.clients.get(request.client_id)
    if current is not None and current == iteration_id:
        return Decision(reply=_opened(state, state.iterations[current], moment))
    facts: list[Update] = [] if current is None else leave(state, request.client_id)
    if job is not None and updates.JobForgotten(job.job_id) in facts:
        # The client's own job lives on when the client goes to another pass of it.
        facts.remove(updates.JobForgotten(job.job_id))
    if job is not None and iteration_id is not None:
        facts.append(_joined(request, iteration_id))
        reply = _opened(state, state.iterations[iteration_id], moment)
        return Decision(updates=tuple(facts), reply=reply)
    if job is not None and job.is_over(request.pass_number):
        over = _over(job, 0, job.forgotten.get(request.pass_number))
        return Decision(updates=tuple(facts), reply=over)
    job_id = state.next_job if job is None else job.job_id
    if job is None:
        facts.append(_job_created(job_id, request))
    return _create_iteration(state, request, job_id, facts, moment)


def _create_iteration(
    state: DispatcherState,
    request: messages.OpenIteration,
    job_id: int,
    facts: list[Update],
    moment: Moment,
) -> Decision:
    iteration_id = state.next_iteration
    facts.append(
        updates.IterationCreated(
            iteration_id=iteration_id,
            job_id=job_id,
            pass_number=request.pass_number,
            seed=request.seed,
        )
    )
    created = assign(state, [iteration_id], staying(state))
    facts += created
    facts.append(_joined(request, iteration_id))
    tasks = tuple(
        messages.TaskAddress(
            task_id=task.task_id,
            worker_id=task.worker_id,
            worker_address=state.workers[task.worker_id].address,
            ticket=state.ticket(task.task_id),
        )
        for task in created
    )
    reply = messages.IterationOpened(
        iteration_id=iteration_id,
        tasks=tasks,
        seed=request.seed,
        finished=False,
        job_name=request.job_name or "",
        lease=moment.limits.client_timeout,
    )
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
    if mode == ShardingPolicy.DYNAMIC and dataset.positions is None:
        raise FailedPreconditionError(
            f"dataset {dataset.dataset_id} cannot be read with ShardingPolicy.DYNAMIC: it has no "
            "positions that could be dealt, because it reads another service or has a source that "
            "cannot be split. Use ShardingPolicy.OFF, or a source with indices: files, arrays, a "
            "range, Dataset.from_source"
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


def _opened(
    state: DispatcherState, iteration: Iteration, moment: Moment
) -> messages.IterationOpened:
    job = state.jobs[iteration.job_id]
    if iteration.finished:
        over = _over(job, iteration.iteration_id, iteration.readers)
        return msgspec.structs.replace(over, finished_by=iteration.failed or over.finished_by)
    return messages.IterationOpened(
        iteration_id=iteration.iteration_id,
        tasks=addresses(state.tasks_of(iteration)),
        seed=iteration.seed,
        finished=False,
        job_name=job.name or "",
        lease=moment.limits.client_timeout,
    )


def _over(job: Job, iteration_id: int, readers: Readers | None) -> messages.IterationOpened:
    if readers is None:
        finished_by = "nobody"
    elif readers.clients == 1:
        finished_by = f"client {readers.first}"
    else:
        others = "another" if readers.clients == 2 else f"{readers.clients - 1} others"
        finished_by = f"client {readers.first} and {others}"
    return messages.IterationOpened(
        iteration_id=iteration_id,
        tasks=(),
        seed=0,
        finished=True,
        job_name=job.name or "",
        finished_by=finished_by,
    )


def _check_sense(request: messages.OpenIteration) -> None:
    if not request.client_id:
        raise ValueError("a client needs an id; got client_id=''")
    if request.job_name == "":
        raise ValueError("job_name='' must be None or a name")
    if request.seed not in _NUMBERS:
        raise ValueError(f"seed={request.seed} must fit into 64 bits with a sign")
    numbers = request.pass_number
    if len(numbers) > _DEEPEST_PASS or any(not 0 <= each < _NUMBERS.stop for each in numbers):
        raise ValueError(
            f"pass_number={numbers[:_DEEPEST_PASS]} must be at most {_DEEPEST_PASS} numbers, none "
            "of them negative"
        )
