"""The words of the service: what clients, workers and the dispatcher say to each other.

Every request may be repeated: names are chosen by the one who asks (`token`, `client_id`,
`worker_id`, request numbers), so a repeated request finds what the first one made. Replies follow
the request's name in a comment. Nothing here has behaviour.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "ClientHeartbeat",
    "ClientUpdate",
    "CloseIteration",
    "DatasetDescription",
    "DatasetRegistered",
    "DispatcherReply",
    "DispatcherRequest",
    "DispatcherStatus",
    "Done",
    "Elements",
    "FinishTask",
    "GetDataset",
    "GetElements",
    "GetPlan",
    "GetSplit",
    "GetStatus",
    "GetTask",
    "IterationOpened",
    "JobStatus",
    "OpenIteration",
    "Ping",
    "PlanBytes",
    "RegisterDataset",
    "RegisterWorker",
    "ReportUnreachable",
    "SplitGranted",
    "TaskAddress",
    "TaskDefinition",
    "WorkerHeartbeat",
    "WorkerRegistered",
    "WorkerReply",
    "WorkerRequest",
    "WorkerStatus",
    "WorkerUpdate",
]


class Word(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message; its class name travels as its tag."""


class Done(Word, frozen=True):
    """The request was carried out; there is nothing else to say."""


class Ping(Word, frozen=True):
    """Are you there? -> Done."""


# --- any client, to the dispatcher -----------------------------------------------------------


class RegisterDataset(Word, frozen=True):
    """Make a dataset known. -> DatasetRegistered."""

    token: str
    plan: bytes
    """The pickled plan. The dispatcher stores these bytes and never opens them."""
    fingerprint: str
    """Equal for plans that say the same."""
    element_spec: bytes
    """The encoded spec (`element.spec.encode_spec`)."""
    cardinality: int
    split_sizes: tuple[int, ...]
    """Number of indices of each source in `plan.splits` order: INFINITE (-1) for one without end;
    a plan with a source that cannot be split is described by the empty tuple."""
    compression: str | None = "AUTO"
    dataset_id: str | None = None


class DatasetRegistered(Word, frozen=True):
    dataset_id: str


class GetDataset(Word, frozen=True):
    """What is known of a dataset? -> DatasetDescription."""

    dataset_id: str


class DatasetDescription(Word, frozen=True):
    dataset_id: str
    fingerprint: str
    element_spec: bytes
    cardinality: int
    splittable: bool
    compression: str | None


class OpenIteration(Word, frozen=True):
    """Join the job's iteration number `repetition`, making job and iteration if need be.
    -> IterationOpened."""

    client_id: str
    dataset_id: str
    processing_mode: int
    job_name: str | None
    """None: a job of this client's own."""
    repetition: int
    target_workers: str = "AUTO"


class TaskAddress(Word, frozen=True):
    """Where to read one task."""

    task_id: int
    worker_id: str
    worker_address: str


class IterationOpened(Word, frozen=True):
    iteration_id: int
    tasks: tuple[TaskAddress, ...]
    finished: bool


class ClientHeartbeat(Word, frozen=True):
    """I am alive and reading. -> ClientUpdate."""

    client_id: str


class ClientUpdate(Word, frozen=True):
    tasks: tuple[TaskAddress, ...]
    """Tasks to read: all of the iteration that are neither finished nor lost."""
    finished: bool
    """No task is left and none will come: what was received is all there is."""


class CloseIteration(Word, frozen=True):
    """I read no more. -> Done."""

    client_id: str


class ReportUnreachable(Word, frozen=True):
    """The worker of this task does not answer me; look closer. -> Done."""

    client_id: str
    task_id: int


class GetStatus(Word, frozen=True):
    """Who is there, and what is going on? -> DispatcherStatus."""


class WorkerStatus(Word, frozen=True):
    worker_id: str
    address: str
    seconds_since_heartbeat: float
    tasks: int


class JobStatus(Word, frozen=True):
    job_id: int
    name: str
    dataset_id: str
    processing_mode: int
    iterations: int
    running_tasks: int
    clients: int


class DispatcherStatus(Word, frozen=True):
    workers: tuple[WorkerStatus, ...]
    jobs: tuple[JobStatus, ...]
    datasets: int


# --- a worker, to the dispatcher -------------------------------------------------------------


class RegisterWorker(Word, frozen=True):
    """I am here and take tasks. -> WorkerRegistered."""

    worker_id: str
    """Chosen anew each time that a worker process starts."""
    address: str
    tags: tuple[str, ...] = ()


class WorkerRegistered(Word, frozen=True):
    heartbeat_interval: float
    """Seconds between heartbeats that keep this worker counted as alive with room to spare."""


class WorkerHeartbeat(Word, frozen=True):
    """I am alive; I run these tasks. -> WorkerUpdate (NotFoundError: register again)."""

    worker_id: str
    tasks: tuple[int, ...]


class WorkerUpdate(Word, frozen=True):
    tasks_to_delete: tuple[int, ...]


class GetTask(Word, frozen=True):
    """A client asked me for this task; what is it? -> TaskDefinition."""

    worker_id: str
    task_id: int


class TaskDefinition(Word, frozen=True):
    task_id: int
    iteration_id: int
    dataset_id: str
    processing_mode: int
    repetition: int = 0
    """The iteration's number within its job: a seeded shuffle draws anew in each."""


class GetPlan(Word, frozen=True):
    """-> PlanBytes."""

    dataset_id: str


class PlanBytes(Word, frozen=True):
    plan: bytes


class GetSplit(Word, frozen=True):
    """Give me the next part of a source. -> SplitGranted."""

    task_id: int
    source: int
    """Index into the dataset's `split_sizes`."""
    repetition: tuple[int, ...]
    """Which pass over the source, compared as a tuple: a later one starts the source anew, an
    earlier one is over."""
    number: int
    """0, 1, 2, ... for this task and source; the same number gets the same split."""
    want: int
    """Indices that the worker would like; it gets no more."""


class SplitGranted(Word, frozen=True):
    start: int
    stop: int
    """`start == stop`: nothing is left in this repetition."""


class FinishTask(Word, frozen=True):
    """The task's last element was handed out. -> Done."""

    worker_id: str
    task_id: int


# --- a client, to a worker -------------------------------------------------------------------


class GetElements(Word, frozen=True):
    """Give me the next elements of a task, first come, first served. -> Elements, with the chunk
    in its buffers (`element.wire`)."""

    task_id: int
    client_id: str
    number: int
    """0, 1, 2, ... for this client and task; the same number gets the same answer again."""
    acknowledged: int
    """All answers with a number below this one have arrived and may be forgotten."""


class Elements(Word, frozen=True):
    first: int
    """The task's own number of the first element in the chunk."""
    count: int
    """Elements in the chunk. 0: none came with this answer; unless `end` is set, ask again once
    what came before is used up."""
    end: bool
    """The task has no more elements for anyone. No buffers come with it."""


DispatcherRequest: TypeAlias = (
    Ping
    | RegisterDataset
    | GetDataset
    | OpenIteration
    | ClientHeartbeat
    | CloseIteration
    | ReportUnreachable
    | GetStatus
    | RegisterWorker
    | WorkerHeartbeat
    | GetTask
    | GetPlan
    | GetSplit
    | FinishTask
)
DispatcherReply: TypeAlias = (
    Done
    | DatasetRegistered
    | DatasetDescription
    | IterationOpened
    | ClientUpdate
    | DispatcherStatus
    | WorkerRegistered
    | WorkerUpdate
    | TaskDefinition
    | PlanBytes
    | SplitGranted
)
WorkerRequest: TypeAlias = Ping | GetElements
WorkerReply: TypeAlias = Done | Elements
