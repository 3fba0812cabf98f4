"""Status: who is there, and what is going on.

What was counted (elements, bytes, waits) comes with heartbeats, so it is up to a second old (five
where there are a thousand clients), and begins with this run of the dispatcher's process. Rates are
per second, over the last ten or so.
"""

from __future__ import annotations

import msgspec

from headrace.service.messages.activity import TrainerActivity
from headrace.serving.call import Message, Question
from headrace.versions import Versions, own_versions

__all__ = [
    "ClientStatus",
    "DispatcherStatus",
    "GetStatus",
    "IterationStatus",
    "JobStatus",
    "LostWorker",
    "StepStatus",
    "TaskStatus",
    "WorkerStatus",
]


class WorkerStatus(Message, frozen=True):
    """One worker, as the dispatcher sees it."""

    worker_id: str
    address: str
    seconds_since_heartbeat: float
    tasks: int
    draining: bool = False
    tags: tuple[str, ...] = ()
    elements: int = 0
    """Made by the worker."""
    bytes: int = 0
    elements_per_second: float = 0.0
    bytes_per_second: float = 0.0
    buffered_batches: int = 0
    """Portions that it has made, and that no client has asked for."""
    buffered_bytes: int = 0
    versions: Versions = Versions()


class LostWorker(Message, frozen=True):
    """A worker that counts as lost."""

    address: str
    reason: str
    seconds_ago: float


class ClientStatus(Message, frozen=True):
    """One client of an iteration."""

    client_id: str
    seconds_since_heartbeat: float
    elements: int = 0
    """Received by the client."""
    elements_per_second: float = 0.0
    wait_seconds: float = 0.0
    """Seconds for which its consumer has waited for elements."""
    wait_ratio: float = 0.0
    """The part of the last seconds in which it waited: 0.0 never, 1.0 all the time."""
    buffered_batches: int = 0
    """Answers of workers that are there and not used up."""


class TaskStatus(Message, frozen=True):
    """A task that runs."""

    task_id: int
    worker_address: str
    splits_held: int = 0
    """Dealt to it, and not known to be done."""
    elements: int = 0
    elements_per_second: float = 0.0
    buffered_batches: int = 0
    buffered_bytes: int = 0
    waiting_for: str = ""
    """What it stands still for now: "clients", "units", or nothing."""
    client_wait_ratio: float = 0.0
    split_wait_ratio: float = 0.0
    """The part of the last seconds in which it waited so."""
    shard_index: int | None = None
    trainers: tuple[TrainerActivity, ...] = ()
    """Where each of several trainers reads all of its elements."""


class StepStatus(Message, frozen=True):
    """One step of a dataset, on all workers."""

    step: str
    seconds: float
    """For which threads of workers were at it."""
    busy_threads: float = 0.0
    """How many threads were at it, in the mean of the last seconds."""


class IterationStatus(Message, frozen=True):
    """One pass of a job that is remembered."""

    iteration_id: int
    epoch: tuple[int, ...]
    finished: bool
    elapsed_seconds: float
    """Since it began, or since the dispatcher was started again."""
    num_splits: int | None = None
    """All that are dealt in it; -1: without end; None: nothing is dealt."""
    splits_assigned: int = 0
    """At least once."""
    splits_in_progress: int = 0
    """With workers or on the way to clients."""
    splits_unassigned: int | None = None
    """That wait to be dealt; None: without end."""
    splits_abandoned: int = 0
    progress: float | None = None
    """The part that is done, from 0.0 to 1.0; None: not known."""
    remaining_seconds: float | None = None
    """If it goes on as it did so far; None: not known."""
    elements: int = 0
    """Made by workers."""
    bytes: int = 0
    elements_per_second: float = 0.0
    bytes_per_second: float = 0.0
    history: tuple[float, ...] = ()
    """Elements per second in each of the last two minutes' intervals of three seconds."""
    wait_seconds: float = 0.0
    """Seconds that its clients waited, all together."""
    clients: tuple[ClientStatus, ...] = ()
    tasks: tuple[TaskStatus, ...] = ()
    """Those that run."""
    steps: tuple[StepStatus, ...] = ()
    """The longest first."""
    failure_reason: str = ""


class JobStatus(Message, frozen=True):
    """One job, as the dispatcher sees it."""

    job_id: int
    name: str
    """Empty: it is a client's own."""
    dataset_id: str
    processing_mode: int
    num_epochs: int
    running_tasks: int
    clients: int
    iterations: tuple[IterationStatus, ...] = ()
    """Those that are remembered in full, the oldest first."""
    elements: int = 0
    """Of all its passes, those that are forgotten too."""
    bytes: int = 0
    wait_seconds: float = 0.0
    path: str = ""
    """Of a save: the directory that its workers write. It has no clients."""
    ordered: bool = False
    """Its elements come in the order of one process."""
    num_consumers: int | None = None
    """How many read in rounds; None: it has no rounds."""
    remainder: str = "drop"
    """What becomes of elements that are too few for a round."""


class DispatcherStatus(Message, frozen=True):
    """The reply to `GetStatus`."""

    workers: tuple[WorkerStatus, ...]
    jobs: tuple[JobStatus, ...]
    datasets: int
    dispatcher_id: str = ""
    clients: int = 0
    plan_bytes: int = 0
    """What is kept of datasets."""
    uptime_seconds: float = 0.0
    """Since the dispatcher was started."""
    elements: int = 0
    """Made by all workers, also for jobs that are forgotten."""
    bytes: int = 0
    wait_seconds: float = 0.0
    """Seconds that clients waited, all together."""
    workers_lost: int = 0
    recently_lost_workers: tuple[LostWorker, ...] = ()
    """The last of them, the newest first."""
    refused_connections: int = 0
    """Connections that ended before they began, for wrong keys or no words of ours."""
    slots: int = 0
    occupied_slots: int = 0
    """Of the fixed list of workers, if there is one."""
    versions: Versions = msgspec.field(default_factory=own_versions)
    """Of the dispatcher."""


class GetStatus(Question[DispatcherStatus], frozen=True):
    """Ask who is there, and what is going on."""
