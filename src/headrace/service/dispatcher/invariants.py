"""The invariants of a state, as a function that checks them. Tests call it after each step.

A new invariant is a `#:` comment beside its field in `state.py`, and a line here.
"""

from __future__ import annotations

from headrace.service.dispatcher.policy import staying
from headrace.service.dispatcher.state import (
    LEFT,
    LOSSES_REMEMBERED,
    PASSES_REMEMBERED,
    DispatcherState,
    Iteration,
    Task,
    TaskPhase,
)
from headrace.service.modes.coordinated_reads.records import Consumers, consumers_of, rounds_of
from headrace.service.modes.distributed_save.records import SAVES_REMEMBERED, files_of
from headrace.service.modes.static.records import shard_of
from headrace.service.ranges import at_least, common, count, subtracted, united

__all__ = ["validate"]


def validate(state: DispatcherState) -> None:
    """Check every `#:` comment of `state.py`.

    Raises:
        AssertionError: One does not hold.
    """
    running: dict[str, set[int]] = {worker_id: set() for worker_id in state.workers}
    finished: dict[str, set[int]] = {worker_id: set() for worker_id in state.workers}
    for task_id, task in state.tasks.items():
        assert task.task_id == task_id < state.next_task, task
        assert task.ticket == state.ticket(task_id), task
        assert task_id in state.iterations[task.iteration_id].tasks, task
        _check_task(state, task)
        if task.phase is TaskPhase.RUNNING:
            running[task.worker_id].add(task_id)
        elif task.phase is TaskPhase.FINISHED and not task.gone and _has_read(state, task):
            finished[task.worker_id].add(task_id)
    for worker_id, worker in state.workers.items():
        assert worker.worker_id == worker_id, worker
        assert worker.tasks == running[worker_id], (worker, running[worker_id])
        assert worker.finished == finished[worker_id], (worker, finished[worker_id])
        assert state.addresses[worker.address] == worker_id, worker
    assert len(state.addresses) == len(state.workers)
    _check_jobs(state)
    _check_saves(state)
    readers: dict[str, int] = {}
    for iteration_id, iteration in state.iterations.items():
        _check_iteration(state, iteration_id, iteration)
        readers.update(dict.fromkeys(iteration.clients, iteration_id))
    assert readers == state.clients, (readers, state.clients)
    assert sum(len(each.clients) for each in state.iterations.values()) == len(state.clients)
    assert str(state.next_dataset) not in state.datasets
    for token, dataset_id in state.tokens.items():
        assert state.datasets[dataset_id].token == token
        assert state.datasets[dataset_id].digest in state.plans
    assert len(state.tokens) == len(state.datasets)


def _has_read(state: DispatcherState, task: Task) -> bool:
    iteration = state.iterations[task.iteration_id]
    return bool(task.splits.dealt) or not iteration.is_dealt or iteration.clients_read_together


def _check_task(state: DispatcherState, task: Task) -> None:
    splits = task.splits
    assert 0 <= splits.done <= splits.dealt, task
    assert count(splits.runs) == splits.dealt - splits.done, task
    for ranges in (splits.returned, splits.received, splits.touched):
        assert ranges == at_least(united(ranges), splits.done), task
        assert not ranges or ranges[-1][1] <= splits.dealt, task
    assert not subtracted(splits.received, splits.touched), task
    assert splits.held >= 0, task
    assert splits.last[1] - splits.last[0] <= splits.dealt, task
    assert (splits.grants == 0) == (splits.dealt == 0), task
    assert task.unsettled <= state.iterations[task.iteration_id].clients, task
    assert task.gone or not task.unsettled, task
    assert not (task.gone and task.departed), task
    assert task.gone or not splits.kept_by, task
    assert splits.kept_by.keys() <= state.iterations[task.iteration_id].clients, task
    for unit, rows in splits.rows.items():
        assert splits.done <= unit < splits.dealt, task
        assert rows, task
        assert rows == united(rows), task
        assert not common(((unit, unit + 1),), united((*splits.returned, *splits.received))), task


def _check_jobs(state: DispatcherState) -> None:
    for job_id, job in state.jobs.items():
        assert job.job_id == job_id < state.next_job, job
        assert job.dataset_id in state.datasets, job
        assert (job.name is not None) + (job.owner is not None) + bool(job.save) == 1, job
        assert job.name is None or state.names[job.name] == job_id, job
        assert job.owner is None or state.owners[job.owner] == job_id, job
        assert not job.terms.cost_plan or job.terms.cost_plan in state.plans, job
        assert state.iterations.keys() >= set(job.iterations.values()), job
        assert not any(job.is_over(each) for each in job.iterations), job
        assert len(job.forgotten) <= PASSES_REMEMBERED, job
    saving = sum(bool(job.save) for job in state.jobs.values())
    assert len(state.names) + len(state.owners) + saving == len(state.jobs)


def _check_saves(state: DispatcherState) -> None:
    assert sum(save.is_closed for save in state.saves.values()) <= SAVES_REMEMBERED
    at_work = {save.job_id for save in state.saves.values() if not save.is_closed}
    assert at_work == {job.job_id for job in state.jobs.values() if job.save}, state.saves
    for save_id, save in state.saves.items():
        assert save.save == save_id, save
        if save.is_closed:
            assert not save.stored, save
            continue
        assert state.jobs[save.job_id].save == save_id, save
        assert [*state.jobs[save.job_id].iterations.values()] == [save.iteration_id], save
        iteration = state.iterations[save.iteration_id]
        assert not iteration.clients, save
        assert save.is_open or not iteration.tasks, save
        assert save.files == len(save.stored), save
        assert save.elements == sum(file.elements for file in save.stored), save
        assert save.size == sum(file.bytes for file in save.stored), save
        for task in state.tasks_of(iteration):
            mine = [file.number for file in save.stored if file.stream == task.task_id]
            assert mine == list(range(files_of(task.mode).number)), task
            assert task.phase is not TaskPhase.FINISHED or not task.splits.held, task
        if iteration.finished and not iteration.failed:
            assert iteration.splits.rest == 0, iteration
            assert not iteration.splits.given_up, iteration


def _check_iteration(state: DispatcherState, iteration_id: int, iteration: Iteration) -> None:
    pool = iteration.splits
    assert iteration.iteration_id == iteration_id < state.next_iteration, iteration
    job = state.jobs[iteration.job_id]
    assert job.iterations[iteration.pass_number] == iteration_id
    tasks = state.tasks_of(iteration)
    assert len(set(iteration.tasks)) == len(tasks), iteration
    if job.terms.num_consumers is not None:
        _check_rounds(iteration, consumers_of(iteration.mode), tasks)
    running = [task.worker_id for task in tasks if task.phase is TaskPhase.RUNNING]
    assert len(set(running)) == len(running), iteration
    assert iteration.leavers == sum(state.workers[each].leaving for each in running), iteration
    assert iteration.takers == len(running) - iteration.leavers, iteration
    assert pool.held == sum(task.splits.held for task in state.running_tasks(iteration)), iteration
    assert not (iteration.finished and running), iteration
    assert iteration.finished or not iteration.failed, iteration
    if not iteration.finished and not job.save:
        served = {task.worker_id for task in tasks if task.phase is not TaskPhase.LOST}
        if iteration.is_dealt:
            waits = not running and not (pool.returned or pool.parts)
            assert served >= set(staying(state, iteration)) or waits, (iteration, state.workers)
        elif not any(shard_of(task.mode) for task in tasks):
            _check_copies(state, iteration, tasks)
    assert not (iteration.left & iteration.clients), iteration
    _check_units(iteration, tasks)


def _check_copies(state: DispatcherState, iteration: Iteration, tasks: list[Task]) -> None:
    had = {task.worker_id for task in tasks}
    had_at = {task.address for task in tasks if task.phase is not TaskPhase.LOST}
    deaths = sum(task.phase is TaskPhase.LOST and task.reason != LEFT for task in tasks)
    if (deaths < 3 and not iteration.missing) or not tasks:
        for worker_id in staying(state, iteration):
            known = worker_id in had or state.workers[worker_id].address in had_at
            assert known, (iteration, state.workers)


def _check_rounds(iteration: Iteration, consumers: Consumers, tasks: list[Task]) -> None:
    assert consumers.present.keys() <= iteration.clients, iteration
    indices = [*consumers.present.values()]
    if not iteration.finished:
        assert len({*indices, *consumers.departed}) == len(indices) + len(consumers.departed)
    for task in tasks:
        rounds = rounds_of(task.mode)
        assert rounds.first <= consumers.horizon, task
        assert task.gone or (rounds.arrived is None and not rounds.torn), task


def _check_units(iteration: Iteration, tasks: list[Task]) -> None:
    pool = iteration.splits
    end = pool.positions or 0
    assert pool.next >= 0, iteration
    assert len(iteration.missing) <= LOSSES_REMEMBERED, iteration
    assert end < 0 or pool.next <= end, iteration
    for ranges in (
        pool.returned,
        pool.recovered,
        pool.suspects,
    ):
        assert ranges == united(ranges), iteration
    assert pool.suspects_at_once >= 1, iteration
    assert not subtracted(pool.suspects, pool.recovered), iteration
    assert not subtracted(pool.recovered, ((0, pool.next),)), iteration
    assert not common(pool.given_up, pool.recovered), iteration
    for unit in pool.deaths:
        known = (*pool.suspects, *pool.given_up)
        assert common(((unit, unit + 1),), united(known)), iteration
    assert not common(pool.given_up, pool.returned), iteration
    # A unit that was dealt and is not done is with one task or was returned, never both.
    if pool.exactly_once:
        _check_rows(iteration, tasks)
        return
    assert not pool.parts, iteration
    places = [*pool.returned]
    for task in tasks:
        splits = task.splits
        assert not splits.rows, task
        kept = subtracted(((splits.done, splits.dealt),), splits.returned) if splits.held else ()
        found = splits.located(kept)
        assert count(found) == splits.held, task
        places += found
    assert count(united(places)) == count(places), (iteration, tasks)
    assert all(stop <= pool.next for _, stop in places), (iteration, tasks)


def _check_rows(iteration: Iteration, tasks: list[Task]) -> None:
    """Check that each element is to be given by one task, or to be dealt, never both."""
    pool = iteration.splits
    places = [*pool.returned]
    parts = [*pool.parts.items()]
    for task in tasks:
        splits = task.splits
        kept = subtracted(
            ((splits.done, splits.dealt),),
            united((*splits.returned, *splits.received)),
        )
        for unit, rows in splits.rows.items():
            ((place, _),) = splits.located(((unit, unit + 1),))
            parts.append((place, rows))
            kept = subtracted(kept, ((unit, unit + 1),))
        places += splits.located(kept)
    assert count(united(places)) == count(places), (iteration, tasks)
    assert all(stop <= pool.next for _, stop in places), (iteration, tasks)
    by_place: dict[int, list[tuple[int, int]]] = {}
    for place, rows in parts:
        assert rows, iteration
        assert rows == united(rows), iteration
        assert place < pool.next, iteration
        assert not common(((place, place + 1),), united(places)), (iteration, tasks)
        by_place.setdefault(place, []).extend(rows)
    for place, found in by_place.items():
        assert count(united(found)) == count(found), (place, iteration, tasks)
