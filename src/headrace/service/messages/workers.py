"""Messages from workers to the dispatcher about themselves."""

from __future__ import annotations

import msgspec

from headrace.service.messages.activity import TaskActivity
from headrace.serving.rpc import Done, Message, TypedRequest
from headrace.versions import Versions, own_versions

__all__ = [
    "DrainWorker",
    "RegisterWorker",
    "RegisterWorkerReply",
    "UnregisterWorker",
    "WorkerHeartbeat",
    "WorkerHeartbeatReply",
]


class RegisterWorkerReply(Message, frozen=True):
    """Reply to `RegisterWorker`."""

    heartbeat_interval: float
    """Seconds between heartbeats, well below the worker's lease."""
    dispatcher_id: str
    """Id of the dispatcher, which changes when one starts without its journal: earlier tasks are
    void."""


class RegisterWorker(TypedRequest[RegisterWorkerReply], frozen=True):
    """Register a worker, which then takes tasks."""

    worker_id: str
    """Id of the worker process; a new one for each start, and for each registration after a loss.
    """
    address: str
    """Address at which clients reach it, as "host:port"; not a wildcard such as 0.0.0.0."""
    tags: tuple[str, ...] = ()
    versions: Versions = msgspec.field(default_factory=own_versions)
    """Versions of the worker."""


class WorkerHeartbeatReply(Message, frozen=True):
    """Reply to `WorkerHeartbeat`."""

    tasks_to_delete: tuple[int, ...]
    dispatcher_id: str = ""
    departed_clients: tuple[tuple[int, str], ...] = ()
    """Tasks of the worker with departed clients (`ReportDepartedClient`)."""
    tasks_to_start: tuple[int, ...] = ()
    """Tasks of the worker that no client requests, and that it has not started."""
    heartbeat_interval: float = 0.0
    """Seconds until the next heartbeat; 0.0 keeps the last interval."""


class WorkerHeartbeat(TypedRequest[WorkerHeartbeatReply], frozen=True):
    """Report that a worker is alive, and which tasks it holds.

    A NotFoundError means that it must register again.
    """

    worker_id: str
    tasks: tuple[int, ...]
    activity: tuple[TaskActivity, ...] = ()
    """Activity of tasks whose counters changed since the last heartbeat."""
    cores: float = 0.0
    """Processor cores that the worker process may use; 0.0 if unknown."""
    cpu_seconds: float = 0.0
    """Processor time of the worker process since its start."""
    machine_cpu_seconds: float = 0.0
    """Processor time of all programs on these cores; 0.0 if unknown."""


class DrainWorker(TypedRequest[Done], frozen=True):
    """Report that a worker will leave: it gets no new tasks or splits, and delivers its remaining
    elements."""

    worker_id: str


class UnregisterWorker(TypedRequest[Done], frozen=True):
    """Report that a worker leaves now, after it has delivered or returned everything. Anything else
    is lost."""

    worker_id: str
