"""Application of events: the only code that changes a state. It makes no decisions.

Rule. An event that contradicts the state is a bug of the dispatcher. The error describes everything
that the event names; the state must not be used afterwards, and the journal's owner reads it again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.service.dispatcher import apply_reports, apply_splits, events
from headrace.service.dispatcher.apply_splits import (
    drop_done_splits,
    mark_prefix_partially_delivered,
    mark_unavailable,
    return_unacknowledged,
    running_task,
)
from headrace.service.dispatcher.event import require
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.invalid_event import InvalidEventError, invalid_event_error
from headrace.service.dispatcher.slots import assign_slots, iterations_reading_shards
from headrace.service.dispatcher.start_positions import exclude_delivered
from headrace.service.dispatcher.state import (
    MAX_FINISHED_EPOCHS,
    WORKER_LEFT,
    DispatcherState,
    DispatcherTask,
    IterationReaders,
    Job,
    JobIteration,
    RegisteredDataset,
    SplitPool,
    TaskPhase,
    Worker,
)
from headrace.service.modes.coordinated_reads import apply as apply_rounds
from headrace.service.modes.distributed_save import apply as apply_saves
from headrace.service.ranges import union

__all__ = ["InvalidEventError", "apply"]


def apply(state: DispatcherState, event: AnyEvent) -> None:
    """Change the state by one event.

    Raises:
        InvalidEventError: If the event contradicts the state, which may be half changed.
    """
    try:
        _APPLY[type(event)](state, event)
    except Exception as error:
        raise invalid_event_error(state, event, error) from error


def _dispatcher_started(state: DispatcherState, event: events.DispatcherStarted) -> None:
    require(not state.dispatcher_id, "the dispatcher already has an id")
    state.dispatcher_id = event.dispatcher_id
    state.secret = event.secret


def _plan_stored(state: DispatcherState, event: events.PlanStored) -> None:
    state.plan_sizes[event.digest] = event.size


def _dataset_registered(state: DispatcherState, event: events.DatasetRegistered) -> None:
    require(event.digest in state.plan_sizes, "its plan is not stored")
    require(event.dataset_id not in state.datasets, "the dataset id already exists")
    state.datasets[event.dataset_id] = msgspec.convert(
        msgspec.structs.asdict(event), RegisteredDataset, strict=True
    )
    state.datasets_by_token[event.token] = event.dataset_id
    while str(state.next_dataset_id) in state.datasets:
        state.next_dataset_id += 1


def _dataset_pinned(state: DispatcherState, event: events.DatasetPinned) -> None:
    state.datasets[event.dataset_id].anonymous = False


def _dataset_forgotten(state: DispatcherState, event: events.DatasetForgotten) -> None:
    dataset = state.datasets.pop(event.dataset_id)
    require(dataset.anonymous, "the dataset is not anonymous: a caller may have its id")
    is_used = any(job.dataset_id == event.dataset_id for job in state.jobs.values())
    require(not is_used, "a job uses the dataset")
    del state.datasets_by_token[dataset.token]
    if dataset.digest not in state.plans_in_use:
        del state.plan_sizes[dataset.digest]


def _plan_forgotten(state: DispatcherState, event: events.PlanForgotten) -> None:
    require(event.digest not in state.plans_in_use, "a dataset or a job uses the plan")
    del state.plan_sizes[event.digest]


def _slots_configured(state: DispatcherState, event: events.SlotsConfigured) -> None:
    require(
        not iterations_reading_shards(state),
        "an unfinished iteration reads shards of the current slots",
    )
    state.slots = assign_slots(event.patterns, state.workers.values())


def _worker_registered(state: DispatcherState, event: events.WorkerRegistered) -> None:
    known = state.workers.get(event.worker_id)
    if known is None:
        require(
            event.address not in state.workers_by_address, "the address belongs to another worker"
        )
        known = Worker(
            worker_id=event.worker_id,
            address=event.address,
            tags=event.tags,
            versions=event.versions,
        )
        state.workers[event.worker_id] = known
        state.workers_by_address[event.address] = event.worker_id
        if event.slot is not None:
            slot = state.slots[event.slot]
            require(not slot.worker_id, "the slot belongs to another worker")
            slot.worker_id, slot.address = event.worker_id, event.address
    known.tags = event.tags


def _worker_draining(state: DispatcherState, event: events.WorkerDraining) -> None:
    worker = state.workers[event.worker_id]
    require(not worker.draining, "the worker is already draining")
    worker.draining = True
    for task_id in worker.tasks:
        iteration = state.iterations[state.tasks[task_id].iteration_id]
        iteration.num_active_tasks -= 1
        iteration.num_draining_tasks += 1


def _worker_removed(state: DispatcherState, event: events.WorkerLost | events.WorkerLeft) -> None:
    worker = state.workers[event.worker_id]
    reason = WORKER_LEFT if isinstance(event, events.WorkerLeft) else event.reason
    task_ids = worker.tasks | worker.finished_tasks
    for task_id in [*worker.tasks]:
        _end_task(state, task_id, TaskPhase.LOST)
    for task_id in task_ids:
        state.tasks[task_id].reason = reason
        state.tasks[task_id].timed_out = isinstance(event, events.WorkerLost) and event.timed_out
        mark_unavailable(state, state.tasks[task_id])
    for task_id in worker.failed_tasks:
        # Its clients can no longer request the last result batches there
        # (`IterationPolicy.is_redeliverable`).
        state.iterations[state.tasks[task_id].iteration_id].version += 1
    del state.workers[event.worker_id], state.workers_by_address[worker.address]
    for slot in state.slots:
        if slot.worker_id == event.worker_id:
            slot.worker_id = ""


def _end_task(state: DispatcherState, task_id: int, phase: TaskPhase) -> DispatcherTask:
    task = running_task(state, task_id)
    iteration, worker = state.iterations[task.iteration_id], state.workers[task.worker_id]
    task.phase = phase
    worker.tasks.remove(task_id)
    iteration.pool.num_held -= task.assigned.num_held
    if worker.draining:
        iteration.num_draining_tasks -= 1
    else:
        iteration.num_active_tasks -= 1
    iteration.version += 1
    return task


def _job_created(state: DispatcherState, event: events.JobCreated) -> None:
    require(event.job_id == state.next_job_id, "job_id is not the next number")
    require(event.dataset_id in state.datasets, "its dataset is not registered")
    cost_fn_digest = event.options.cost_fn_digest
    require(
        not cost_fn_digest or cost_fn_digest in state.plan_sizes, "its cost function is not stored"
    )
    state.jobs[event.job_id] = Job(
        job_id=event.job_id,
        name=event.name,
        owner=event.owner,
        dataset_id=event.dataset_id,
        options=event.options,
        save_id=event.save_id,
    )
    if event.name is not None:
        state.jobs_by_name[event.name] = event.job_id
    elif event.owner is not None:
        state.jobs_by_owner[event.owner] = event.job_id
    state.next_job_id = event.job_id + 1


def _job_forgotten(state: DispatcherState, event: events.JobForgotten) -> None:
    job = state.jobs.pop(event.job_id)
    if job.name is not None:
        del state.jobs_by_name[job.name]
    elif job.owner is not None:
        del state.jobs_by_owner[job.owner]


def _iteration_created(state: DispatcherState, event: events.IterationCreated) -> None:
    require(event.iteration_id == state.next_iteration_id, "iteration_id is not the next number")
    job = state.jobs[event.job_id]
    require(event.epoch not in job.iterations, "the job already has an iteration of this epoch")
    require(not job.is_epoch_finished(event.epoch), "the epoch is finished")
    iteration = state.iterations[event.iteration_id] = JobIteration(
        iteration_id=event.iteration_id,
        job_id=event.job_id,
        epoch=event.epoch,
        seed=event.seed,
        pool=SplitPool(event.num_splits, event.exactly_once, event.first_split),
        mode_state=copy.deepcopy(event.mode_state),
        fixed_seeds=event.fixed_seeds,
        start_position_id=event.start_position_id,
    )
    exclude_delivered(iteration.pool, event.delivered, event.partial_splits)
    job.iterations[event.epoch] = event.iteration_id
    state.next_iteration_id = event.iteration_id + 1


def _iteration_finished(state: DispatcherState, event: events.IterationFinished) -> None:
    iteration = state.iterations[event.iteration_id]
    require(not state.running_tasks(iteration), "the iteration has running tasks")
    iteration.finished, iteration.failure_reason = True, event.failure_reason
    iteration.departed_clients.clear()
    iteration.version += 1


def _iteration_discarded(state: DispatcherState, event: events.IterationDiscarded) -> None:
    iteration = _remove_iteration(state, event.iteration_id)
    del state.jobs[iteration.job_id].iterations[iteration.epoch]


def _iteration_forgotten(state: DispatcherState, event: events.IterationForgotten) -> None:
    iteration = _remove_iteration(state, event.iteration_id)
    job = state.jobs[iteration.job_id]
    del job.iterations[iteration.epoch]
    job.finished_epochs[iteration.epoch] = iteration.readers
    while len(job.finished_epochs) > MAX_FINISHED_EPOCHS:
        oldest = next((each for each in job.finished_epochs if each), ())
        del job.finished_epochs[oldest]
        if oldest:
            last = oldest[-1]
            before = job.older_finished_epochs.get(oldest[:-1], ())
            job.older_finished_epochs[oldest[:-1]] = union((*before, (last, last + 1)))


def _remove_iteration(state: DispatcherState, iteration_id: int) -> JobIteration:
    iteration = state.iterations.pop(iteration_id)
    require(not iteration.clients, "the iteration has clients")
    for task_id in iteration.tasks:
        task = state.tasks.pop(task_id)
        worker = state.workers.get(task.worker_id)
        if worker is not None:
            worker.tasks.discard(task_id)
            worker.finished_tasks.discard(task_id)
            worker.failed_tasks.discard(task_id)
    return iteration


def _task_created(state: DispatcherState, event: events.TaskCreated) -> None:
    require(event.task_id == state.next_task_id, "task_id is not the next number")
    worker = state.workers[event.worker_id]
    iteration = state.iterations[event.iteration_id]
    require(not iteration.finished, "the iteration is finished")
    require(not worker.draining, "the worker is draining")
    task = state.tasks[event.task_id] = DispatcherTask(
        task_id=event.task_id,
        iteration_id=event.iteration_id,
        worker_id=event.worker_id,
        address=worker.address,
        task_token=state.task_token(event.task_id),
        mode_state=copy.copy(event.mode_state),
        attempt=event.attempt,
        is_replacement=event.is_replacement,
    )
    if iteration.mode_state is not None:
        iteration.mode_state.task_created(task)
    iteration.tasks.append(event.task_id)
    iteration.num_active_tasks += 1
    iteration.version += 1
    worker.tasks.add(event.task_id)
    state.next_task_id = event.task_id + 1


def _task_finished(state: DispatcherState, event: events.TaskFinished) -> None:
    task = _end_task(state, event.task_id, TaskPhase.FINISHED)
    task.cut_short = event.cut_short
    drop_done_splits(task, event.num_done)
    worker, iteration = state.workers[task.worker_id], state.iterations[task.iteration_id]
    # With coordinated reads, all clients must learn that it delivered nothing.
    if (
        task.assigned.num_assigned
        or not iteration.assigns_splits
        or iteration.clients_read_together
    ):
        worker.finished_tasks.add(event.task_id)
    if not worker.draining:
        iteration.reached_end = True


def _task_failed(state: DispatcherState, event: events.TaskFailed) -> None:
    task = _end_task(state, event.task_id, TaskPhase.FAILED)
    state.workers[task.worker_id].failed_tasks.add(event.task_id)
    task.reason = event.reason
    mark_unavailable(state, task)


def _task_lost(state: DispatcherState, event: events.TaskLost) -> None:
    task = _end_task(state, event.task_id, TaskPhase.LOST)
    task.reason, task.timed_out = event.reason, True
    mark_unavailable(state, task)


def _copy_marked_stable(state: DispatcherState, event: events.CopyMarkedStable) -> None:
    running_task(state, event.task_id).is_stable = True


def _client_joined(state: DispatcherState, event: events.ClientJoined) -> None:
    require(event.client_id not in state.clients, "the client already reads an iteration")
    iteration = state.iterations[event.iteration_id]
    state.clients[event.client_id] = event.iteration_id
    iteration.clients.add(event.client_id)
    if iteration.mode_state is not None:
        iteration.mode_state.client_joined(iteration, event.client_id, event.consumer_index)
    if iteration.readers is None:
        iteration.readers = IterationReaders(first_client=event.client_id)
    elif not iteration.finished:
        iteration.readers.num_clients += 1


def _client_left(state: DispatcherState, event: events.ClientLeft) -> None:
    iteration = state.iterations[state.clients.pop(event.client_id)]
    iteration.clients.discard(event.client_id)
    if event.may_not_rejoin:
        iteration.departed_clients.add(event.client_id)
    tasks = state.tasks_of(iteration)
    if iteration.mode_state is not None:
        iteration.mode_state.client_left(iteration, tasks, event.client_id)
    iteration.version += 1
    # Workers keep what each trainer has not read.
    is_cached = state.jobs[iteration.job_id].options.cross_trainer_cache
    for task in tasks:
        assigned = task.assigned
        if assigned.unacknowledged:
            return_unacknowledged(iteration, task, event.client_id)
        if event.client_id in task.awaiting_reports:
            # It can no longer report what it received of this task.
            task.awaiting_reports.discard(event.client_id)
            mark_prefix_partially_delivered(iteration, task, assigned.num_assigned)
        elif not task.is_unavailable and (iteration.assigns_splits or is_cached):
            task.unconfirmed_clients[event.client_id] = assigned.num_assigned


_APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    events.DispatcherStarted: _dispatcher_started,
    events.PlanStored: _plan_stored,
    events.PlanForgotten: _plan_forgotten,
    events.DatasetRegistered: _dataset_registered,
    events.DatasetPinned: _dataset_pinned,
    events.DatasetForgotten: _dataset_forgotten,
    events.SlotsConfigured: _slots_configured,
    events.WorkerRegistered: _worker_registered,
    events.WorkerDraining: _worker_draining,
    events.WorkerLeft: _worker_removed,
    events.WorkerLost: _worker_removed,
    events.JobCreated: _job_created,
    events.JobForgotten: _job_forgotten,
    events.IterationCreated: _iteration_created,
    events.IterationFinished: _iteration_finished,
    events.IterationDiscarded: _iteration_discarded,
    events.IterationForgotten: _iteration_forgotten,
    events.TaskCreated: _task_created,
    events.TaskFinished: _task_finished,
    events.TaskFailed: _task_failed,
    events.TaskLost: _task_lost,
    events.DeliveryReported: apply_reports.delivery_reported,
    events.ElementsReceived: apply_reports.elements_received,
    events.ElementsConsumed: apply_reports.elements_consumed,
    events.CopyMarkedStable: _copy_marked_stable,
    events.TasksForgotten: apply_splits.tasks_forgotten,
    events.ClientJoined: _client_joined,
    events.ClientLeft: _client_left,
    events.DepartedClientReported: apply_splits.departed_client_reported,
    events.SplitsAssigned: apply_splits.splits_assigned,
    events.SplitsReturned: apply_splits.splits_returned,
    events.SplitsReassigned: apply_splits.splits_reassigned,
    events.SplitsAbandoned: apply_splits.splits_abandoned,
    **apply_rounds.APPLY,
    **apply_saves.APPLY,
}
