"""Applies facts: the only code that changes a state. It never decides.

Rule. A fact that the state contradicts is an error of the dispatcher's own. It is reported with
      what the state says of everything that the fact names; the state is then no longer to be
      used, and whoever holds the journal reads it again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.service.dispatcher import apply_settled, apply_units, updates
from headrace.service.dispatcher.apply_units import (
    forget_done,
    give_back_kept,
    give_up,
    running_task,
    touch_first,
)
from headrace.service.dispatcher.beginnings import leave_out
from headrace.service.dispatcher.contradiction import IllegalFactError, illegal
from headrace.service.dispatcher.fact import require
from headrace.service.dispatcher.slots import configured, reading_shards
from headrace.service.dispatcher.state import (
    LEFT,
    PASSES_REMEMBERED,
    Dataset,
    DispatcherState,
    Iteration,
    Job,
    Readers,
    SplitPool,
    Task,
    TaskPhase,
    Worker,
)
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.coordinated_reads import apply as apply_rounds
from headrace.service.modes.distributed_save import apply as apply_saves
from headrace.service.ranges import united

__all__ = ["IllegalFactError", "apply"]


def apply(state: DispatcherState, fact: Update) -> None:
    """Change the state by one fact.

    Raises:
        IllegalFactError: The state contradicts the fact. It may be half changed.
    """
    try:
        _APPLY[type(fact)](state, fact)
    except Exception as error:
        raise illegal(state, fact, error) from error


def _dispatcher_started(state: DispatcherState, fact: updates.DispatcherStarted) -> None:
    require(not state.incarnation, "a dispatcher starts with nothing only once")
    state.incarnation = fact.incarnation
    state.secret = fact.secret


def _plan_stored(state: DispatcherState, fact: updates.PlanStored) -> None:
    state.plans[fact.digest] = fact.size


def _dataset_registered(state: DispatcherState, fact: updates.DatasetRegistered) -> None:
    require(fact.digest in state.plans, "its plan was never stored")
    require(fact.dataset_id not in state.datasets, "the id is taken")
    state.datasets[fact.dataset_id] = msgspec.convert(
        msgspec.structs.asdict(fact), Dataset, strict=True
    )
    state.tokens[fact.token] = fact.dataset_id
    while str(state.next_dataset) in state.datasets:
        state.next_dataset += 1


def _dataset_kept(state: DispatcherState, fact: updates.DatasetKept) -> None:
    state.datasets[fact.dataset_id].anonymous = False


def _dataset_forgotten(state: DispatcherState, fact: updates.DatasetForgotten) -> None:
    dataset = state.datasets.pop(fact.dataset_id)
    require(dataset.anonymous, "somebody may know its id")
    used = any(job.dataset_id == fact.dataset_id for job in state.jobs.values())
    require(not used, "a job reads it")
    del state.tokens[dataset.token]
    if dataset.digest not in state.plans_in_use:
        del state.plans[dataset.digest]


def _plan_forgotten(state: DispatcherState, fact: updates.PlanForgotten) -> None:
    require(fact.digest not in state.plans_in_use, "a dataset or a job has it")
    del state.plans[fact.digest]


def _slots_configured(state: DispatcherState, fact: updates.SlotsConfigured) -> None:
    require(not reading_shards(state), "shards of the list before are read")
    state.slots = configured(fact.patterns, state.workers.values())


def _worker_registered(state: DispatcherState, fact: updates.WorkerRegistered) -> None:
    known = state.workers.get(fact.worker_id)
    if known is None:
        require(fact.address not in state.addresses, "the address is another worker's")
        known = Worker(
            worker_id=fact.worker_id,
            address=fact.address,
            tags=fact.tags,
            versions=fact.versions,
        )
        state.workers[fact.worker_id] = known
        state.addresses[fact.address] = fact.worker_id
        if fact.slot is not None:
            slot = state.slots[fact.slot]
            require(not slot.worker_id, "the slot is another worker's")
            slot.worker_id, slot.address = fact.worker_id, fact.address
    known.tags = fact.tags


def _worker_leaving(state: DispatcherState, fact: updates.WorkerLeaving) -> None:
    worker = state.workers[fact.worker_id]
    require(not worker.leaving, "it is leaving already")
    worker.leaving = True
    for task_id in worker.tasks:
        iteration = state.iterations[state.tasks[task_id].iteration_id]
        iteration.takers -= 1
        iteration.leavers += 1


def _worker_gone(state: DispatcherState, fact: updates.WorkerLost | updates.WorkerLeft) -> None:
    worker = state.workers[fact.worker_id]
    reason = LEFT if isinstance(fact, updates.WorkerLeft) else fact.reason
    over = worker.tasks | worker.finished
    for task_id in [*worker.tasks]:
        _end(state, task_id, TaskPhase.LOST)
    for task_id in over:
        state.tasks[task_id].reason = reason
        state.tasks[task_id].silent = isinstance(fact, updates.WorkerLost) and fact.silent
        give_up(state, state.tasks[task_id])
    for task in state.tasks.values():
        if task.worker_id == fact.worker_id and task.phase is TaskPhase.FAILED:
            # Its clients no longer get the last answers from there (`Policy.is_kept`).
            state.iterations[task.iteration_id].version += 1
    del state.workers[fact.worker_id], state.addresses[worker.address]
    for slot in state.slots:
        if slot.worker_id == fact.worker_id:
            slot.worker_id = ""


def _end(state: DispatcherState, task_id: int, phase: TaskPhase) -> Task:
    task = running_task(state, task_id)
    iteration, worker = state.iterations[task.iteration_id], state.workers[task.worker_id]
    task.phase = phase
    worker.tasks.remove(task_id)
    iteration.splits.held -= task.splits.held
    if worker.leaving:
        iteration.leavers -= 1
    else:
        iteration.takers -= 1
    iteration.version += 1
    return task


def _job_created(state: DispatcherState, fact: updates.JobCreated) -> None:
    require(fact.job_id == state.next_job, "its number is not the next one")
    require(fact.dataset_id in state.datasets, "its dataset is not known")
    cost_plan = fact.terms.cost_plan
    require(not cost_plan or cost_plan in state.plans, "its cost function was never stored")
    state.jobs[fact.job_id] = Job(
        job_id=fact.job_id,
        name=fact.name,
        owner=fact.owner,
        dataset_id=fact.dataset_id,
        terms=fact.terms,
        save=fact.save,
    )
    if fact.name is not None:
        state.names[fact.name] = fact.job_id
    elif fact.owner is not None:
        state.owners[fact.owner] = fact.job_id
    state.next_job = fact.job_id + 1


def _job_forgotten(state: DispatcherState, fact: updates.JobForgotten) -> None:
    job = state.jobs.pop(fact.job_id)
    if job.name is not None:
        del state.names[job.name]
    elif job.owner is not None:
        del state.owners[job.owner]


def _iteration_created(state: DispatcherState, fact: updates.IterationCreated) -> None:
    require(fact.iteration_id == state.next_iteration, "its number is not the next one")
    job = state.jobs[fact.job_id]
    require(fact.pass_number not in job.iterations, "the job has one of this pass")
    require(not job.is_over(fact.pass_number), "the job's pass is over")
    iteration = state.iterations[fact.iteration_id] = Iteration(
        iteration_id=fact.iteration_id,
        job_id=fact.job_id,
        pass_number=fact.pass_number,
        seed=fact.seed,
        splits=SplitPool(fact.positions, fact.exactly_once, fact.first_unit),
        mode=copy.deepcopy(fact.mode),
        fixed_seeds=fact.fixed_seeds,
        start=fact.start,
    )
    leave_out(iteration.splits, fact.delivered, fact.parts)
    job.iterations[fact.pass_number] = fact.iteration_id
    state.next_iteration = fact.iteration_id + 1


def _iteration_finished(state: DispatcherState, fact: updates.IterationFinished) -> None:
    iteration = state.iterations[fact.iteration_id]
    require(not state.running_tasks(iteration), "it has running tasks")
    iteration.finished, iteration.failed = True, fact.failed
    iteration.left.clear()
    iteration.version += 1


def _iteration_collected(state: DispatcherState, fact: updates.IterationCollected) -> None:
    iteration = _drop_iteration(state, fact.iteration_id)
    del state.jobs[iteration.job_id].iterations[iteration.pass_number]


def _iteration_forgotten(state: DispatcherState, fact: updates.IterationForgotten) -> None:
    iteration = _drop_iteration(state, fact.iteration_id)
    job = state.jobs[iteration.job_id]
    del job.iterations[iteration.pass_number]
    job.forgotten[iteration.pass_number] = iteration.readers
    while len(job.forgotten) > PASSES_REMEMBERED:
        oldest = next((each for each in job.forgotten if each), ())
        del job.forgotten[oldest]
        if oldest:
            last = oldest[-1]
            before = job.over.get(oldest[:-1], ())
            job.over[oldest[:-1]] = united((*before, (last, last + 1)))


def _drop_iteration(state: DispatcherState, iteration_id: int) -> Iteration:
    iteration = state.iterations.pop(iteration_id)
    require(not iteration.clients, "clients read it")
    for task_id in iteration.tasks:
        task = state.tasks.pop(task_id)
        worker = state.workers.get(task.worker_id)
        if worker is not None:
            worker.tasks.discard(task_id)
            worker.finished.discard(task_id)
    return iteration


def _task_created(state: DispatcherState, fact: updates.TaskCreated) -> None:
    require(fact.task_id == state.next_task, "its number is not the next one")
    worker = state.workers[fact.worker_id]
    iteration = state.iterations[fact.iteration_id]
    require(not iteration.finished, "the iteration is finished")
    require(not worker.leaving, "the worker is leaving")
    task = state.tasks[fact.task_id] = Task(
        task_id=fact.task_id,
        iteration_id=fact.iteration_id,
        worker_id=fact.worker_id,
        address=worker.address,
        ticket=state.ticket(fact.task_id),
        mode=copy.copy(fact.mode),
        attempt=fact.attempt,
        replaces=fact.replaces,
    )
    if iteration.mode is not None:
        iteration.mode.task_created(task)
    iteration.tasks.append(fact.task_id)
    iteration.takers += 1
    iteration.version += 1
    worker.tasks.add(fact.task_id)
    state.next_task = fact.task_id + 1


def _task_finished(state: DispatcherState, fact: updates.TaskFinished) -> None:
    task = _end(state, fact.task_id, TaskPhase.FINISHED)
    task.cut = fact.cut
    forget_done(task, fact.done)
    worker, iteration = state.workers[task.worker_id], state.iterations[task.iteration_id]
    # Where consumers read together, all must know that it gave none.
    if task.splits.dealt or not iteration.is_dealt or iteration.clients_read_together:
        worker.finished.add(fact.task_id)
    if not worker.leaving:
        iteration.ended = True


def _task_failed(state: DispatcherState, fact: updates.TaskFailed) -> None:
    task = _end(state, fact.task_id, TaskPhase.FAILED)
    task.reason = fact.reason
    give_up(state, task)


def _task_lost(state: DispatcherState, fact: updates.TaskLost) -> None:
    task = _end(state, fact.task_id, TaskPhase.LOST)
    task.reason, task.silent = fact.reason, True
    give_up(state, task)


def _copy_lasted(state: DispatcherState, fact: updates.CopyLasted) -> None:
    running_task(state, fact.task_id).lasted = True


def _client_joined(state: DispatcherState, fact: updates.ClientJoined) -> None:
    require(fact.client_id not in state.clients, "the client reads an iteration already")
    iteration = state.iterations[fact.iteration_id]
    state.clients[fact.client_id] = fact.iteration_id
    iteration.clients.add(fact.client_id)
    if iteration.mode is not None:
        iteration.mode.client_joined(iteration, fact.client_id, fact.consumer_index)
    if iteration.readers is None:
        iteration.readers = Readers(first=fact.client_id)
    elif not iteration.finished:
        iteration.readers.clients += 1


def _client_left(state: DispatcherState, fact: updates.ClientLeft) -> None:
    iteration = state.iterations[state.clients.pop(fact.client_id)]
    iteration.clients.discard(fact.client_id)
    if fact.is_final:
        iteration.left.add(fact.client_id)
    tasks = state.tasks_of(iteration)
    if iteration.mode is not None:
        iteration.mode.client_left(iteration, tasks, fact.client_id)
    iteration.version += 1
    # Workers keep for each trainer what it has not read.
    is_read_by_all = state.jobs[iteration.job_id].terms.cross_trainer_cache
    for task in tasks:
        splits = task.splits
        if splits.kept_by:
            give_back_kept(iteration, task, fact.client_id)
        if fact.client_id in task.unsettled:
            # What it received of this, nobody will know.
            task.unsettled.discard(fact.client_id)
            touch_first(iteration, task, splits.dealt)
        elif not task.gone and (iteration.is_dealt or is_read_by_all):
            task.departed[fact.client_id] = splits.dealt


_APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    updates.DispatcherStarted: _dispatcher_started,
    updates.PlanStored: _plan_stored,
    updates.PlanForgotten: _plan_forgotten,
    updates.DatasetRegistered: _dataset_registered,
    updates.DatasetKept: _dataset_kept,
    updates.DatasetForgotten: _dataset_forgotten,
    updates.SlotsConfigured: _slots_configured,
    updates.WorkerRegistered: _worker_registered,
    updates.WorkerLeaving: _worker_leaving,
    updates.WorkerLeft: _worker_gone,
    updates.WorkerLost: _worker_gone,
    updates.JobCreated: _job_created,
    updates.JobForgotten: _job_forgotten,
    updates.IterationCreated: _iteration_created,
    updates.IterationFinished: _iteration_finished,
    updates.IterationCollected: _iteration_collected,
    updates.IterationForgotten: _iteration_forgotten,
    updates.TaskCreated: _task_created,
    updates.TaskFinished: _task_finished,
    updates.TaskFailed: _task_failed,
    updates.TaskLost: _task_lost,
    updates.TaskSettled: apply_settled.task_settled,
    updates.ElementsReceived: apply_settled.elements_received,
    updates.ElementsUsed: apply_settled.elements_used,
    updates.CopyLasted: _copy_lasted,
    updates.TasksForgotten: apply_units.tasks_forgotten,
    updates.ClientJoined: _client_joined,
    updates.ClientLeft: _client_left,
    updates.ClientDropped: apply_units.client_dropped,
    updates.UnitsDealt: apply_units.units_dealt,
    updates.UnitsReturned: apply_units.units_returned,
    updates.UnitsTakenOver: apply_units.units_taken_over,
    updates.UnitsGivenUp: apply_units.units_given_up,
    **apply_rounds.APPLY,
    **apply_saves.APPLY,
}
