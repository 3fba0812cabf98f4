"""Status: who is there, and what is going on."""

from __future__ import annotations

from headrace.serving.call import Message, Question

__all__ = ["DispatcherStatus", "GetStatus", "JobStatus", "WorkerStatus"]


class WorkerStatus(Message, frozen=True):
    """One worker, as the dispatcher sees it."""

    worker_id: str
    address: str
    seconds_since_heartbeat: float
    tasks: int
    leaving: bool = False


class JobStatus(Message, frozen=True):
    """One job, as the dispatcher sees it."""

    job_id: int
    name: str
    dataset_id: str
    processing_mode: int
    iterations: int
    running_tasks: int
    clients: int


class DispatcherStatus(Message, frozen=True):
    """The reply to `GetStatus`."""

    workers: tuple[WorkerStatus, ...]
    jobs: tuple[JobStatus, ...]
    datasets: int
    incarnation: str = ""


class GetStatus(Question[DispatcherStatus], frozen=True):
    """Ask who is there, and what is going on."""
