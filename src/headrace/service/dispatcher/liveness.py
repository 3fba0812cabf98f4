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
    limits = context.limits
    interval = limits.interval_between_worker_heartbeats(len(state.workers))
    is_known = context.soft_state.heartbeat_intervals.get(worker_id) == interval
    return DispatcherDecision(
        soft_events=() if is_known else (HeartbeatIntervalSet(worker_id, interval),),
        reply=messages.WorkerHeartbeatReply(
            tasks_to_delete=tuple(
                task_id for task_id in request.tasks if not _is_needed(state, worker_id, task_id)
            ),
            dispatcher_id=state.dispatcher_id,
            departed_clients=departed_clients_of(state, worker_id),
            tasks_to_start=_tasks_to_start(state, request),
            heartbeat_interval=context.next_heartbeat(interval, limits.heartbeat_interval),
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
    is_registered = request.worker_id in state.workers
    worker_left = events.WorkerLeft(worker_id=request.worker_id)
    return DispatcherDecision(
        events=(worker_left,) if is_registered else (),
        soft_events=(WorkerUnregistered(request.worker_id),),
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
    unreachable = TaskUnreachable(request.task_id, request.client_id)
    return DispatcherDecision(
        soft_events=(WorkerRefusedConnection(task.worker_id), unreachable)
        if request.connection_refused
        else (unreachable,)
    )


def expire_workers(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Declare workers lost that were silent for too long.

    Workers that refuse connections have less time. A worker whose connection carries data is alive,
    even if its heartbeats are late: a function may hold the interpreter's lock.
    """
    soft_state, limits = context.soft_state, context.limits
    lost: list[AnyEvent] = []
    for worker_id, last_heard in soft_state.worker_heartbeats.items():
        refuses, silence = worker_id in soft_state.refusing_workers, context.now - last_heard
        timeout = limits.worker_timeout
        if refuses:
            # If an earlier process chose the interval, the number of workers was the same.
            interval = soft_state.heartbeat_intervals.get(
                worker_id
            ) or limits.interval_between_worker_heartbeats(len(state.workers))
            timeout = min(timeout, max(limits.refused_worker_timeout, 2 * interval))
        if silence <= timeout:
            continue
        seconds_since_data = soft_state.connections.seconds_since_data(worker_id)
        if seconds_since_data is not None and seconds_since_data <= limits.worker_timeout:
            continue
        exited = refuses or soft_state.connections.has_exited(worker_id)
        connection = "connection refused, " if refuses else "connection closed, "
        reason = f"{connection if exited else ''}no heartbeat for {silence:.0f} s"
        lost.append(events.WorkerLost(worker_id=worker_id, reason=reason, timed_out=not exited))
    return lost


def describe_late_heartbeats(state: DispatcherState, context: DecisionContext) -> list[str]:
    """Describe workers with running processes and very late heartbeats, once a minute."""
    last_warnings, descriptions = context.soft_state.last_late_warnings, []
    for worker_id, last_heard in context.soft_state.worker_heartbeats.items():
        silence = context.now - last_heard
        if silence <= max(_LATE_SECONDS, context.limits.worker_timeout):
            last_warnings.pop(worker_id, None)
        elif context.now - last_warnings.get(worker_id, last_heard) >= _LATE_SECONDS:
            last_warnings[worker_id] = context.now
            worker = state.workers[worker_id]
            splits = [
                f"{start} to {stop - 1}"
                for task in map(state.tasks.__getitem__, sorted(worker.tasks))
                for start, stop in _held_split_indices(task)
            ]
            assigned = f"; assigned splits: {', '.join(splits[:_MAX_NAMED])}" if splits else ""
            descriptions.append(
                f"worker {worker.address}: no heartbeat for {silence:.0f} s, but its process is "
                "running: a dataset function probably holds the global interpreter lock"
                f"{assigned}"
            )
    return descriptions


def _held_split_indices(task: DispatcherTask) -> Ranges:
    """Return the splits that a task holds, as indices in the stream."""
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
    timeout = context.limits.unreachable_timeout
    return [
        events.TaskLost(
            task_id=task_id,
            reason=(
                f"no client could connect to its worker for {timeout:.0f} s, although the worker "
                f"sends heartbeats; is {task.address} an address that clients can reach?"
            ),
        )
        for task_id in context.soft_state.reachability.reported_tasks()
        if (task := state.tasks.get(task_id)) is not None
        and task.phase is TaskPhase.RUNNING
        and context.soft_state.reachability.is_unreachable_for_all(
            task_id, state.iterations[task.iteration_id].clients, timeout, context.now
        )
    ]
