"""Status of the service: workers, clients, jobs and their activity.

Counters (elements, bytes, waits) arrive with heartbeats, so they are up to a second old (five with
a thousand clients), and start with this process of the dispatcher. Rates are per second, over about
the last ten seconds.
"""

from __future__ import annotations

import msgspec

from headrace.service.messages.activity import TrainerActivity
from headrace.serving.rpc import Message, TypedRequest
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
    """Status of one worker."""

    worker_id: str
    address: str
    seconds_since_heartbeat: float
    tasks: int
    draining: bool = False
    tags: tuple[str, ...] = ()
    elements: int = 0
    """Number of elements that the worker produced."""
    bytes: int = 0
    elements_per_second: float = 0.0
    bytes_per_second: float = 0.0
    buffered_batches: int = 0
    """Number of result batches that no client has requested yet."""
    buffered_bytes: int = 0
    versions: Versions = Versions()
    cores: float = 0.0
    """Processor cores that the worker process may use; 0.0 if unknown."""
    cpu_seconds: float = 0.0
    """Processor time of the worker process since its start."""
    machine_cpu_seconds: float = 0.0
    """Processor time of all programs on these cores; 0.0 if unknown."""
    busy_cores: float = 0.0
    """Average number of cores that it used during the last seconds."""


class LostWorker(Message, frozen=True):
    """A lost worker."""

    address: str
    reason: str
    seconds_ago: float


class ClientStatus(Message, frozen=True):
    """Status of one client of an iteration."""

    client_id: str
    seconds_since_heartbeat: float
    elements: int = 0
    """Number of elements that the client received."""
    elements_per_second: float = 0.0
    wait_seconds: float = 0.0
    """Seconds that its consumer has waited for elements."""
    wait_ratio: float = 0.0
    """Fraction of the last seconds that it waited, from 0.0 to 1.0."""
    buffered_batches: int = 0
    """Number of result batches that are buffered and not consumed."""
    seconds_since_report: float | None = None
    """Age of these numbers; None if unknown."""


class TaskStatus(Message, frozen=True):
    """Status of a running task."""

    task_id: int
    worker_address: str
    splits_held: int = 0
    """Number of splits assigned to it and not known to be done."""
    elements: int = 0
    elements_per_second: float = 0.0
    buffered_batches: int = 0
    buffered_bytes: int = 0
    waiting_for: str = ""
    """What production waits for now: "clients", "units", or "" if it does not wait."""
    client_wait_ratio: float = 0.0
    split_wait_ratio: float = 0.0
    """Fractions of the last seconds that it waited for clients, and for splits."""
    client_wait_seconds: float = 0.0
    split_wait_seconds: float = 0.0
    """Total seconds that it waited for clients, and for splits."""
    seconds_since_report: float | None = None
    """Age of these numbers; None if unknown."""
    shard_index: int | None = None
    trainers: tuple[TrainerActivity, ...] = ()
    """Progress of each trainer, if several trainers read all elements of the task."""


class StepStatus(Message, frozen=True):
    """Status of one step of a dataset, on all workers."""

    step: str
    seconds: float
    """Total time that threads of workers spent in the step."""
    busy_threads: float = 0.0
    """Average number of threads in the step during the last seconds."""
    position: int = -1
    """Number of the step in the plan, inputs first; -1 if unknown."""
    threads: int = 0
    """Number of threads per task that call its function; 0 for steps without such threads."""


class IterationStatus(Message, frozen=True):
    """Status of one epoch of a job that is remembered."""

    iteration_id: int
    epoch: tuple[int, ...]
    finished: bool
    elapsed_seconds: float
    """Seconds since it started, or since the dispatcher was restarted."""
    num_splits: int | None = None
    """Number of its splits; -1 if infinite; None if it assigns none."""
    splits_assigned: int = 0
    """Number of splits assigned at least once."""
    splits_in_progress: int = 0
    """Number of splits on workers or in flight to clients."""
    splits_unassigned: int | None = None
    """Number of splits that are yet to be assigned; None if infinite."""
    splits_abandoned: int = 0
    progress: float | None = None
    """Fraction that is done, from 0.0 to 1.0; None if unknown."""
    remaining_seconds: float | None = None
    """Estimate from the rate so far; None if unknown."""
    elements: int = 0
    """Number of elements that workers produced."""
    bytes: int = 0
    elements_per_second: float = 0.0
    bytes_per_second: float = 0.0
    history: tuple[float, ...] = ()
    """Elements per second in each three-second interval of the last two minutes."""
    wait_seconds: float = 0.0
    """Total seconds that its clients waited."""
    clients: tuple[ClientStatus, ...] = ()
    tasks: tuple[TaskStatus, ...] = ()
    """Its running tasks."""
    steps: tuple[StepStatus, ...] = ()
    """Its steps, by decreasing time."""
    failure_reason: str = ""


class JobStatus(Message, frozen=True):
    """Status of one job."""

    job_id: int
    name: str
    """Name of the job; empty for a client's own job."""
    dataset_id: str
    processing_mode: int
    num_epochs: int
    running_tasks: int
    clients: int
    iterations: tuple[IterationStatus, ...] = ()
    """Iterations that are remembered in full, oldest first."""
    elements: int = 0
    """Number of elements of all its epochs, including forgotten ones."""
    bytes: int = 0
    wait_seconds: float = 0.0
    path: str = ""
    """Directory that a save writes to. A save has no clients."""
    ordered: bool = False
    """Whether its elements are delivered in the order of one process."""
    num_consumers: int | None = None
    """Number of consumers of a round; None without rounds."""
    remainder: str = "drop"
    """What happens to elements at the end that do not fill a round."""


class DispatcherStatus(Message, frozen=True):
    """Reply to `GetStatus`."""

    workers: tuple[WorkerStatus, ...]
    jobs: tuple[JobStatus, ...]
    datasets: int
    dispatcher_id: str = ""
    clients: int = 0
    plan_bytes: int = 0
    """Total size of the stored plans."""
    uptime_seconds: float = 0.0
    """Seconds since the dispatcher was started."""
    elements: int = 0
    """Number of elements that all workers produced, including those of forgotten jobs."""
    bytes: int = 0
    wait_seconds: float = 0.0
    """Total seconds that clients waited."""
    workers_lost: int = 0
    recently_lost_workers: tuple[LostWorker, ...] = ()
    """The workers lost last, newest first."""
    refused_connections: int = 0
    """Number of connections refused because of a wrong key or an unknown protocol."""
    slots: int = 0
    occupied_slots: int = 0
    """Number of occupied slots in the fixed list of workers, if there is one."""
    versions: Versions = msgspec.field(default_factory=own_versions)
    """Versions of the dispatcher."""
    wanted_workers: int = 0
    """Number of workers that the jobs need, by the scaling policy; 0 if no job needs one."""


class GetStatus(TypedRequest[DispatcherStatus], frozen=True):
    """Request the status of the service."""
