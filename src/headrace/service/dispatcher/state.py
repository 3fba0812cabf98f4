"""State of the dispatcher: the result of applying all events. Only `apply.apply` changes it.

`#:` comments state invariants, which `invariants.validate` checks in tests. Deciders only read the
state. It contains no times: the time of the last heartbeat, for example, belongs to one process
(`soft_state.SoftState`).
"""

from __future__ import annotations

import enum
import hashlib
from typing import TypeAlias

import msgspec

from headrace.errors import NotFoundError
from headrace.service.element_sets import PartialSplits
from headrace.service.messages import JobOptions, PlanStep
from headrace.service.modes.coordinated_reads.events import CoordinatedIteration, CoordinatedTask
from headrace.service.modes.distributed_save.records import SaveState, TaskFiles
from headrace.service.modes.static.records import DatasetShard
from headrace.service.ranges import (
    Ranges,
    locate_in_stream,
    subtract,
    to_assignment_order,
    total_length,
    union,
)
from headrace.versions import Versions

__all__ = [
    "AnyIterationModeState",
    "AnyTaskModeState",
    "AssignedSplits",
    "DispatcherState",
    "DispatcherTask",
    "IterationReaders",
    "Job",
    "JobIteration",
    "MissingSplits",
    "RegisteredDataset",
    "SplitPool",
    "TaskPhase",
    "Worker",
    "WorkerSlot",
]

AnyIterationModeState: TypeAlias = CoordinatedIteration
"""State that reading modes add to an iteration."""
AnyTaskModeState: TypeAlias = CoordinatedTask | TaskFiles | DatasetShard
"""State that reading modes add to a task."""

WORKER_LEFT = "worker left"
"""Reason of tasks whose worker unregistered."""
MAX_FINISHED_EPOCHS = 100
MAX_REMEMBERED_LOSSES = 200

FIRST_DATASET_ID = 1000
FIRST_ITERATION_ID = 2000
FIRST_TASK_ID = 4000
FIRST_JOB_ID = 5000


class TaskPhase(enum.IntEnum):
    """Phase of a task. A task leaves RUNNING once and never returns to it."""

    RUNNING = 0
    FINISHED = 1
    LOST = 2
    FAILED = 3


class RegisteredDataset(msgspec.Struct):
    """Description of a registered dataset. The plan's bytes are stored separately, by digest."""

    dataset_id: str
    token: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    num_splits: int | None
    compression: str | None
    #: True if no caller was given the id to keep.
    anonymous: bool = False
    has_element_ids: bool = False
    #: Names of the dataset's steps, each with a fingerprint.
    steps: tuple[tuple[str, str], ...] = ()
    #: Minor version of the Python that pickled the plan; empty if unknown.
    python_version: str = ""
    #: Steps of the plan as it is executed; empty if unknown.
    plan_steps: tuple[PlanStep, ...] = ()


class Worker(msgspec.Struct):
    """A worker that is assumed to be alive."""

    worker_id: str
    address: str
    tags: tuple[str, ...]
    draining: bool = False
    #: Exactly the RUNNING tasks of this worker.
    tasks: set[int] = msgspec.field(default_factory=set)
    #: Exactly the worker's FINISHED tasks that were assigned splits, read a copy, or are read in
    #: rounds.
    finished_tasks: set[int] = msgspec.field(default_factory=set)
    #: Exactly its FAILED tasks.
    failed_tasks: set[int] = msgspec.field(default_factory=set)
    versions: Versions = Versions()


class WorkerSlot(msgspec.Struct):
    """One slot in the fixed list of workers (`slots`)."""

    pattern: str
    """Pattern of the addresses that may take the slot."""
    #: Address of the worker that took the slot last; empty if it was never taken.
    address: str = ""
    #: Id of the registered worker that holds the slot; empty if none does. A worker holds at most
    #: one slot.
    worker_id: str = ""


class IterationReaders(msgspec.Struct):
    """Clients that opened an iteration before it finished."""

    first_client: str
    num_clients: int = 1


class Job(msgspec.Struct):
    """A dataset, how it is read, and who may join: all by `name`, only the `owner`, or none."""

    job_id: int
    #: Exactly one of name, owner and save_id is set.
    name: str | None
    owner: str | None
    dataset_id: str
    options: JobOptions
    #: Id of the open save that the job writes.
    save_id: str = ""
    #: Epoch -> iteration id: exactly the job's iterations in `DispatcherState.iterations`.
    iterations: dict[tuple[int, ...], int] = msgspec.field(default_factory=dict)
    #: Epochs whose iteration finished and was forgotten, with their readers: at most
    #: `MAX_FINISHED_EPOCHS`, oldest first.
    finished_epochs: dict[tuple[int, ...], IterationReaders | None] = msgspec.field(
        default_factory=dict
    )
    #: Epochs forgotten earlier: ranges of the last number, by the numbers before it.
    older_finished_epochs: dict[tuple[int, ...], Ranges] = msgspec.field(default_factory=dict)

    def is_epoch_finished(self, epoch: tuple[int, ...]) -> bool:
        """Return whether an epoch was read completely and its iteration forgotten."""
        if epoch in self.finished_epochs:
            return True
        ranges = self.older_finished_epochs.get(epoch[:-1], ()) if epoch else ()
        return any(start <= epoch[-1] < stop for start, stop in ranges)

    @property
    def num_epochs(self) -> int:
        """Number of epochs started so far."""
        num_older = sum(total_length(ranges) for ranges in self.older_finished_epochs.values())
        return len(self.iterations) + len(self.finished_epochs) + num_older


class MissingSplits(msgspec.Struct):
    """Splits of the stream that are no longer assigned.

    They were sent to a departed client, or were lost with a task that is forgotten.
    """

    task_id: int
    client_id: str
    """Client that the splits were sent to; empty if they were lost with the task."""
    splits: Ranges
    """Missing splits; empty if the rest of a copy is missing."""
    address: str
    reason: str = ""


class SplitPool(msgspec.Struct):
    """The splits of an iteration's stream: assigned, returned and abandoned ones."""

    #: Number of splits; INFINITE (-1); None if the iteration assigns none.
    num_splits: int | None
    #: True if elements have ids: elements of a split that no client has are assigned again
    #: (`remaining_ordinals`).
    exactly_once: bool = False
    #: First split that was never assigned; at most `num_splits` if that is finite.
    next_split: int = 0
    #: Splits that were assigned and returned; all before `next_split`. They are assigned first.
    returned: Ranges = ()
    #: Splits that were returned in part: ordinals to assign again. No key is in `returned`, and no
    #: task holds any of the ordinals. Only if elements have ids.
    partial_splits: dict[int, Ranges] = msgspec.field(default_factory=dict)
    #: Number of splits that running tasks hold.
    num_held: int = 0
    #: Splits returned by lost or failed tasks at least once (`recovered`) and at least twice
    #: (`poison_candidates`). The second set is a subset of the first, which lies before
    #: `next_split`. Neither contains abandoned splits.
    recovered: Ranges = ()
    poison_candidates: Ranges = ()
    abandoned: Ranges = ()
    #: Number of poison candidates that a task may be assigned at once; at least 1.
    max_candidates_per_task: int = 1
    #: Addresses of workers that died while they held a poison candidate alone and delivered nothing
    #: of it. Entries of abandoned splits stay.
    died_workers: dict[int, tuple[str, ...]] = msgspec.field(default_factory=dict)

    @property
    def num_unassigned(self) -> int | None:
        """Number of splits that can still be assigned; None if infinite."""
        if self.num_splits is None:
            return 0
        if self.num_splits < 0:
            return None
        return (
            self.num_splits
            - self.next_split
            + total_length(self.returned)
            + len(self.partial_splits)
        )

    @property
    def num_assigned(self) -> int:
        """Number of splits that were assigned and not returned."""
        return self.next_split - total_length(self.returned) - len(self.partial_splits)


class JobIteration(msgspec.Struct):
    """One epoch of a job."""

    iteration_id: int
    job_id: int
    epoch: tuple[int, ...]
    seed: int
    pool: SplitPool
    #: State that the reading mode of its job adds.
    mode_state: AnyIterationModeState | None = None
    #: Seeds for steps that draw the same values in each epoch; empty uses those of the plan.
    fixed_seeds: tuple[int, ...] = ()
    #: At most `MAX_REMEMBERED_LOSSES` entries, oldest first, and the number of splits in the
    #: entries dropped before.
    missing_splits: list[MissingSplits] = msgspec.field(default_factory=list)
    num_older_missing: int = 0
    #: All tasks that the iteration ever had; at most one RUNNING per worker. While an unfinished
    #: iteration assigns splits, each worker that was never draining has a task that is not LOST,
    #: unless no task is RUNNING: then the iteration waits for a silent client and has nothing to
    #: assign. Without splits and shards, each worker that was never draining had a task, or a task
    #: that is not LOST has its address, unless three workers that had tasks were lost.
    tasks: list[int] = msgspec.field(default_factory=list)
    #: RUNNING tasks on workers that stay, and on draining workers.
    num_active_tasks: int = 0
    num_draining_tasks: int = 0
    #: Increases with every change that clients need to know.
    version: int = 0
    #: Exactly the clients that read the iteration now.
    clients: set[str] = msgspec.field(default_factory=set)
    readers: IterationReaders | None = None
    #: True if a task reached the end of the data, not only the end of what its draining worker had.
    reached_end: bool = False
    #: True only if no task is RUNNING.
    finished: bool = False
    #: Why the iteration was abandoned; set only if it is finished.
    failure_reason: str = ""
    #: Identifies the position at which the iteration started; empty for the beginning.
    start_position_id: str = ""
    #: Clients that left before the end; workers reject their requests.
    departed_clients: set[str] = msgspec.field(default_factory=set)

    @property
    def assigns_splits(self) -> bool:
        """Whether the iteration assigns splits; otherwise each task reads a whole copy."""
        return self.pool.num_splits is not None

    @property
    def clients_read_together(self) -> bool:
        """Whether every client must know every task, and clients wait for each other."""
        return self.mode_state is not None and self.mode_state.clients_read_together

    def may_be_poison(self, task: DispatcherTask) -> bool:
        """Return whether a split of a lost task may have killed its worker or made the task fail.

        Only a process that was seen to end counts, not a timeout.
        """
        return not task.timed_out and not (self.pool.exactly_once and task.reason == WORKER_LEFT)

    def recoverable_splits(self, task: DispatcherTask) -> Ranges:
        """Return the splits of an unavailable task to assign again, in assignment order."""
        if not self.pool.exactly_once:
            return task.assigned.undelivered
        missing = task.missing_splits
        if missing and self.pool.abandoned:
            missing = subtract(missing, task.assigned.to_assignment_order(self.pool.abandoned))
        return missing


class AssignedSplits(msgspec.Struct):
    """The splits assigned to a task.

    They are numbered from 0 in assignment order; `returned`, `delivered` and `partially_delivered`
    are ranges of these numbers.
    """

    #: Number of assignments, and the last one in case the worker requests it again.
    num_assignments: int = 0
    last_assignment: tuple[int, int] = (0, 0)
    #: Ordinals of the last assignment; empty for all.
    last_ordinals: Ranges = ()
    #: Number of splits assigned to the task, and how many of them are known to be done.
    num_assigned: int = 0
    num_done: int = 0
    #: Positions in the stream of splits `num_done` to `num_assigned` - 1.
    runs: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: Nothing before `num_done`; delivered splits are also partially delivered. Splits that were
    #: lost with a client no longer belong to the task, as if they were returned.
    returned: Ranges = ()
    delivered: Ranges = ()
    #: Splits that clients may have received in part, according to their reports or after they left.
    partially_delivered: Ranges = ()
    #: Ordinals that the task must still deliver, for each split that it holds in part. None before
    #: `num_done`, none of returned or delivered splits.
    remaining_ordinals: dict[int, Ranges] = msgspec.field(default_factory=dict)
    #: Splits and parts that each client has received and not reported as consumed. Only if elements
    #: have ids and the task is unavailable.
    unacknowledged: dict[str, tuple[Ranges, PartialSplits]] = msgspec.field(default_factory=dict)

    @property
    def num_held(self) -> int:
        """Number of splits that are assigned to the task and neither done nor returned."""
        return self.num_assigned - self.num_done - total_length(self.returned)

    @property
    def undelivered(self) -> Ranges:
        """Splits that the task holds and no client received any element of, in assignment order."""
        known = union((*self.returned, *self.partially_delivered))
        return subtract(((self.num_done, self.num_assigned),), known) if self.num_held else ()

    def to_split_indices(self, assigned: Ranges) -> Ranges:
        """Convert numbers in assignment order to split indices in the stream."""
        return locate_in_stream(self.runs, self.num_done, assigned)

    def to_assignment_order(self, splits: Ranges) -> Ranges:
        """Convert split indices in the stream to numbers in assignment order."""
        return to_assignment_order(self.runs, self.num_done, splits)


class DispatcherTask(msgspec.Struct):
    """The part of an iteration that one worker runs."""

    task_id: int
    iteration_id: int
    worker_id: str
    address: str
    """Address of the worker, which may be lost."""
    task_token: str
    """Proves that the dispatcher sent the client to this task."""
    assigned: AssignedSplits = msgspec.field(default_factory=AssignedSplits)
    #: State that the reading mode of its job adds.
    mode_state: AnyTaskModeState | None = None
    phase: TaskPhase = TaskPhase.RUNNING
    reason: str = ""
    #: True if the task was lost by a timeout: the worker's process was not seen to end.
    timed_out: bool = False
    #: How often all tasks of the iteration were lost before; 0 if it assigns splits.
    attempt: int = 0
    #: True for a copy started when more copies were lost than had been replaced.
    is_replacement: bool = False
    #: True once a task without splits has run for long: losing all copies then counts as a first
    #: loss again.
    is_stable: bool = False
    #: True if the task ended before its copy did because its worker was draining.
    cut_short: bool = False
    #: Clients of the iteration that have yet to report what they received.
    awaiting_reports: set[str] = msgspec.field(default_factory=set)
    #: Departed clients whose unacknowledged elements the worker has not yet reported, each with the
    #: number of splits assigned to the task until the client left. Only while the task is
    #: available.
    unconfirmed_clients: dict[str, int] = msgspec.field(default_factory=dict)
    #: True if the worker was lost or left, or the task failed: undelivered elements are lost.
    is_unavailable: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether the task delivered its last element."""
        return self.phase is TaskPhase.FINISHED

    @property
    def missing_splits(self) -> Ranges:
        """Splits that the task held when it was lost and that no client received completely.

        They are in assignment order.
        """
        splits = self.assigned
        if not (self.is_unavailable and splits.num_held):
            return ()
        known = union((*splits.delivered, *splits.returned))
        return subtract(((splits.num_done, splits.num_assigned),), known)


class DispatcherState(msgspec.Struct):
    """All state that survives a restart."""

    dispatcher_id: str = ""
    secret: bytes = b""
    #: Plan digest -> size of the plan in bytes.
    plan_sizes: dict[bytes, int] = msgspec.field(default_factory=dict)
    datasets: dict[str, RegisteredDataset] = msgspec.field(default_factory=dict)
    workers: dict[str, Worker] = msgspec.field(default_factory=dict)
    slots: list[WorkerSlot] = msgspec.field(default_factory=list)
    jobs: dict[int, Job] = msgspec.field(default_factory=dict)
    iterations: dict[int, JobIteration] = msgspec.field(default_factory=dict)
    tasks: dict[int, DispatcherTask] = msgspec.field(default_factory=dict)
    #: client id -> iteration id
    clients: dict[str, int] = msgspec.field(default_factory=dict)
    #: Indexes: token -> dataset id, address -> worker id, job name or owner -> job id.
    datasets_by_token: dict[str, str] = msgspec.field(default_factory=dict)
    workers_by_address: dict[str, str] = msgspec.field(default_factory=dict)
    jobs_by_name: dict[str, int] = msgspec.field(default_factory=dict)
    jobs_by_owner: dict[str, int] = msgspec.field(default_factory=dict)
    #: Numbers are never reused. `next_dataset_id` is not the id of any dataset.
    next_dataset_id: int = FIRST_DATASET_ID
    next_iteration_id: int = FIRST_ITERATION_ID
    next_task_id: int = FIRST_TASK_ID
    next_job_id: int = FIRST_JOB_ID
    #: By id, oldest first: open saves, and the last closed ones.
    saves: dict[str, SaveState] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Snapshots of earlier releases have no `failed_tasks`.
        for task in self.tasks.values():
            if task.phase is TaskPhase.FAILED and task.worker_id in self.workers:
                self.workers[task.worker_id].failed_tasks.add(task.task_id)

    @property
    def plans_in_use(self) -> set[bytes]:
        """Digests of the plans that datasets and jobs refer to."""
        cost_plans = {
            job.options.cost_fn_digest for job in self.jobs.values() if job.options.cost_fn_digest
        }
        return cost_plans.union(dataset.digest for dataset in self.datasets.values())

    def task_token(self, task_id: int) -> str:
        """Return the token of the task with this number."""
        digest = hashlib.blake2b(str(task_id).encode(), key=self.secret, digest_size=16)
        return f"{self.dispatcher_id}-{digest.hexdigest()}"

    def dataset(self, dataset_id: str) -> RegisteredDataset:
        """Return a dataset.

        Raises:
            NotFoundError: If the dataset is not registered.
        """
        found = self.datasets.get(dataset_id)
        if found is None:
            raise NotFoundError(
                f"Dataset id {dataset_id} not found. It must be registered with "
                "`register_dataset` before it is read. (Datasets registered by `distribute` are "
                "removed after a week without a reader, or to make room for other plans "
                "(`max_plan_bytes`): apply `distribute` again.)"
            )
        return found

    def task(self, task_id: int) -> DispatcherTask:
        """Return a task.

        Raises:
            NotFoundError: If the task never existed, or its iteration was discarded or forgotten.
        """
        found = self.tasks.get(task_id)
        if found is None:
            raise NotFoundError(
                f"task {task_id} not found: its iteration has finished, or was discarded because "
                "it had no clients; open the iteration again"
            )
        return found

    def worker(self, worker_id: str) -> Worker:
        """Return a worker.

        Raises:
            NotFoundError: If the worker never registered, left, or was declared lost.
        """
        found = self.workers.get(worker_id)
        if found is None:
            raise NotFoundError(
                f"worker {worker_id} is not registered, or was declared lost after missing "
                "heartbeats; register again under a new id"
            )
        return found

    def client_iteration(self, client_id: str) -> JobIteration:
        """Return the iteration that a client reads.

        Raises:
            NotFoundError: If the client never opened one, closed it, or timed out.
        """
        iteration_id = self.clients.get(client_id)
        if iteration_id is None:
            raise NotFoundError(
                f"Unknown iteration client id {client_id}. The client closed its iteration, sent "
                "no heartbeat within the client timeout, or the dispatcher was restarted without "
                "fault tolerant mode; open the iteration again"
            )
        return self.iterations[iteration_id]

    def tasks_of(self, iteration: JobIteration) -> list[DispatcherTask]:
        """Return all tasks that an iteration ever had."""
        return [self.tasks[task_id] for task_id in iteration.tasks]

    def running_tasks(self, iteration: JobIteration) -> list[DispatcherTask]:
        """Return the running tasks of an iteration."""
        return [task for task in self.tasks_of(iteration) if task.phase is TaskPhase.RUNNING]

    def may_return_splits(self, iteration: JobIteration) -> bool:
        """Return whether an unavailable task or a departed client may still return splits."""
        return any(
            task.awaiting_reports or (task.unconfirmed_clients and task.assigned.num_held)
            for task in self.tasks_of(iteration)
        )

    def dataset_of(self, iteration: JobIteration) -> RegisteredDataset:
        """Return the dataset that an iteration reads."""
        return self.datasets[self.jobs[iteration.job_id].dataset_id]
