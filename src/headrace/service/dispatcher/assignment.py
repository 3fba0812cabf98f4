"""Who works on what: the one place that gives tasks to workers, and sees when none is to come.

An iteration is one pass of a job, shared by all its clients. How its workers share it, its policy
says (`modes`): which tasks there are to be, when it is over, what becomes of units before that.
Here is what holds for each of them: after every fact that may end an iteration or leave a worker
without a task, the policy is asked, in the same order. A worker that is leaving gets no more tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.modes import policy_of
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.coordinated_reads.records import RoundsSettled
from headrace.service.modes.distributed_save.records import SaveFailed, SaveOpened

__all__ = ["consequences", "struck_by"]


def struck_by(state: DispatcherState, fact: Update) -> tuple[int, ...]:
    """Return the iterations that a fact, which is about to be applied, may begin, end or change."""
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
    policy = policy_of(state, iteration)
    if iteration.finished and not policy.goes_on(state, iteration):
        return []
    loose_end = policy.loose_end(state, iteration)
    if loose_end is not None:
        return [loose_end]
    if policy.is_over(state, iteration):
        if policy.waits_for(state, iteration, is_silent):
            return []
        failed = policy.failure(state, iteration)
        return [updates.IterationFinished(iteration_id=iteration_id, failed=failed)]
    return [
        updates.TaskCreated(
            task_id=task_id, iteration_id=iteration_id, **msgspec.structs.asdict(post)
        )
        for task_id, post in enumerate(policy.vacant(state, iteration), start=state.next_task)
    ]


def _begun(state: DispatcherState, fact: updates.IterationCreated) -> list[int]:
    return [fact.iteration_id]


def _of_task(state: DispatcherState, fact: Any) -> list[int]:
    iteration_id = state.tasks[fact.task_id].iteration_id
    iteration = state.iterations[iteration_id]
    return [iteration_id, *policy_of(state, iteration).affected_by_task(state, iteration)]


def _of_save(state: DispatcherState, fact: Any) -> list[int]:
    return [state.saves[fact.save].iteration_id]


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
    updates.IterationCreated: _begun,
    updates.TaskFinished: _of_task,
    updates.TaskFailed: _of_task,
    updates.TaskLost: _of_task,
    updates.TaskSettled: _of_task,
    RoundsSettled: _of_task,
    updates.ElementsReceived: _of_task,
    updates.ElementsUsed: _of_task,
    updates.ClientLeft: _of_client,
    updates.ClientDropped: _of_task,
    updates.UnitsReturned: _of_task,
    updates.UnitsTakenOver: _of_task,
    updates.UnitsGivenUp: _of_task,
    SaveOpened: _of_save,
    SaveFailed: _of_save,
}
