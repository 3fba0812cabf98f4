"""What clients, workers and the dispatcher say to each other.

Every request may be repeated: names are chosen by the one who asks (`token`, `client_id`,
`worker_id`, request numbers), so a repeated request finds what the first one made. The reply to a
request stands at the end of its docstring, after an arrow. Nothing here has behaviour.

*Units* are what a DYNAMIC iteration deals: positions of the plan, numbered from 0 over all passes.
A range of units is (start, stop). Units "in dealt order" are numbered from 0 in the order in which
they were dealt to one task: a task that was dealt (10, 13) and (40, 42) has its unit 41 as 4.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "PLAN_PART_BYTES",
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
    "FailTask",
    "FinishTask",
    "GetDataset",
    "GetElements",
    "GetPlan",
    "GetSplit",
    "GetStatus",
    "GetTask",
    "HandBack",
    "IterationOpened",
    "JobStatus",
    "LostUnits",
    "OpenIteration",
    "Ping",
    "PlanBytes",
    "PlanReceived",
    "PutPlan",
    "RegisterDataset",
    "RegisterWorker",
    "ReportUnreachable",
    "SettleTask",
    "SplitGranted",
    "TaskAddress",
    "TaskDefinition",
    "WorkerHeartbeat",
    "WorkerLeaving",
    "WorkerLeft",
    "WorkerRegistered",
    "WorkerReply",
    "WorkerRequest",
    "WorkerStatus",
    "WorkerUpdate",
]

PLAN_PART_BYTES = 4 << 20
"""A plan travels in parts of at most so many bytes."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is sent; its class name travels as its tag."""


class Done(Message, frozen=True):
    """The request was carried out; there is nothing else to say."""


class Ping(Message, frozen=True):
    """Are you there? -> Done."""


# --- any client, to the dispatcher -----------------------------------------------------------


class RegisterDataset(Message, frozen=True):
    """Make a dataset known. The plan does not travel with it: where the reply says `wanted`, the
    dispatcher has no plan with this digest and has registered nothing; put the plan (`PutPlan`),
    then repeat this request. -> DatasetRegistered."""

    token: str
    digest: bytes
    """SHA-256 of the pickled plan."""
    fingerprint: str
    """Equal for plans that say the same."""
    element_spec: bytes
    """The encoded spec (`element.spec.encode_spec`)."""
    cardinality: int
    positions: int | None
    """Number of units that can be dealt; INFINITE (-1): without end; None: the plan cannot be
    dealt."""
    compression: str | None = "AUTO"
    dataset_id: str | None = None


class DatasetRegistered(Message, frozen=True):
    """The reply to `RegisterDataset`."""

    dataset_id: str
    """Empty where the plan is wanted."""
    wanted: bool = False
    """Nothing was registered: the plan must be put first."""


class PutPlan(Message, frozen=True):
    """Store a part of a plan's bytes, of at most `PLAN_PART_BYTES`. Parts are put in order, each
    from where the last reply stood; a plan that is stored already is all there after one. The
    dispatcher never opens them. -> PlanReceived."""

    digest: bytes
    offset: int
    total: int
    """Bytes of the whole plan."""
    part: bytes


class PlanReceived(Message, frozen=True):
    """The reply to `PutPlan`."""

    received: int
    """Bytes that the dispatcher has, from the beginning: the next part starts here, which may be
    before the last one if the dispatcher was restarted. Equal to the total: the plan is stored."""


class GetDataset(Message, frozen=True):
    """Ask what is known of a dataset. -> DatasetDescription."""

    dataset_id: str


class DatasetDescription(Message, frozen=True):
    """The reply to `GetDataset`; the fields are those of `RegisterDataset`."""

    dataset_id: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    positions: int | None
    compression: str | None


class OpenIteration(Message, frozen=True):
    """Join the job's iteration for a pass, making job and iteration if need be. An open
    iteration of this client is closed. -> IterationOpened."""

    client_id: str
    dataset_id: str
    processing_mode: int
    job_name: str | None
    """None: a job of this client's own."""
    pass_number: tuple[int, ...]
    """Which pass over the data, from the user's iteration inwards."""
    seed: int
    """For unseeded randomness, if this client is the first to open the iteration."""
    target_workers: str = "AUTO"


class TaskAddress(Message, frozen=True):
    """Where to read one task."""

    task_id: int
    worker_id: str
    worker_address: str
    ticket: str
    """Proves to the worker that the dispatcher sent the client. To be compared, not read."""


class IterationOpened(Message, frozen=True):
    """The reply to `OpenIteration`."""

    iteration_id: int
    tasks: tuple[TaskAddress, ...]
    seed: int
    """The first opener's: the same for all clients and tasks of the iteration."""
    finished: bool
    """The iteration is over: nothing is left to read."""
    job_name: str = ""
    finished_by: str = ""
    """Only if finished: who used it up, in words that can stand in a warning."""


class ClientHeartbeat(Message, frozen=True):
    """Say that a client is alive and reading. -> ClientUpdate (NotFoundError: the iteration was
    given up, or the dispatcher is another one)."""

    client_id: str
    known: int = -1
    """The `version` of the last update; -1: none yet."""


class LostUnits(Message, frozen=True):
    """What one lost task was dealt, and no client received."""

    worker_address: str
    task_id: int
    units: tuple[tuple[int, int], ...]
    """Ranges of the iteration's stream, in order."""
    count: int
    """How many units that is."""
    given_up: bool = False
    """They were dealt again and again, and each time the worker died: they are dealt no more."""


class ClientUpdate(Message, frozen=True):
    """The reply to `ClientHeartbeat`."""

    tasks: tuple[TaskAddress, ...]
    """Tasks to read: all of the iteration that are neither over nor lost."""
    finished: bool
    """No task is left, none will come, and nothing is left to settle: what was received is all
    there is."""
    settle: tuple[int, ...] = ()
    """Lost tasks that this client must settle (`SettleTask`), also where it received nothing."""
    lost: tuple[LostUnits, ...] = ()
    """Only if finished: what was lost with workers."""
    version: int = 0
    """For `ClientHeartbeat.known`."""
    same: bool = False
    """Nothing changed since the version that the client knows: what that update said still holds,
    and the other fields are empty."""
    failed: str = ""
    """Only if finished: not empty where the iteration was given up, with the reason."""


class SettleTask(Message, frozen=True):
    """Say what this client received of a lost task, after which it takes no more of it. Units of
    which nothing came to any of its clients are dealt again; of the others, those that came whole
    to none are lost. A client that leaves a shared job early may settle tasks that still run.
    -> Done."""

    client_id: str
    task_id: int
    received: tuple[tuple[int, int], ...]
    """Ranges of units in dealt order that arrived whole (`Elements.done_from`)."""
    touched: tuple[tuple[int, int], ...] = ()
    """Ranges of units in dealt order of which something may have arrived (`Elements.touched`)."""


class CloseIteration(Message, frozen=True):
    """Stop reading. -> Done."""

    client_id: str


class ReportUnreachable(Message, frozen=True):
    """Say that the worker of a task does not answer. -> Done."""

    client_id: str
    task_id: int
    refused: bool
    """The connection was refused or reset: nothing listens there any more. A worker that is only
    silent is waited for."""


class GetStatus(Message, frozen=True):
    """Ask who is there, and what is going on. -> DispatcherStatus."""


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


# --- a worker, to the dispatcher -------------------------------------------------------------


class RegisterWorker(Message, frozen=True):
    """Say that a worker is there and takes tasks. -> WorkerRegistered."""

    worker_id: str
    """Another one each time that a worker process starts or registers again after it was lost."""
    address: str
    """Where clients reach it, as "host:port"; not a wildcard such as 0.0.0.0."""
    tags: tuple[str, ...] = ()


class WorkerRegistered(Message, frozen=True):
    """The reply to `RegisterWorker`."""

    heartbeat_interval: float
    """Seconds between heartbeats that keep this worker counted as alive with room to spare."""
    incarnation: str
    """Changes when a dispatcher starts without its journal: tasks of another one are over."""


class WorkerHeartbeat(Message, frozen=True):
    """Say that a worker is alive, and which tasks it holds. -> WorkerUpdate (NotFoundError:
    register again)."""

    worker_id: str
    tasks: tuple[int, ...]


class WorkerUpdate(Message, frozen=True):
    """The reply to `WorkerHeartbeat`."""

    tasks_to_delete: tuple[int, ...]
    incarnation: str = ""


class WorkerLeaving(Message, frozen=True):
    """Say that a worker is going to leave: it gets no new task and no new units, and delivers what
    it has. -> Done."""

    worker_id: str


class WorkerLeft(Message, frozen=True):
    """Say that a worker leaves now: it has delivered or handed back everything. What it did
    neither with is lost. -> Done."""

    worker_id: str


class GetTask(Message, frozen=True):
    """Ask what a task is about that a client asked for. -> TaskDefinition."""

    worker_id: str
    task_id: int


class TaskDefinition(Message, frozen=True):
    """The reply to `GetTask`."""

    task_id: int
    iteration_id: int
    dataset_id: str
    digest: bytes
    """Of the plan, for `GetPlan`."""
    processing_mode: int
    pass_number: tuple[int, ...]
    seed: int
    """The iteration's: the same for all its tasks."""
    ticket: str
    """What a client that the dispatcher sent shows, and what the worker shows the dispatcher."""
    shard: int | None = None
    of: int | None = None
    starting_round: int | None = None


class GetPlan(Message, frozen=True):
    """Ask for a plan's bytes from `offset` on; the next part starts where this one ends.
    -> PlanBytes."""

    digest: bytes
    offset: int = 0


class PlanBytes(Message, frozen=True):
    """The reply to `GetPlan`."""

    part: bytes
    """At most `PLAN_PART_BYTES`."""
    total: int
    """Bytes of the whole plan."""


class GetSplit(Message, frozen=True):
    """Ask for the next units of a task. -> SplitGranted."""

    worker_id: str
    task_id: int
    ticket: str
    number: int
    """How many grants the task has received so far; the same number gets the same units again. An
    answer without units does not count."""
    want: int
    """Units that the worker would like; it gets no more."""
    done: int
    """All units before this one, in dealt order, are done: delivered and acknowledged. The
    dispatcher forgets where they went."""


class SplitGranted(Message, frozen=True):
    """The reply to `GetSplit`: units from `start` to `stop` - 1."""

    start: int
    stop: int
    """`start == stop` and not `wait`: nothing is left for this task."""
    wait: bool = False
    """Nothing now: the task has its share, or what others hold may yet come back. Ask again
    soon."""
    alone: bool = False
    """Workers died with these units before: deliver what comes of them at once. Nothing more is
    granted meanwhile."""


class FinishTask(Message, frozen=True):
    """Say that a task's last element was handed out. -> Done."""

    worker_id: str
    task_id: int
    ticket: str


class FailTask(Message, frozen=True):
    """Say that a task ended by an error of the worker's own: what it did not deliver is lost.
    -> Done."""

    worker_id: str
    task_id: int
    ticket: str
    reason: str


class HandBack(Message, frozen=True):
    """Say that units of a task were not delivered and never will be: they are dealt again.
    -> Done."""

    worker_id: str
    task_id: int
    ticket: str
    units: tuple[tuple[int, int], ...]
    """Ranges in dealt order."""


# --- a client, to a worker -------------------------------------------------------------------


class GetElements(Message, frozen=True):
    """Ask for the next elements of a task, first come, first served. -> Elements, with the chunk
    in its buffers (`element.wire`)."""

    task_id: int
    ticket: str
    client_id: str
    number: int
    """0, 1, 2, ... for this client and task; the same number gets the same answer again."""
    acknowledged: int
    """All answers with a number below this one have arrived and may be forgotten."""


class Elements(Message, frozen=True):
    """The reply to `GetElements`."""

    first: int
    """The task's own number of the first element in the chunk."""
    count: int
    """Elements in the chunk. 0: none came with this answer; unless `end` is set, ask again once
    what came before is used up."""
    end: bool
    """The task has no more elements for anyone. No buffers come with it."""
    done_from: int = 0
    done_to: int = 0
    """Units from `done_from` to `done_to` - 1, in dealt order, are whole with this chunk: all their
    elements came in it or in earlier ones, to whichever clients. Equal: none."""
    touched: int = 0
    """Of units from this one on, in dealt order, nothing came with this answer or an earlier one;
    of those before `done_from`, nothing came with this one."""
    error: bytes | None = None
    """What stands in an element's place, with `count` 0 (`transport.envelope.encode_error`). It is
    data, whatever its class: an error as the answer itself is about the request alone."""


DispatcherRequest: TypeAlias = (
    Ping
    | RegisterDataset
    | PutPlan
    | GetDataset
    | OpenIteration
    | ClientHeartbeat
    | SettleTask
    | CloseIteration
    | ReportUnreachable
    | GetStatus
    | RegisterWorker
    | WorkerHeartbeat
    | WorkerLeaving
    | WorkerLeft
    | GetTask
    | GetPlan
    | GetSplit
    | FinishTask
    | FailTask
    | HandBack
)
DispatcherReply: TypeAlias = (
    Done
    | DatasetRegistered
    | PlanReceived
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
