"""Applies facts: the only code that changes a state. It never decides.

Rule. A fact that the state contradicts is an error of the dispatcher's own. It is reported with
      what the state says of everything that the fact names; the state is then no longer to be
      used, and whoever holds the journal reads it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.ranges import (
    Ranges,
    at_least,
    common,
    count,
    drop_first,
    located,
    subtracted,
    united,
)
from headrace.service.dispatcher.state import (
    LOSSES_REMEMBERED,
    PASSES_REMEMBERED,
    Dataset,
    DispatcherState,
    Iteration,
    Job,
    Missing,
    Readers,
    Task,
    TaskPhase,
    Worker,
)
from headrace.service.dispatcher.updates import Update

__all__ = ["IllegalFactError", "apply", "illegal"]


class IllegalFactError(Exception):
    """A fact does not fit the state; the message tells the story of what it names."""


def apply(state: DispatcherState, fact: Update) -> None:
    """Change the state by one fact.

    Raises:
        IllegalFactError: The state contradicts the fact. It may be half changed.
    """
    try:
        _APPLY[type(fact)](state, fact)
    except Exception as error:
        raise illegal(state, fact, error) from error


def illegal(state: DispatcherState, fact: Update, error: Exception) -> IllegalFactError:
    """Return an error that tells the story of a fact at which `error` was met."""
    return IllegalFactError(
        f"{fact} cannot be applied: {type(error).__name__}: {error}\n{_story(state, fact)}"
    )


def _story(state: DispatcherState, fact: Update) -> str:
    lines = []
    for name, known in _NAMED.items():
        key = getattr(fact, name, None)
        if key is not None:
            lines.append(f"  {name} {key}: {known(state).get(key, 'not known')}")
    return "\n".join(lines)


_NAMED: dict[str, Callable[[DispatcherState], dict[Any, Any]]] = {
    "dataset_id": lambda state: state.datasets,
    "job_id": lambda state: state.jobs,
    "iteration_id": lambda state: state.iterations,
    "task_id": lambda state: state.tasks,
    "worker_id": lambda state: state.workers,
    "client_id": lambda state: state.clients,
}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _dispatcher_started(state: DispatcherState, fact: updates.DispatcherStarted) -> None:
    _require(not state.incarnation, "a dispatcher starts with nothing only once")
    state.incarnation = fact.incarnation
    state.secret = fact.secret


def _plan_stored(state: DispatcherState, fact: updates.PlanStored) -> None:
    state.plans[fact.digest] = fact.size


def _dataset_registered(state: DispatcherState, fact: updates.DatasetRegistered) -> None:
    _require(fact.digest in state.plans, "its plan was never stored")
    _require(fact.dataset_id not in state.datasets, "the id is taken")
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
    _require(dataset.anonymous, "somebody may know its id")
    used = any(job.dataset_id == fact.dataset_id for job in state.jobs.values())
    _require(not used, "a job reads it")
    del state.tokens[dataset.token]
    if all(other.digest != dataset.digest for other in state.datasets.values()):
        del state.plans[dataset.digest]


def _plan_forgotten(state: DispatcherState, fact: updates.PlanForgotten) -> None:
    used = any(dataset.digest == fact.digest for dataset in state.datasets.values())
    _require(not used, "a dataset has it")
    del state.plans[fact.digest]


def _worker_registered(state: DispatcherState, fact: updates.WorkerRegistered) -> None:
    known = state.workers.get(fact.worker_id)
    if known is None:
        _require(fact.address not in state.addresses, "the address is another worker's")
        known = Worker(worker_id=fact.worker_id, address=fact.address, tags=fact.tags)
        state.workers[fact.worker_id] = known
        state.addresses[fact.address] = fact.worker_id
    known.tags = fact.tags


def _worker_leaving(state: DispatcherState, fact: updates.WorkerLeaving) -> None:
    worker = state.workers[fact.worker_id]
    _require(not worker.leaving, "it is leaving already")
    worker.leaving = True
    for task_id in worker.tasks:
        iteration = state.iterations[state.tasks[task_id].iteration_id]
        iteration.takers -= 1
        iteration.leavers += 1


def _worker_gone(state: DispatcherState, fact: updates.WorkerLost | updates.WorkerLeft) -> None:
    worker = state.workers[fact.worker_id]
    reason = "it left" if isinstance(fact, updates.WorkerLeft) else fact.reason
    over = worker.tasks | worker.finished
    for task_id in [*worker.tasks]:
        _end(state, task_id, TaskPhase.LOST)
    for task_id in over:
        state.tasks[task_id].reason = reason
        _give_up(state, state.tasks[task_id])
    del state.workers[fact.worker_id], state.addresses[worker.address]


def _end(state: DispatcherState, task_id: int, phase: TaskPhase) -> Task:
    task = _running(state, task_id)
    iteration, worker = state.iterations[task.iteration_id], state.workers[task.worker_id]
    task.phase = phase
    worker.tasks.remove(task_id)
    iteration.held -= task.held
    if worker.leaving:
        iteration.leavers -= 1
    else:
        iteration.takers -= 1
    iteration.version += 1
    return task


def _give_up(state: DispatcherState, task: Task) -> None:
    """Mark a task of which nothing more will come; who read it must say what did."""
    iteration = state.iterations[task.iteration_id]
    iteration.version += 1
    task.gone = True
    if task.held:
        task.unsettled = set(iteration.clients)
    if task.departed:
        # What they received of this, nobody will know.
        _touch_first(task, max(task.departed.values()))
        task.departed = {}


def _job_created(state: DispatcherState, fact: updates.JobCreated) -> None:
    _require(fact.job_id == state.next_job, "its number is not the next one")
    _require(fact.dataset_id in state.datasets, "its dataset is not known")
    state.jobs[fact.job_id] = Job(
        job_id=fact.job_id,
        name=fact.name,
        owner=fact.owner,
        dataset_id=fact.dataset_id,
        processing_mode=fact.processing_mode,
        target_workers=fact.target_workers,
        num_consumers=fact.num_consumers,
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
    _require(fact.iteration_id == state.next_iteration, "its number is not the next one")
    job = state.jobs[fact.job_id]
    _require(fact.pass_number not in job.iterations, "the job has one of this pass")
    _require(not job.is_over(fact.pass_number), "the job's pass is over")
    dealt = job.processing_mode == ShardingPolicy.DYNAMIC
    state.iterations[fact.iteration_id] = Iteration(
        iteration_id=fact.iteration_id,
        job_id=fact.job_id,
        pass_number=fact.pass_number,
        seed=fact.seed,
        positions=state.datasets[job.dataset_id].positions if dealt else None,
        num_consumers=fact.num_consumers,
    )
    job.iterations[fact.pass_number] = fact.iteration_id
    state.next_iteration = fact.iteration_id + 1


def _iteration_finished(state: DispatcherState, fact: updates.IterationFinished) -> None:
    iteration = state.iterations[fact.iteration_id]
    _require(not state.running_tasks(iteration), "it has running tasks")
    iteration.finished, iteration.failed = True, fact.failed
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
    _require(not iteration.clients, "clients read it")
    for task_id in iteration.tasks:
        task = state.tasks.pop(task_id)
        worker = state.workers.get(task.worker_id)
        if worker is not None:
            worker.tasks.discard(task_id)
            worker.finished.discard(task_id)
    return iteration


def _task_created(state: DispatcherState, fact: updates.TaskCreated) -> None:
    _require(fact.task_id == state.next_task, "its number is not the next one")
    worker = state.workers[fact.worker_id]
    iteration = state.iterations[fact.iteration_id]
    _require(not iteration.finished, "the iteration is finished")
    _require(not worker.leaving, "the worker is leaving")
    state.tasks[fact.task_id] = Task(
        task_id=fact.task_id,
        iteration_id=fact.iteration_id,
        worker_id=fact.worker_id,
        address=worker.address,
        ticket=state.ticket(fact.task_id),
        shard=fact.shard,
        of=fact.of,
        starting_round=fact.starting_round,
        attempt=fact.attempt,
    )
    iteration.tasks.append(fact.task_id)
    iteration.takers += 1
    iteration.version += 1
    worker.tasks.add(fact.task_id)
    state.next_task = fact.task_id + 1


def _running(state: DispatcherState, task_id: int) -> Task:
    task = state.tasks[task_id]
    _require(task.phase is TaskPhase.RUNNING, "the task does not run")
    return task


def _task_finished(state: DispatcherState, fact: updates.TaskFinished) -> None:
    task = _end(state, fact.task_id, TaskPhase.FINISHED)
    worker = state.workers[task.worker_id]
    if task.dealt:
        worker.finished.add(fact.task_id)
    if not worker.leaving:
        state.iterations[task.iteration_id].ended = True


def _task_failed(state: DispatcherState, fact: updates.TaskFailed) -> None:
    task = _end(state, fact.task_id, TaskPhase.FAILED)
    task.reason = fact.reason
    _give_up(state, task)


def _task_lost(state: DispatcherState, fact: updates.TaskLost) -> None:
    task = _end(state, fact.task_id, TaskPhase.LOST)
    task.reason = fact.reason
    _give_up(state, task)


def _copy_lasted(state: DispatcherState, fact: updates.CopyLasted) -> None:
    _running(state, fact.task_id).lasted = True


def _tasks_forgotten(state: DispatcherState, fact: updates.TasksForgotten) -> None:
    iteration = state.iterations[fact.iteration_id]
    for task_id in fact.task_ids:
        task = state.tasks.pop(task_id)
        _require(task.phase is TaskPhase.LOST and not task.unsettled, "it is not over")
        iteration.tasks.remove(task_id)
        lost = task.missing
        if lost or iteration.positions is None:
            units = located(task.runs, task.done, lost)
            _miss(iteration, task, "", units)


def _miss(iteration: Iteration, task: Task, client_id: str, units: Ranges) -> None:
    iteration.missing.append(
        Missing(
            task_id=task.task_id,
            client_id=client_id,
            units=units,
            address=task.address,
            reason=task.reason,
        )
    )
    for old in iteration.missing[:-LOSSES_REMEMBERED]:
        iteration.missing_before += count(old.units)
    del iteration.missing[:-LOSSES_REMEMBERED]


def _task_settled(state: DispatcherState, fact: updates.TaskSettled) -> None:
    task = state.tasks[fact.task_id]
    task.unsettled.discard(fact.client_id)
    state.iterations[task.iteration_id].version += 1
    task.received = united((*task.received, *at_least(fact.received, task.done)))
    _touch(task, (*fact.received, *fact.touched))


def _touch(task: Task, units: Ranges) -> None:
    task.touched = united((*task.touched, *at_least(units, task.done)))


def _client_joined(state: DispatcherState, fact: updates.ClientJoined) -> None:
    _require(fact.client_id not in state.clients, "the client reads an iteration already")
    iteration = state.iterations[fact.iteration_id]
    state.clients[fact.client_id] = fact.iteration_id
    iteration.clients.add(fact.client_id)
    if iteration.readers is None:
        iteration.readers = Readers(first=fact.client_id)
    elif not iteration.finished:
        iteration.readers.clients += 1


def _client_left(state: DispatcherState, fact: updates.ClientLeft) -> None:
    iteration = state.iterations[state.clients.pop(fact.client_id)]
    iteration.clients.discard(fact.client_id)
    iteration.version += 1
    for task in state.tasks_of(iteration):
        if fact.client_id in task.unsettled:
            # What it received of this, nobody will know.
            task.unsettled.discard(fact.client_id)
            _touch_first(task, task.dealt)
        elif not task.gone and iteration.positions is not None:
            task.departed[fact.client_id] = task.dealt


def _touch_first(task: Task, units: int) -> None:
    if task.held and task.done < units:
        _touch(task, ((task.done, units),))


def _client_dropped(state: DispatcherState, fact: updates.ClientDropped) -> None:
    task = state.tasks[fact.task_id]
    iteration = state.iterations[task.iteration_id]
    del task.departed[fact.client_id]
    units = united((*fact.returned, *fact.lost))
    _require(count(units) == count(fact.returned) + count(fact.lost), "the ranges overlap")
    _require(not units or units[0][0] >= task.done, "units that are done cannot come back")
    _require(not subtracted(units, ((0, task.dealt),)), "they were never dealt to the task")
    _require(units == subtracted(units, task.returned), "they were returned already")
    _require(not (fact.returned and iteration.finished), "the iteration is finished")
    if task.phase is TaskPhase.RUNNING:
        iteration.held -= count(units)
    task.returned = united((*task.returned, *units))
    back = located(task.runs, task.done, fact.returned)
    iteration.returned = united((*iteration.returned, *back))
    if fact.lost:
        _miss(iteration, task, fact.client_id, located(task.runs, task.done, fact.lost))
    iteration.version += 1


def _units_dealt(state: DispatcherState, fact: updates.UnitsDealt) -> None:
    task = _running(state, fact.task_id)
    iteration = state.iterations[task.iteration_id]
    _require(fact.number == task.grants, "it is not the task's next grant")
    _require(fact.start < fact.stop, "it deals nothing")
    given = ((fact.start, fact.stop),)
    if fact.start < iteration.next:
        left = subtracted(iteration.returned, given)
        returned = count(iteration.returned) - count(left)
        _require(returned == fact.stop - fact.start, "the units were dealt already")
        iteration.returned = left
    else:
        _require(fact.start == iteration.next, "it leaves units out")
        iteration.next = fact.stop
    iteration.held -= task.held
    task.grants, task.last = fact.number + 1, (fact.start, fact.stop)
    _forget_done(task, fact.done)
    if task.runs and task.runs[-1][1] == fact.start:
        task.runs[-1] = (task.runs[-1][0], fact.stop)
    else:
        task.runs.append((fact.start, fact.stop))
    task.dealt += fact.stop - fact.start
    iteration.held += task.held


def _forget_done(task: Task, done: int) -> None:
    if done > task.done:
        drop_first(task.runs, done - task.done)
        task.done = done
        task.returned = at_least(task.returned, done)
        task.received = at_least(task.received, done)
        task.touched = at_least(task.touched, done)


def _units_returned(state: DispatcherState, fact: updates.UnitsReturned) -> None:
    task = state.tasks[fact.task_id]
    iteration = state.iterations[task.iteration_id]
    _require(fact.units == united(fact.units), "the ranges overlap")
    _require(fact.units[0][0] >= task.done, "units that are done cannot come back")
    _require(not subtracted(fact.units, ((0, task.dealt),)), "they were never dealt to the task")
    _require(fact.units == subtracted(fact.units, task.returned), "they were returned already")
    back = located(task.runs, task.done, fact.units)
    if task.phase is TaskPhase.RUNNING:
        iteration.held -= count(fact.units)
    else:
        _require(task.gone and not task.unsettled, "somebody may have something of them")
        _require(not iteration.finished, "the iteration is finished")
        _require(not subtracted(fact.units, task.untouched), "somebody has something of them")
        _recover(iteration, back)
    task.returned = united((*task.returned, *fact.units))
    iteration.returned = united((*iteration.returned, *back))


def _recover(iteration: Iteration, units: Ranges) -> None:
    """Take note that units outlived a task, as well as some of them did before."""
    again = common(units, iteration.suspects)
    suspects = subtracted(common(units, iteration.recovered), again)
    if again:
        # One of these it was: in smaller groups it is found.
        iteration.suspects_at_once = _part(iteration.suspects_at_once)
    if suspects:
        iteration.suspects_at_once = max(iteration.suspects_at_once, _part(count(suspects)))
    iteration.suspects = united((*iteration.suspects, *suspects))
    iteration.recovered = united((*iteration.recovered, *units))


def _part(number: int) -> int:
    return max(1, number // 16)


def _units_given_up(state: DispatcherState, fact: updates.UnitsGivenUp) -> None:
    task = state.tasks[fact.task_id]
    iteration = state.iterations[task.iteration_id]
    _require(not subtracted(fact.units, task.untouched), "the task does not hold them untouched")
    units = located(task.runs, task.done, fact.units)
    _touch(task, fact.units)
    iteration.given_up = united((*iteration.given_up, *units))
    iteration.recovered = subtracted(iteration.recovered, units)
    iteration.suspects = subtracted(iteration.suspects, units)
    # It was these; the others are dealt sooner if many go together.
    iteration.suspects_at_once = _part(count(iteration.suspects))
    iteration.version += 1


_APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    updates.DispatcherStarted: _dispatcher_started,
    updates.PlanStored: _plan_stored,
    updates.PlanForgotten: _plan_forgotten,
    updates.DatasetRegistered: _dataset_registered,
    updates.DatasetKept: _dataset_kept,
    updates.DatasetForgotten: _dataset_forgotten,
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
    updates.TaskSettled: _task_settled,
    updates.CopyLasted: _copy_lasted,
    updates.TasksForgotten: _tasks_forgotten,
    updates.ClientJoined: _client_joined,
    updates.ClientLeft: _client_left,
    updates.ClientDropped: _client_dropped,
    updates.UnitsDealt: _units_dealt,
    updates.UnitsReturned: _units_returned,
    updates.UnitsGivenUp: _units_given_up,
}
