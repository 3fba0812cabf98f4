"""Decider: who is there, and what is going on."""

from __future__ import annotations

from headrace.service import messages
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.state import DispatcherState

__all__ = ["get_status"]


def get_status(state: DispatcherState, request: messages.GetStatus, moment: Moment) -> Decision:
    """Say who is there, and what is going on."""
    workers = tuple(
        messages.WorkerStatus(
            worker_id=worker.worker_id,
            address=worker.address,
            seconds_since_heartbeat=moment.now - moment.presence.workers[worker.worker_id],
            tasks=len(worker.tasks),
            leaving=worker.leaving,
        )
        for worker in state.workers.values()
    )
    jobs = []
    for job in state.jobs.values():
        alive = [state.iterations[iteration_id] for iteration_id in job.iterations.values()]
        jobs.append(
            messages.JobStatus(
                job_id=job.job_id,
                name=job.name or "",
                dataset_id=job.dataset_id,
                processing_mode=job.processing_mode,
                iterations=job.passes,
                running_tasks=sum(len(state.running_tasks(each)) for each in alive),
                clients=sum(len(each.clients) for each in alive),
            )
        )
    return Decision(
        reply=messages.DispatcherStatus(
            workers=workers,
            jobs=tuple(jobs),
            datasets=len(state.datasets),
            incarnation=state.incarnation,
        )
    )
