"""Who works on what: the one place that gives tasks to workers, and sees when none is to come.

An iteration is one pass of a job, shared by all its clients. Each worker has one task of each
unfinished iteration, one that joins later too. A worker that is leaving gets no more. Where units
came back from a leaving worker and nobody runs who could be dealt them, every worker that stays
gets another task.

Where nothing is dealt, each task is a whole copy, and one that is lost ends there: no copy takes
its place, neither at its address nor elsewhere, unless all were lost. Then those that are there or
join make another attempt, of which clients say that elements come again. After three in a row, none
of which lasted a minute, the iteration is given up: what kills every worker soon would otherwise
yield the same elements again and again.

An iteration is over when no task runs and somebody reached the end, or nothing is left to deal. A
task that runs and holds nothing does not keep it open once nothing can be dealt any more: its
worker may be one that no client reaches. Where several clients read, the
end waits until each of them was heard since the last task ended, or counts as gone: what one was
sent that has died is left to the others. Where all tasks were lost before that, or only leaving
workers ended while units are left, it goes on when a worker joins: until then its clients wait, as
they do where there was no worker at all.

Units of a task that is lost or failed are dealt again, once all its clients have said what they
received: those of which none received anything. An iteration is not over before that. A unit that
came back so twice is suspected to kill its workers. It is dealt with few others, in the end alone;
a worker that dies with it then was the last that it was dealt to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.ranges import common, located, numbered
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task, TaskPhase
from headrace.service.dispatcher.updates import Update

__all__ = ["assign", "consequences", "may_recover", "staying", "struck_by", "waits_for"]

_MOST_ATTEMPTS = 3


def assign(
    state: DispatcherState, iteration_ids: Iterable[int], worker_ids: Iterable[str]
) -> list[updates.TaskCreated]:
    """Give each of these workers a task of each of these iterations."""
    pairs = [(iteration, worker) for iteration in iteration_ids for worker in worker_ids]
    return [
        updates.TaskCreated(
            task_id=task_id,
            iteration_id=iteration_id,
            worker_id=worker_id,
            attempt=_next_attempt(state, iteration_id),
        )
        for task_id, (iteration_id, worker_id) in enumerate(pairs, start=state.next_task)
    ]


def _next_attempt(state: DispatcherState, iteration_id: int) -> int:
    iteration = state.iterations.get(iteration_id)
    if iteration is None or iteration.is_dealt:
        return 0
    tasks = state.tasks_of(iteration)
    return max((task.attempt for task in tasks), default=-1) + _all_lost(tasks)


def _short_attempts(tasks: list[Task]) -> int:
    """Return how many attempts in a row, up to the last, ended soon."""
    lasted = max((task.attempt for task in tasks if task.lasted), default=-1)
    return max(task.attempt for task in tasks) - lasted


def _all_lost(tasks: list[Task]) -> bool:
    return all(task.phase is TaskPhase.LOST for task in tasks)


def staying(state: DispatcherState) -> list[str]:
    """Return the workers that take work."""
    return [worker_id for worker_id, worker in state.workers.items() if not worker.leaving]


def struck_by(state: DispatcherState, fact: Update) -> tuple[int, ...]:
    """Return the iterations that a fact, which is about to be applied, may end or leave alone."""
    find = _STRUCK.get(type(fact))
    return () if find is None else tuple(find(state, fact))


def consequences(
    state: DispatcherState, iteration_id: int, is_silent: Callable[[str, int], bool]
) -> list[Update]:
    """Return what follows for an iteration that was struck by a fact, which is applied by now.

    Some of these facts strike it again.

    Args:
        state: With the fact.
        iteration_id: What was struck.
        is_silent: Whether a client was not heard of since a task of an iteration ended.
    """
    iteration = state.iterations[iteration_id]
    if iteration.finished:
        return []
    for task in state.tasks_of(iteration):
        if task.gone and not task.unsettled and task.untouched:
            return [_recovery(iteration, task)]
    idle = _idle(state, iteration)
    if idle is not None:
        return [updates.TaskFinished(task_id=idle.task_id)]
    if _is_over(state, iteration):
        if waits_for(iteration, is_silent):
            return []
        failed = _failure(state.tasks_of(iteration)) if not iteration.is_dealt else ""
        return [updates.IterationFinished(iteration_id=iteration_id, failed=failed)]
    return [*assign(state, [iteration_id], _missing(state, iteration))]


def _recovery(iteration: Iteration, task: Task) -> Update:
    """Return what becomes of units of a task that is gone."""
    if iteration.suspects and iteration.suspects_at_once == 1:
        held = located(task.runs, task.done, task.untouched)
        deadly = numbered(task.runs, task.done, common(held, iteration.suspects))
        if deadly:
            return updates.UnitsGivenUp(task_id=task.task_id, units=deadly)
    return updates.UnitsReturned(task_id=task.task_id, units=task.untouched)


def may_recover(state: DispatcherState, iteration: Iteration) -> bool:
    """Whether units may come back from a task that is lost or failed, or from a client."""
    return any(
        task.unsettled or (task.departed and task.held) for task in state.tasks_of(iteration)
    )


def waits_for(iteration: Iteration, is_silent: Callable[[str, int], bool]) -> list[str]:
    """Return the clients for which the end of an iteration waits: where others read it too.

    What such a client was sent and did not use is dealt again, if it is gone.
    """
    if not iteration.is_dealt or len(iteration.clients) < 2:
        return []
    return sorted(each for each in iteration.clients if is_silent(each, iteration.iteration_id))


def _idle(state: DispatcherState, iteration: Iteration) -> Task | None:
    """Return a running task of an iteration of which every unit is done, or lost for good."""
    if not iteration.is_dealt or iteration.rest != 0 or may_recover(state, iteration):
        return None
    running = state.running_tasks(iteration)
    return None if any(task.held for task in running) else next(iter(running), None)


def _failure(tasks: list[Task]) -> str:
    """Return why an iteration in which nothing is dealt is given up; empty: it is not."""
    if not _all_lost(tasks):
        return ""
    return (
        "every worker that had a copy of this iteration was lost, within a minute "
        f"{_MOST_ATTEMPTS} times in a row: {len(tasks)} workers, the last at {tasks[-1].address} "
        f"({tasks[-1].reason}). A "
        "function of the dataset may kill or block its process; the workers' logs may say more"
    )


def _is_over(state: DispatcherState, iteration: Iteration) -> bool:
    phases = {task.phase for task in state.tasks_of(iteration)}
    if not phases or TaskPhase.RUNNING in phases or may_recover(state, iteration):
        return False
    if phases == {TaskPhase.LOST}:
        if not iteration.is_dealt:
            return _short_attempts(state.tasks_of(iteration)) >= _MOST_ATTEMPTS
        return iteration.rest == 0
    # Where every worker that could go on has failed at it, what is left would wait for ever.
    given_up = TaskPhase.FAILED in phases and not _able(state, iteration)
    return not _has_rest(iteration) or given_up


def _has_rest(iteration: Iteration) -> bool:
    return bool(iteration.returned) or (not iteration.ended and iteration.rest != 0)


def _able(state: DispatcherState, iteration: Iteration) -> list[str]:
    tasks = state.tasks_of(iteration)
    failed = {task.worker_id for task in tasks if task.phase is TaskPhase.FAILED}
    return [worker_id for worker_id in staying(state) if worker_id not in failed]


def _missing(state: DispatcherState, iteration: Iteration) -> list[str]:
    """Return the workers that should have a task of the iteration and have none."""
    if not iteration.is_dealt:
        return _without_copy(state, iteration)
    tasks = [task for task in state.tasks_of(iteration) if task.phase is not TaskPhase.LOST]
    running = {task.worker_id for task in tasks if task.phase is TaskPhase.RUNNING}
    if _has_rest(iteration) and not running & set(staying(state)):
        return _able(state, iteration)
    served = {task.worker_id for task in tasks}
    return [worker_id for worker_id in staying(state) if worker_id not in served]


def _without_copy(state: DispatcherState, iteration: Iteration) -> list[str]:
    tasks = state.tasks_of(iteration)
    if _all_lost(tasks):
        return staying(state)
    current = [task for task in tasks if task.attempt == tasks[-1].attempt]
    if any(task.phase is TaskPhase.LOST for task in current):
        return []
    # Where a copy ended already, a worker that starts again would make a second one.
    served = {task.address for task in current}
    return [each for each in staying(state) if state.workers[each].address not in served]


def _of_task(state: DispatcherState, fact: Any) -> list[int]:
    return [state.tasks[fact.task_id].iteration_id]


def _of_worker(state: DispatcherState, fact: Any) -> list[int]:
    worker = state.workers[fact.worker_id]
    return sorted({state.tasks[each].iteration_id for each in worker.tasks | worker.finished})


def _of_client(state: DispatcherState, fact: updates.ClientLeft) -> list[int]:
    return [state.clients[fact.client_id]]


def _unfinished(state: DispatcherState, fact: updates.WorkerRegistered) -> list[int]:
    if fact.worker_id in state.workers:
        return []
    return [key for key, iteration in state.iterations.items() if not iteration.finished]


_STRUCK: dict[type, Callable[[DispatcherState, Any], list[int]]] = {
    updates.WorkerRegistered: _unfinished,
    updates.WorkerLeaving: _of_worker,
    updates.WorkerLeft: _of_worker,
    updates.WorkerLost: _of_worker,
    updates.TaskFinished: _of_task,
    updates.TaskFailed: _of_task,
    updates.TaskLost: _of_task,
    updates.TaskSettled: _of_task,
    updates.ClientLeft: _of_client,
    updates.ClientDropped: _of_task,
    updates.UnitsReturned: _of_task,
    updates.UnitsGivenUp: _of_task,
}
