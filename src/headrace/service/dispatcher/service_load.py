"""Load of the service, computed from its activity for the scaling policy."""

from __future__ import annotations

from headrace.service.dispatcher.decision import DecisionContext
from headrace.service.dispatcher.state import DispatcherState, JobIteration
from headrace.service.dispatcher.worker_scaling import JobLoad, ServiceLoad

__all__ = ["measure_load"]


def measure_load(state: DispatcherState, context: DecisionContext) -> ServiceLoad:
    """Return the load of the service: what clients and tasks reported in their heartbeats."""
    return ServiceLoad(
        now=context.now,
        num_workers=sum(not worker.draining for worker in state.workers.values()),
        jobs=tuple(
            _job_load(state, iteration, context)
            for iteration in state.iterations.values()
            if not iteration.finished and (iteration.clients or _is_save(state, iteration))
        ),
    )


def _is_save(state: DispatcherState, iteration: JobIteration) -> bool:
    """Return whether workers write the iteration into files, so that it has no clients."""
    return bool(state.jobs[iteration.job_id].save_id)


def _job_load(state: DispatcherState, iteration: JobIteration, context: DecisionContext) -> JobLoad:
    activity, now = context.soft_state.activity, context.now
    clients = [
        activity.clients[client_id]
        for client_id in iteration.clients
        if client_id in activity.clients
    ]
    tasks = [
        activity.tasks[task.task_id]
        for task in state.running_tasks(iteration)
        if task.task_id in activity.tasks
    ]
    task_client_waits = [task.client_wait_ratio(now) for task in tasks]
    task_split_waits = [task.split_wait_ratio(now) for task in tasks]
    if _is_save(state, iteration):
        # Nobody paces a save: it is starved unless its tasks wait for the dispatcher.
        rate = activity.iterations[iteration.iteration_id].element_rate.read(now)
        wait_ratio = 1.0 - (sum(task_client_waits) / len(tasks) if tasks else 0.0)
    else:
        rate = sum(client.element_rate.read(now) for client in clients)
        wait_ratio = sum(client.wait_ratio(now) for client in clients) / len(iteration.clients)
    unassigned = iteration.pool.num_unassigned
    return JobLoad(
        iteration_id=iteration.iteration_id,
        elements_per_second=rate,
        client_wait_ratio=wait_ratio,
        busy_workers=sum(
            max(0.0, 1.0 - client_wait - split_wait)
            for client_wait, split_wait in zip(task_client_waits, task_split_waits, strict=True)
        ),
        ready_batches=sum(task.last_report.buffered_batches for task in tasks)
        + sum(client.buffered_batches for client in clients),
        num_clients=len(iteration.clients),
        remaining_splits=None
        if iteration.pool.num_splits is None or unassigned is None
        else unassigned + iteration.pool.num_held,
    )
