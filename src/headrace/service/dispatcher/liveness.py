"""Deciders: who is alive, who is gone, and what nobody needs any more."""

from __future__ import annotations

from collections.abc import Iterable, Set

from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.state import DispatcherState, Iteration, TaskPhase
from headrace.service.dispatcher.updates import Update

__all__ = [
    "collect_idle",
    "expire_clients",
    "expire_workers",
    "get_status",
    "leave",
    "lose_workers",
    "report_unreachable",
    "worker_heartbeat",
]


def worker_heartbeat(
    state: DispatcherState, request: messages.WorkerHeartbeat, moment: Moment
) -> Decision:
    """Tell a worker which of its tasks nobody needs any more.

    A finished task stays with its worker while clients are left in its iteration: one whose answer
    was lost on the way may ask for it again.

    Raises:
        NotFoundError: The worker is not registered, or was declared lost.
    """
    state.worker(request.worker_id)
    return Decision(
        reply=messages.WorkerUpdate(
            tasks_to_delete=tuple(
                task_id
                for task_id in request.tasks
                if not _is_needed(state, request.worker_id, task_id)
            )
        )
    )


def _is_needed(state: DispatcherState, worker_id: str, task_id: int) -> bool:
    task = state.tasks.get(task_id)
    if task is None or task.worker_id != worker_id or task.phase is TaskPhase.LOST:
        return False
    iteration = state.iterations[task.iteration_id]
    return not iteration.finished or bool(iteration.clients)


def report_unreachable(
    state: DispatcherState, request: messages.ReportUnreachable, moment: Moment
) -> Decision:
    """Look closer at a worker that a client cannot reach.

    One that was silent for a few heartbeats is lost, now or as soon as it has been. One that goes
    on sending heartbeats is not: it is the way between the two that is broken.
    """
    task = state.tasks.get(request.task_id)
    if task is None or task.worker_id not in state.workers:
        return Decision()
    silent = moment.now - moment.presence.workers[task.worker_id]
    if silent > moment.limits.suspect_timeout:
        return Decision(updates=tuple(lose_workers(state, {task.worker_id})))
    return Decision(suspect=task.worker_id)


def get_status(state: DispatcherState, request: messages.GetStatus, moment: Moment) -> Decision:
    """Tell who is there, and what is going on."""
    workers = tuple(
        messages.WorkerStatus(
            worker_id=worker.worker_id,
            address=worker.address,
            seconds_since_heartbeat=moment.now - moment.presence.workers[worker.worker_id],
            tasks=len(worker.tasks),
        )
        for worker in state.workers.values()
    )
    jobs = []
    for job in state.jobs.values():
        kept = state.iterations.keys() & set(job.iterations.values())
        alive = [state.iterations[iteration_id] for iteration_id in kept]
        jobs.append(
            messages.JobStatus(
                job_id=job.job_id,
                name=job.name or "",
                dataset_id=job.dataset_id,
                processing_mode=job.processing_mode,
                iterations=len(job.iterations),
                running_tasks=sum(len(state.running_tasks(each)) for each in alive),
                clients=sum(len(each.clients) for each in alive),
            )
        )
    return Decision(
        reply=messages.DispatcherStatus(
            workers=workers, jobs=tuple(jobs), datasets=len(state.datasets)
        )
    )


def lose_workers(state: DispatcherState, worker_ids: Set[str]) -> list[Update]:
    """Return the facts that follow when these workers are gone, all at the same time."""
    facts: list[Update] = [updates.WorkerLost(worker_id=each) for each in sorted(worker_ids)]
    struck = {
        state.tasks[task_id].iteration_id
        for worker_id in worker_ids
        for task_id in state.workers[worker_id].tasks
    }
    facts += [
        updates.IterationFinished(iteration_id=iteration_id)
        for iteration_id in sorted(struck)
        if _ends_without(state, state.iterations[iteration_id], worker_ids)
    ]
    return facts


def _ends_without(state: DispatcherState, iteration: Iteration, gone: Set[str]) -> bool:
    running = any(task.worker_id not in gone for task in state.running_tasks(iteration))
    reached = any(state.tasks[each].phase is TaskPhase.FINISHED for each in iteration.tasks)
    return reached and not running


def leave(state: DispatcherState, client_id: str) -> list[Update]:
    """Return the facts that follow when a client is gone.

    A job of the client's own goes with it, since nobody else can join; its `JobForgotten` comes
    last.
    """
    iteration = state.iterations[state.clients[client_id]]
    job = state.jobs[iteration.job_id]
    facts: list[Update] = [updates.ClientLeft(client_id=client_id)]
    if job.name is None:
        facts.append(updates.IterationCollected(iteration_id=iteration.iteration_id))
        facts.append(updates.JobForgotten(job_id=job.job_id))
    return facts


def expire_workers(state: DispatcherState, moment: Moment) -> list[Update]:
    """Declare lost who was silent for too long; suspects get less time."""
    presence, limits = moment.presence, moment.limits
    silent = {
        worker_id
        for worker_id, heard in presence.workers.items()
        if moment.now - heard
        > (limits.suspect_timeout if worker_id in presence.suspects else limits.worker_timeout)
    }
    return lose_workers(state, silent) if silent else []


def expire_clients(state: DispatcherState, moment: Moment) -> list[Update]:
    """Let go of clients that were silent for too long."""
    silent = [
        client_id
        for client_id, heard in moment.presence.clients.items()
        if moment.now - heard > moment.limits.client_timeout
    ]
    return [fact for client_id in silent for fact in leave(state, client_id)]


def collect_idle(state: DispatcherState, moment: Moment) -> list[Update]:
    """Give up iterations that had no client for too long, and forget those that are finished.

    A named DYNAMIC iteration is kept unless the configuration says otherwise: to begin it again
    would deal its elements twice.
    """
    timeout = moment.limits.gc_timeout
    if timeout is None:
        return []
    return [
        updates.IterationForgotten(iteration_id=iteration.iteration_id)
        if iteration.finished
        else updates.IterationCollected(iteration_id=iteration.iteration_id)
        for iteration in _idle(state, moment, timeout)
        if iteration.finished
        or moment.limits.gc_dynamic
        or state.jobs[iteration.job_id].processing_mode != ShardingPolicy.DYNAMIC
    ]


def _idle(state: DispatcherState, moment: Moment, timeout: float) -> Iterable[Iteration]:
    for iteration_id, since in moment.presence.idle.items():
        iteration = state.iterations[iteration_id]
        if not iteration.clients and moment.now - since > timeout:
            yield iteration
