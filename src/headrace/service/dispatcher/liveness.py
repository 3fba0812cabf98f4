"""Deciders for liveness: heartbeats, draining, departure and loss of workers."""

from __future__ import annotations

from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.departed_clients import departed_clients_of
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.soft_state import (
    HeartbeatIntervalSet,
    TaskUnreachable,
    WorkerRefusedConnection,
    WorkerUnregistered,
)
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, TaskPhase
from headrace.service.ranges import Ranges, subtract

__all__ = [
    "describe_late_heartbeats",
    "drain_worker",
    "expire_workers",
    "give_up_unreachable",
    "mark_stable_copies",
    "report_unreachable",
    "unregister_worker",
    "worker_heartbeat",
]

_LATE_SECONDS = 60.0
_MAX_NAMED = 5


def worker_heartbeat(
    state: DispatcherState, request: messages.WorkerHeartbeat, context: DecisionContext
) -> DispatcherDecision:
    """Return which of a worker's tasks are no longer needed.

    A finished task stays on its worker while its iteration has clients: a client whose reply was
    lost may request it again.

    Raises:
        NotFoundError: If the worker is not registered, or was declared lost.
    """
    worker_id = request.worker_id
    state.worker(worker_id)
    limits, pace = (
        context.limits,
        context.limits.interval_between_worker_heartbeats(len(state.workers)),
    )
    is_known = context.soft_state.heartbeat_intervals.get(worker_id) == pace
    return DispatcherDecision(
        soft_events=() if is_known else (HeartbeatIntervalSet(worker_id, pace),),
        reply=messages.WorkerHeartbeatReply(
            tasks_to_delete=tuple(
                task_id for task_id in request.tasks if not _is_needed(state, worker_id, task_id)
            ),
            dispatcher_id=state.dispatcher_id,
            departed_clients=departed_clients_of(state, worker_id),
            tasks_to_start=_tasks_to_start(state, request),
            heartbeat_interval=context.next_heartbeat(pace, limits.heartbeat_interval),
        ),
    )


def _tasks_to_start(state: DispatcherState, request: messages.WorkerHeartbeat) -> tuple[int, ...]:
    """Return the tasks that a worker has not started and that no client will request."""
    return tuple(
        task_id
        for task_id in sorted(state.workers[request.worker_id].tasks)
        if state.jobs[state.iterations[state.tasks[task_id].iteration_id].job_id].save_id
        and task_id not in request.tasks
    )


def _is_needed(state: DispatcherState, worker_id: str, task_id: int) -> bool:
    task = state.tasks.get(task_id)
    if task is None or task.worker_id != worker_id or task.phase is TaskPhase.LOST:
        return False
    iteration = state.iterations[task.iteration_id]
    return not iteration.finished or bool(iteration.clients) or bool(task.unconfirmed_clients)


def drain_worker(
    state: DispatcherState, request: messages.DrainWorker, context: DecisionContext
) -> DispatcherDecision:
    """Mark a worker as draining, so that it gets no new work.

    Raises:
        NotFoundError: If the worker is not registered, or was declared lost.
    """
    worker = state.worker(request.worker_id)
    if worker.draining:
        return DispatcherDecision()
    return DispatcherDecision(events=(events.WorkerDraining(worker_id=request.worker_id),))


def unregister_worker(
    state: DispatcherState, request: messages.UnregisterWorker, context: DecisionContext
) -> DispatcherDecision:
    """Unregister a worker; an unknown worker has already left."""
    known = request.worker_id in state.workers
    left = events.WorkerLeft(worker_id=request.worker_id)
    return DispatcherDecision(
        events=(left,) if known else (), soft_events=(WorkerUnregistered(request.worker_id),)
    )


def report_unreachable(
    state: DispatcherState, request: messages.ReportUnreachable, context: DecisionContext
) -> DispatcherDecision:
    """Record that a client cannot reach the worker of a task.

    A worker that refuses connections is lost after a few missed heartbeats; `expire_workers`
    decides that after all pending requests were handled. If it still sends heartbeats, the network
    between worker and client is at fault, and its task is declared lost only if all clients report
    that for long. A worker that is only silent has the whole worker timeout.
    """
    task = state.tasks.get(request.task_id)
    if task is None or task.worker_id not in state.workers:
        return DispatcherDecision()
    unreached = TaskUnreachable(request.task_id, request.client_id)
    return DispatcherDecision(
        soft_events=(WorkerRefusedConnection(task.worker_id), unreached)
        if request.connection_refused
        else (unreached,)
    )


def expire_workers(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Declare workers lost that were silent for too long.

    Workers that refuse connections have less time. A worker whose connection carries data is alive,
    even if its heartbeats are late: a function may hold the interpreter's lock.
    """
    presence, limits = context.soft_state, context.limits
    lost: list[AnyEvent] = []
    for worker_id, heard in presence.worker_heartbeats.items():
        refuses, silent = worker_id in presence.refusing_workers, context.now - heard
        patience = limits.worker_timeout
        if refuses:
            # If an earlier process chose the interval, the number of workers was the same.
            pace = presence.heartbeat_intervals.get(
                worker_id
            ) or limits.interval_between_worker_heartbeats(len(state.workers))
            patience = min(patience, max(limits.refused_worker_timeout, 2 * pace))
        if silent <= patience:
            continue
        of_process = presence.connections.seconds_since_data(worker_id)
        if of_process is not None and of_process <= limits.worker_timeout:
            continue
        exited = refuses or presence.connections.has_exited(worker_id)
        seen = "refuses connections, and" if refuses else "closed its connection, and"
        reason = f"it {f'{seen} ' if exited else ''}was not heard of for {silent:.0f} s"
        lost.append(events.WorkerLost(worker_id=worker_id, reason=reason, timed_out=not exited))
    return lost


def describe_late_heartbeats(state: DispatcherState, context: DecisionContext) -> list[str]:
    """Describe workers with running processes and very late heartbeats, once a minute."""
    reported, found = context.soft_state.last_late_warnings, []
    for worker_id, heard in context.soft_state.worker_heartbeats.items():
        silent = context.now - heard
        if silent <= max(_LATE_SECONDS, context.limits.worker_timeout):
            reported.pop(worker_id, None)
        elif context.now - reported.get(worker_id, heard) >= _LATE_SECONDS:
            reported[worker_id] = context.now
            worker = state.workers[worker_id]
            splits = [
                f"{start} to {stop - 1}"
                for task in map(state.tasks.__getitem__, sorted(worker.tasks))
                for start, stop in _held_splits(task)
            ]
            holds = f"; it holds splits {', '.join(splits[:_MAX_NAMED])}" if splits else ""
            found.append(
                f"the worker at {worker.address} has sent no heartbeat for {silent:.0f} s, but its "
                f"process lives: a function seems to hold the interpreter's lock{holds}"
            )
    return found


def _held_splits(task: DispatcherTask) -> Ranges:
    splits = task.assigned
    held = (
        subtract(((splits.num_done, splits.num_assigned),), splits.returned)
        if splits.num_held
        else ()
    )
    return splits.to_split_indices(held)


def mark_stable_copies(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Mark the copies that have run for long as stable."""
    running = [
        task.task_id
        for iteration in state.iterations.values()
        if not iteration.assigns_splits and not iteration.finished
        for task in state.running_tasks(iteration)
        if not task.is_stable
    ]
    context.soft_state.copy_run_times.watch(running, context.now)
    return [
        events.CopyMarkedStable(task_id=task_id)
        for task_id in running
        if context.soft_state.copy_run_times.idle_seconds(task_id, context.now)
        > context.limits.stable_copy_seconds
    ]


def give_up_unreachable(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Declare tasks lost if their workers send heartbeats but no client can reach them."""
    patience = context.limits.unreachable_timeout
    return [
        events.TaskLost(
            task_id=task_id,
            reason=(
                f"none of its clients could reach it for {patience:.0f} s, though it runs; is "
                f"{task.address} an address that clients can reach?"
            ),
        )
        for task_id in context.soft_state.reachability.reported_tasks()
        if (task := state.tasks.get(task_id)) is not None
        and task.phase is TaskPhase.RUNNING
        and context.soft_state.reachability.is_unreachable_for_all(
            task_id, state.iterations[task.iteration_id].clients, patience, context.now
        )
    ]
