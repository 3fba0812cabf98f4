"""Derived events: assignment of tasks to workers and the end of iterations, for all modes.

An iteration is one epoch of a job, shared by all its clients. Its policy (`modes`) decides how
workers share it: which tasks exist, when it is complete, and how splits are recovered before that.
After every event that may end an iteration or leave a worker without a task, this module asks the
policy in a fixed order. A draining worker gets no new tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.service.dispatcher import events
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy_selection import policy_of
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.modes.coordinated_reads.events import RoundsReported
from headrace.service.modes.distributed_save.records import SaveDirectoryCreated, SaveFailed

__all__ = ["affected_iterations", "derive_events"]


def affected_iterations(state: DispatcherState, event: AnyEvent) -> tuple[int, ...]:
    """Return the iterations that an event may start, end or change when it is applied."""
    find = _AFFECTED.get(type(event))
    return () if find is None else tuple(find(state, event))


def derive_events(
    state: DispatcherState, iteration_id: int, is_unheard: Callable[[str, int], bool]
) -> list[AnyEvent]:
    """Return the events that follow for an affected iteration after an event was applied.

    Some of these events affect it again.

    Args:
        state: State after the event.
        iteration_id: Affected iteration.
        is_unheard: Returns whether a client has sent nothing since a task of an iteration ended.
    """
    iteration = state.iterations[iteration_id]
    policy = policy_of(state, iteration)
    if iteration.finished and not policy.must_reopen(state, iteration):
        return []
    recovery = policy.pending_recovery(state, iteration)
    if recovery is not None:
        return [recovery]
    if policy.is_complete(state, iteration):
        if policy.awaited_clients(state, iteration, is_unheard):
            return []
        failure_reason = policy.failure_reason(state, iteration)
        return [events.IterationFinished(iteration_id=iteration_id, failure_reason=failure_reason)]
    return [
        events.TaskCreated(
            task_id=task_id, iteration_id=iteration_id, **msgspec.structs.asdict(assignment)
        )
        for task_id, assignment in enumerate(
            policy.tasks_to_create(state, iteration), start=state.next_task_id
        )
    ]


def _new_iteration(state: DispatcherState, event: events.IterationCreated) -> list[int]:
    return [event.iteration_id]


def _task_iterations(state: DispatcherState, event: Any) -> list[int]:
    iteration_id = state.tasks[event.task_id].iteration_id
    iteration = state.iterations[iteration_id]
    return [iteration_id, *policy_of(state, iteration).affected_iterations(state, iteration)]


def _reported_iterations(
    state: DispatcherState,
    event: events.DeliveryReported | events.ElementsReceived | events.ElementsConsumed,
) -> list[int]:
    """Return no iteration while other clients must report as well: nothing follows before."""
    awaiting = state.tasks[event.task_id].awaiting_reports
    is_last = len(awaiting) <= (event.client_id in awaiting)
    return _task_iterations(state, event) if is_last else []


def _save_iteration(state: DispatcherState, event: Any) -> list[int]:
    return [state.saves[event.save_id].iteration_id]


def _worker_iterations(state: DispatcherState, event: Any) -> list[int]:
    worker = state.workers[event.worker_id]
    return sorted(
        {state.tasks[task_id].iteration_id for task_id in worker.tasks | worker.finished_tasks}
    )


def _client_iteration(state: DispatcherState, event: events.ClientLeft) -> list[int]:
    return [state.clients[event.client_id]]


def _unfinished_iterations(state: DispatcherState, event: events.WorkerRegistered) -> list[int]:
    if event.worker_id in state.workers:
        return []
    return [
        iteration_id
        for iteration_id, iteration in state.iterations.items()
        if not iteration.finished
    ]


_AFFECTED: dict[type, Callable[[DispatcherState, Any], list[int]]] = {
    events.WorkerRegistered: _unfinished_iterations,
    events.WorkerDraining: _worker_iterations,
    events.WorkerLeft: _worker_iterations,
    events.WorkerLost: _worker_iterations,
    events.IterationCreated: _new_iteration,
    events.TaskFinished: _task_iterations,
    events.TaskFailed: _task_iterations,
    events.TaskLost: _task_iterations,
    events.DeliveryReported: _reported_iterations,
    RoundsReported: _task_iterations,
    events.ElementsReceived: _reported_iterations,
    events.ElementsConsumed: _reported_iterations,
    events.ClientLeft: _client_iteration,
    events.DepartedClientReported: _task_iterations,
    events.SplitsReturned: _task_iterations,
    events.SplitsReassigned: _task_iterations,
    events.SplitsAbandoned: _task_iterations,
    SaveDirectoryCreated: _save_iteration,
    SaveFailed: _save_iteration,
}
