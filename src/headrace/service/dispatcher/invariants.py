"""A function that checks the invariants of a state. Tests call it after each step.

A new invariant needs a `#:` comment at its field in `state.py`, and a line here.
"""

from __future__ import annotations

from headrace.service.dispatcher.policy import eligible_workers
from headrace.service.dispatcher.state import (
    MAX_FINISHED_EPOCHS,
    MAX_REMEMBERED_LOSSES,
    WORKER_LEFT,
    DispatcherState,
    DispatcherTask,
    JobIteration,
    TaskPhase,
)
from headrace.service.modes.coordinated_reads.events import (
    CoordinatedIteration,
    coordinated_iteration,
    coordinated_task,
)
from headrace.service.modes.distributed_save.records import MAX_CLOSED_SAVES, files_of
from headrace.service.modes.static.records import shard_of
from headrace.service.ranges import drop_below, intersect, subtract, total_length, union

__all__ = ["validate"]


def validate(state: DispatcherState) -> None:
    """Check the invariants in the `#:` comments of `state.py`.

    Raises:
        AssertionError: If one does not hold.
    """
    running: dict[str, set[int]] = {worker_id: set() for worker_id in state.workers}
    finished: dict[str, set[int]] = {worker_id: set() for worker_id in state.workers}
    failed: dict[str, set[int]] = {worker_id: set() for worker_id in state.workers}
    for task_id, task in state.tasks.items():
        assert task.task_id == task_id < state.next_task_id, task
        assert task.task_token == state.task_token(task_id), task
        assert task_id in state.iterations[task.iteration_id].tasks, task
        _check_task(state, task)
        if task.phase is TaskPhase.RUNNING:
            running[task.worker_id].add(task_id)
        elif (
            task.phase is TaskPhase.FINISHED and not task.is_unavailable and _has_read(state, task)
        ):
            finished[task.worker_id].add(task_id)
        elif task.phase is TaskPhase.FAILED and task.worker_id in failed:
            failed[task.worker_id].add(task_id)
    for worker_id, worker in state.workers.items():
        assert worker.worker_id == worker_id, worker
        assert worker.tasks == running[worker_id], (worker, running[worker_id])
        assert worker.finished_tasks == finished[worker_id], (worker, finished[worker_id])
        assert worker.failed_tasks == failed[worker_id], (worker, failed[worker_id])
        assert state.workers_by_address[worker.address] == worker_id, worker
    assert len(state.workers_by_address) == len(state.workers)
    _check_jobs(state)
    _check_saves(state)
    readers: dict[str, int] = {}
    for iteration_id, iteration in state.iterations.items():
        _check_iteration(state, iteration_id, iteration)
        readers.update(dict.fromkeys(iteration.clients, iteration_id))
    assert readers == state.clients, (readers, state.clients)
    assert sum(len(each.clients) for each in state.iterations.values()) == len(state.clients)
    assert str(state.next_dataset_id) not in state.datasets
    for token, dataset_id in state.datasets_by_token.items():
        assert state.datasets[dataset_id].token == token
        assert state.datasets[dataset_id].digest in state.plan_sizes
    assert len(state.datasets_by_token) == len(state.datasets)


def _has_read(state: DispatcherState, task: DispatcherTask) -> bool:
    iteration = state.iterations[task.iteration_id]
    return (
        bool(task.assigned.num_assigned)
        or not iteration.assigns_splits
        or iteration.clients_read_together
    )


def _check_task(state: DispatcherState, task: DispatcherTask) -> None:
    assigned = task.assigned
    assert 0 <= assigned.num_done <= assigned.num_assigned, task
    assert total_length(assigned.runs) == assigned.num_assigned - assigned.num_done, task
    for ranges in (assigned.returned, assigned.delivered, assigned.partially_delivered):
        assert ranges == drop_below(union(ranges), assigned.num_done), task
        assert not ranges or ranges[-1][1] <= assigned.num_assigned, task
    assert not subtract(assigned.delivered, assigned.partially_delivered), task
    assert assigned.num_held >= 0, task
    assert assigned.last_assignment[1] - assigned.last_assignment[0] <= assigned.num_assigned, task
    assert (assigned.num_assignments == 0) == (assigned.num_assigned == 0), task
    assert task.awaiting_reports <= state.iterations[task.iteration_id].clients, task
    assert task.is_unavailable or not task.awaiting_reports, task
    assert not (task.is_unavailable and task.unconfirmed_clients), task
    assert task.is_unavailable or not assigned.unacknowledged, task
    assert assigned.unacknowledged.keys() <= state.iterations[task.iteration_id].clients, task
    for split, ordinals in assigned.remaining_ordinals.items():
        assert assigned.num_done <= split < assigned.num_assigned, task
        assert ordinals, task
        assert ordinals == union(ordinals), task
        assert not intersect(
            ((split, split + 1),), union((*assigned.returned, *assigned.delivered))
        ), task


def _check_jobs(state: DispatcherState) -> None:
    for job_id, job in state.jobs.items():
        assert job.job_id == job_id < state.next_job_id, job
        assert job.dataset_id in state.datasets, job
        assert (job.name is not None) + (job.owner is not None) + bool(job.save_id) == 1, job
        assert job.name is None or state.jobs_by_name[job.name] == job_id, job
        assert job.owner is None or state.jobs_by_owner[job.owner] == job_id, job
        assert not job.options.cost_fn_digest or job.options.cost_fn_digest in state.plan_sizes, job
        assert state.iterations.keys() >= set(job.iterations.values()), job
        assert not any(job.is_epoch_finished(each) for each in job.iterations), job
        assert len(job.finished_epochs) <= MAX_FINISHED_EPOCHS, job
    num_save_jobs = sum(bool(job.save_id) for job in state.jobs.values())
    assert len(state.jobs_by_name) + len(state.jobs_by_owner) + num_save_jobs == len(state.jobs)


def _check_saves(state: DispatcherState) -> None:
    assert sum(save.is_closed for save in state.saves.values()) <= MAX_CLOSED_SAVES
    open_save_jobs = {save.job_id for save in state.saves.values() if not save.is_closed}
    assert open_save_jobs == {job.job_id for job in state.jobs.values() if job.save_id}, state.saves
    for save_id, save in state.saves.items():
        assert save.save_id == save_id, save
        if save.is_closed:
            assert not save.committed_files, save
            continue
        assert state.jobs[save.job_id].save_id == save_id, save
        assert [*state.jobs[save.job_id].iterations.values()] == [save.iteration_id], save
        iteration = state.iterations[save.iteration_id]
        assert not iteration.clients, save
        assert save.is_open or not iteration.tasks, save
        assert save.num_files == len(save.committed_files), save
        assert save.num_elements == sum(file.elements for file in save.committed_files), save
        assert save.num_bytes == sum(file.bytes for file in save.committed_files), save
        for task in state.tasks_of(iteration):
            numbers = [file.number for file in save.committed_files if file.stream == task.task_id]
            assert numbers == list(range(files_of(task.mode_state).num_files)), task
            assert task.phase is not TaskPhase.FINISHED or not task.assigned.num_held, task
        if iteration.finished and not iteration.failure_reason:
            assert iteration.pool.num_unassigned == 0, iteration
            assert not iteration.pool.abandoned, iteration


def _check_iteration(state: DispatcherState, iteration_id: int, iteration: JobIteration) -> None:
    pool = iteration.pool
    assert iteration.iteration_id == iteration_id < state.next_iteration_id, iteration
    job = state.jobs[iteration.job_id]
    assert job.iterations[iteration.epoch] == iteration_id
    tasks = state.tasks_of(iteration)
    assert len(set(iteration.tasks)) == len(tasks), iteration
    if job.options.num_consumers is not None:
        _check_rounds(iteration, coordinated_iteration(iteration.mode_state), tasks)
    running = [task.worker_id for task in tasks if task.phase is TaskPhase.RUNNING]
    assert len(set(running)) == len(running), iteration
    assert iteration.num_draining_tasks == sum(state.workers[each].draining for each in running), (
        iteration
    )
    assert iteration.num_active_tasks == len(running) - iteration.num_draining_tasks, iteration
    assert pool.num_held == sum(
        task.assigned.num_held for task in state.running_tasks(iteration)
    ), iteration
    assert not (iteration.finished and running), iteration
    assert iteration.finished or not iteration.failure_reason, iteration
    if not iteration.finished and not job.save_id:
        workers_with_task = {task.worker_id for task in tasks if task.phase is not TaskPhase.LOST}
        if iteration.assigns_splits:
            waits_for_client = not running and not (pool.returned or pool.partial_splits)
            assert (
                workers_with_task >= set(eligible_workers(state, iteration)) or waits_for_client
            ), (
                iteration,
                state.workers,
            )
        elif not any(shard_of(task.mode_state) for task in tasks):
            _check_copies(state, iteration, tasks)
    assert not (iteration.departed_clients & iteration.clients), iteration
    _check_units(iteration, tasks)


def _check_copies(
    state: DispatcherState, iteration: JobIteration, tasks: list[DispatcherTask]
) -> None:
    past_workers = {task.worker_id for task in tasks}
    past_addresses = {task.address for task in tasks if task.phase is not TaskPhase.LOST}
    deaths = sum(task.phase is TaskPhase.LOST and task.reason != WORKER_LEFT for task in tasks)
    if (deaths < 3 and not iteration.missing_splits) or not tasks:
        for worker_id in eligible_workers(state, iteration):
            had_copy = (
                worker_id in past_workers or state.workers[worker_id].address in past_addresses
            )
            assert had_copy, (iteration, state.workers)


def _check_rounds(
    iteration: JobIteration, consumers: CoordinatedIteration, tasks: list[DispatcherTask]
) -> None:
    assert consumers.consumer_by_client.keys() <= iteration.clients, iteration
    indices = [*consumers.consumer_by_client.values()]
    if not iteration.finished:
        assert len({*indices, *consumers.departed_consumers}) == len(indices) + len(
            consumers.departed_consumers
        )
    for task in tasks:
        rounds = coordinated_task(task.mode_state)
        assert rounds.starting_round <= consumers.horizon, task
        assert task.is_unavailable or (
            rounds.received_rounds is None and not rounds.has_unknown_length
        ), task


def _check_units(iteration: JobIteration, tasks: list[DispatcherTask]) -> None:
    pool = iteration.pool
    end = pool.num_splits or 0
    assert pool.next_split >= 0, iteration
    assert len(iteration.missing_splits) <= MAX_REMEMBERED_LOSSES, iteration
    assert end < 0 or pool.next_split <= end, iteration
    for ranges in (
        pool.returned,
        pool.recovered,
        pool.poison_candidates,
    ):
        assert ranges == union(ranges), iteration
    assert pool.max_candidates_per_task >= 1, iteration
    assert not subtract(pool.poison_candidates, pool.recovered), iteration
    assert not subtract(pool.recovered, ((0, pool.next_split),)), iteration
    assert not intersect(pool.abandoned, pool.recovered), iteration
    for split in pool.died_workers:
        candidates = (*pool.poison_candidates, *pool.abandoned)
        assert intersect(((split, split + 1),), union(candidates)), iteration
    assert not intersect(pool.abandoned, pool.returned), iteration
    # An assigned split that is not done is either held by one task or returned, never both.
    if pool.exactly_once:
        _check_rows(iteration, tasks)
        return
    assert not pool.partial_splits, iteration
    split_indices = [*pool.returned]
    for task in tasks:
        assigned = task.assigned
        assert not assigned.remaining_ordinals, task
        held = (
            subtract(((assigned.num_done, assigned.num_assigned),), assigned.returned)
            if assigned.num_held
            else ()
        )
        held_indices = assigned.to_split_indices(held)
        assert total_length(held_indices) == assigned.num_held, task
        split_indices += held_indices
    assert total_length(union(split_indices)) == total_length(split_indices), (iteration, tasks)
    assert all(stop <= pool.next_split for _, stop in split_indices), (iteration, tasks)


def _check_rows(iteration: JobIteration, tasks: list[DispatcherTask]) -> None:
    """Check that each element is either held by one task or unassigned, never both."""
    pool = iteration.pool
    split_indices = [*pool.returned]
    partial_splits = [*pool.partial_splits.items()]
    for task in tasks:
        assigned = task.assigned
        held = subtract(
            ((assigned.num_done, assigned.num_assigned),),
            union((*assigned.returned, *assigned.delivered)),
        )
        for split, ordinals in assigned.remaining_ordinals.items():
            ((split_index, _),) = assigned.to_split_indices(((split, split + 1),))
            partial_splits.append((split_index, ordinals))
            held = subtract(held, ((split, split + 1),))
        split_indices += assigned.to_split_indices(held)
    assert total_length(union(split_indices)) == total_length(split_indices), (iteration, tasks)
    assert all(stop <= pool.next_split for _, stop in split_indices), (iteration, tasks)
    ordinals_by_split: dict[int, list[tuple[int, int]]] = {}
    for split_index, ordinals in partial_splits:
        assert ordinals, iteration
        assert ordinals == union(ordinals), iteration
        assert split_index < pool.next_split, iteration
        assert not intersect(((split_index, split_index + 1),), union(split_indices)), (
            iteration,
            tasks,
        )
        ordinals_by_split.setdefault(split_index, []).extend(ordinals)
    for split_index, ranges in ordinals_by_split.items():
        assert total_length(union(ranges)) == total_length(ranges), (split_index, iteration, tasks)
