"""What the log of the dispatcher says of a loss, whoever else hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.sentences import whose
from headrace.service.dispatcher.state import DispatcherState, Task
from headrace.service.dispatcher.updates import Update
from headrace.service.passes import pass_in_words
from headrace.service.ranges import count
from headrace.versions import own_versions, python_mismatch, release_mismatch

__all__ = ["notice"]


def notice(state: DispatcherState, fact: Update) -> str | None:
    """Return what is to be said of a fact that is about to be applied; None: nothing."""
    say = _SAY.get(type(fact))
    return None if say is None else say(state, fact)


def _worker_lost(state: DispatcherState, fact: updates.WorkerLost) -> str:
    worker = state.workers[fact.worker_id]
    tasks = "1 running task" if len(worker.tasks) == 1 else f"{len(worker.tasks)} running tasks"
    return (
        f"the worker at {worker.address} counts as lost: {fact.reason}. It had {tasks}; if it "
        "comes back, it begins again as another worker"
    )


def _worker_registered(state: DispatcherState, fact: updates.WorkerRegistered) -> str | None:
    if fact.worker_id in state.workers:
        return None
    mine, worker = own_versions(), f"the worker at {fact.address} runs {fact.versions}"
    unfit = {
        iteration.job_id: dataset
        for iteration in state.iterations.values()
        if not iteration.finished
        and python_mismatch(fact.versions.python, (dataset := state.dataset_of(iteration)).python)
    }
    if unfit:
        pythons = " and ".join(sorted({each.python for each in unfit.values()}))
        jobs = " and ".join(whose(state, state.jobs[job_id]) for job_id in sorted(unfit))
        return (
            f"{worker}, and gets no tasks of {jobs}, registered by Python {pythons}: run clients "
            "and workers on the same minor version"
        )
    if release_mismatch(fact.versions, mine):
        return f"{worker}, and this dispatcher {mine}: the same release everywhere is tested"
    return None


def _task_lost(state: DispatcherState, fact: updates.TaskLost) -> str | None:
    task = state.tasks[fact.task_id]
    if state.jobs[state.iterations[task.iteration_id].job_id].save:
        return None  # why the save failed is said, not that its tasks end
    return (
        f"task {fact.task_id} of {_reading(state, task)} on the worker at {task.address} is given "
        f"up: {fact.reason}"
    )


def _client_dropped(state: DispatcherState, fact: updates.ClientDropped) -> str | None:
    if not fact.lost:
        return None
    task = state.tasks[fact.task_id]
    return (
        f"up to {count(fact.lost)} positions of {_reading(state, task)} are missing: they were "
        f"sent to client {fact.client_id}, which is gone"
    )


def _save_failed(state: DispatcherState, fact: updates.SaveFailed) -> str:
    return f"the save into {state.saves[fact.save].path!r} has failed: {fact.error}"


def _iteration_finished(state: DispatcherState, fact: updates.IterationFinished) -> str | None:
    save = state.jobs[state.iterations[fact.iteration_id].job_id].save
    if not (save and fact.failed) or state.saves[save].error:
        return None
    return f"the save into {state.saves[save].path!r} has failed: {fact.failed}"


def _reading(state: DispatcherState, task: Task) -> str:
    iteration = state.iterations[task.iteration_id]
    job = state.jobs[iteration.job_id]
    if job.save:
        return whose(state, job)
    return f"{whose(state, job)}, {pass_in_words(iteration.pass_number)}"


_SAY: dict[type, Callable[[DispatcherState, Any], str | None]] = {
    updates.WorkerLost: _worker_lost,
    updates.WorkerRegistered: _worker_registered,
    updates.TaskLost: _task_lost,
    updates.ClientDropped: _client_dropped,
    updates.SaveFailed: _save_failed,
    updates.IterationFinished: _iteration_finished,
}
