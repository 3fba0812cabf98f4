"""Workers: that they come, are there, and go."""

from __future__ import annotations

import msgspec

from headrace.service.messages.activity import TaskActivity
from headrace.serving.call import Done, Message, Question
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
    """The reply to `RegisterWorker`."""

    heartbeat_interval: float
    """Seconds between heartbeats that keep this worker counted as alive with room to spare."""
    dispatcher_id: str
    """Changes when a dispatcher starts without its journal: tasks of another one are over."""


class RegisterWorker(Question[RegisterWorkerReply], frozen=True):
    """Say that a worker is there and takes tasks."""

    worker_id: str
    """Another one each time that a worker process starts or registers again after it was lost."""
    address: str
    """Where clients reach it, as "host:port"; not a wildcard such as 0.0.0.0."""
    tags: tuple[str, ...] = ()
    versions: Versions = msgspec.field(default_factory=own_versions)
    """Of the worker."""


class WorkerHeartbeatReply(Message, frozen=True):
    """The reply to `WorkerHeartbeat`."""

    tasks_to_delete: tuple[int, ...]
    dispatcher_id: str = ""
    departed_clients: tuple[tuple[int, str], ...] = ()
    """Tasks of the worker with clients that are gone (`ReportDepartedClient`)."""
    tasks_to_start: tuple[int, ...] = ()
    """Tasks of the worker that no client will ask for, and that it has not begun."""
    heartbeat_interval: float = 0.0
    """Seconds until the next heartbeat; 0.0: as at the last one."""


class WorkerHeartbeat(Question[WorkerHeartbeatReply], frozen=True):
    """Say that a worker is alive, and which tasks it holds. A NotFoundError says that it must
    register again."""

    worker_id: str
    tasks: tuple[int, ...]
    activity: tuple[TaskActivity, ...] = ()
    """Of tasks whose numbers changed since the last heartbeat."""


class DrainWorker(Question[Done], frozen=True):
    """Say that a worker is going to leave: it gets no new task and no new units, and delivers what
    it has."""

    worker_id: str


class UnregisterWorker(Question[Done], frozen=True):
    """Say that a worker leaves now: it has delivered or handed back everything. What it did
    neither with is lost."""

    worker_id: str
