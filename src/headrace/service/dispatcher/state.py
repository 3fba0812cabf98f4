"""What the facts add up to. `apply.apply` changes it, and nothing else does.

Invariants stand in `#:` comments; `invariants.validate` checks them, in tests. Deciders read a
state and never write. Times are not part of it: who was heard from when is a
matter of one run of the process (`presence.Presence`).
"""

from __future__ import annotations

import enum
import hashlib
from typing import TypeAlias

import msgspec

from headrace.errors import NotFoundError
from headrace.service.messages import JobOptions
from headrace.service.modes.coordinated_reads.records import Consumers, TaskRounds
from headrace.service.modes.distributed_save.records import SaveState, TaskFiles
from headrace.service.modes.static.records import DatasetShard
from headrace.service.ranges import Ranges, count, located, numbered, subtracted, united
from headrace.service.rows import Parts
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

AnyIterationModeState: TypeAlias = Consumers
"""What modes add to an iteration."""
AnyTaskModeState: TypeAlias = TaskRounds | TaskFiles | DatasetShard
"""What modes add to a task."""

WORKER_LEFT = "it left"
"""The reason of tasks whose worker left on its own."""
MAX_FINISHED_EPOCHS = 100
MAX_REMEMBERED_LOSSES = 200

FIRST_DATASET_ID = 1000
FIRST_ITERATION_ID = 2000
FIRST_TASK_ID = 4000
FIRST_JOB_ID = 5000


class TaskPhase(enum.IntEnum):
    """Where a task stands; it leaves RUNNING once and never comes back."""

    RUNNING = 0
    FINISHED = 1
    LOST = 2
    FAILED = 3


class RegisteredDataset(msgspec.Struct):
    """What a client said about a dataset; the plan's bytes are kept elsewhere, by digest."""

    dataset_id: str
    token: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    num_splits: int | None
    compression: str | None
    #: Nobody was given its id to keep.
    anonymous: bool = False
    has_element_ids: bool = False
    #: Names of its steps, each with a fingerprint.
    steps: tuple[tuple[str, str], ...] = ()
    #: The minor version of Python that pickled its plan; empty: not known.
    python_version: str = ""


class Worker(msgspec.Struct):
    """A worker that is alive as far as is known."""

    worker_id: str
    address: str
    tags: tuple[str, ...]
    draining: bool = False
    #: Exactly the RUNNING tasks of this worker.
    tasks: set[int] = msgspec.field(default_factory=set)
    #: Exactly its FINISHED tasks that were dealt units, or read a copy, or are read in rounds.
    finished_tasks: set[int] = msgspec.field(default_factory=set)
    versions: Versions = Versions()


class WorkerSlot(msgspec.Struct):
    """A place in the fixed list of workers (`slots`)."""

    pattern: str
    """Which addresses fit."""
    #: Of the worker that took it last; empty: none ever did.
    address: str = ""
    #: Of the worker that holds it, which is there; empty: none. A worker holds one slot at most.
    worker_id: str = ""


class IterationReaders(msgspec.Struct):
    """Who opened an iteration before it was finished."""

    first_client: str
    num_clients: int = 1


class Job(msgspec.Struct):
    """A dataset, how it is read, and who may join: all by `name`, the `owner` alone, or nobody."""

    job_id: int
    #: Exactly one of name, owner and save is set.
    name: str | None
    owner: str | None
    dataset_id: str
    options: JobOptions
    #: It writes the save of this id, which is not closed.
    save_id: str = ""
    #: pass number -> iteration id: exactly its iterations in `DispatcherState.iterations`.
    iterations: dict[tuple[int, ...], int] = msgspec.field(default_factory=dict)
    #: Passes whose iteration finished and was forgotten, with who read it: at most
    #: `MAX_FINISHED_EPOCHS` of them, the oldest first.
    finished_epochs: dict[tuple[int, ...], IterationReaders | None] = msgspec.field(
        default_factory=dict
    )
    #: Those that were forgotten before: ranges of the last number, by the numbers before it.
    older_finished_epochs: dict[tuple[int, ...], Ranges] = msgspec.field(default_factory=dict)

    def is_epoch_finished(self, epoch: tuple[int, ...]) -> bool:
        """Whether a pass was read, and its iteration forgotten."""
        if epoch in self.finished_epochs:
            return True
        ranges = self.older_finished_epochs.get(epoch[:-1], ()) if epoch else ()
        return any(start <= epoch[-1] < stop for start, stop in ranges)

    @property
    def num_epochs(self) -> int:
        """Number of passes that were begun."""
        before = sum(count(ranges) for ranges in self.older_finished_epochs.values())
        return len(self.iterations) + len(self.finished_epochs) + before


class MissingSplits(msgspec.Struct):
    """Units of the stream that are dealt no more.

    They were sent to a client which is gone, or were lost with a task that is forgotten.
    """

    task_id: int
    client_id: str
    """Empty: they were lost with the task."""
    splits: Ranges
    """Empty: the rest of a copy is missing."""
    address: str
    reason: str = ""


class SplitPool(msgspec.Struct):
    """The units of an iteration's stream: which were dealt, came back, or were given up."""

    #: How many there are; INFINITE (-1); None: nothing is dealt.
    num_splits: int | None
    #: Elements have origins: what nobody has of a unit in part is dealt again
    #: (`remaining_ordinals`).
    exactly_once: bool = False
    #: The first unit that was not dealt yet; at most `num_splits` where those end.
    next_split: int = 0
    #: Units that were dealt and came back; all before `next_split`. They are dealt first.
    returned: Ranges = ()
    #: Units that came back in part: ordinals that are to be dealt again. None is in `returned`, and
    #: no ordinal is with a task. Only where elements have origins.
    partial_splits: dict[int, Ranges] = msgspec.field(default_factory=dict)
    #: Units that the running tasks hold.
    num_held: int = 0
    #: Units that came back from tasks that were lost or failed: once at least, twice at least. The
    #: second are part of the first, which are before `next_split`. Those that were given up are
    #: neither.
    recovered: Ranges = ()
    poison_candidates: Ranges = ()
    abandoned: Ranges = ()
    #: How many suspects a task may be dealt at once; at least one.
    max_candidates_per_task: int = 1
    #: Addresses of workers that died with a suspect which was dealt alone, and gave nothing of it.
    #: Those of units that were given up stay.
    died_workers: dict[int, tuple[str, ...]] = msgspec.field(default_factory=dict)

    @property
    def num_unassigned(self) -> int | None:
        """Units that can still be dealt; None: without end."""
        if self.num_splits is None:
            return 0
        if self.num_splits < 0:
            return None
        return self.num_splits - self.next_split + count(self.returned) + len(self.partial_splits)

    @property
    def num_assigned(self) -> int:
        """Units that were dealt and did not come back."""
        return self.next_split - count(self.returned) - len(self.partial_splits)


class JobIteration(msgspec.Struct):
    """One pass of a job."""

    iteration_id: int
    job_id: int
    epoch: tuple[int, ...]
    seed: int
    pool: SplitPool
    #: What the mode of its job adds.
    mode_state: AnyIterationModeState | None = None
    #: What steps draw from that draw the same in each pass; empty: what the plan says.
    fixed_seeds: tuple[int, ...] = ()
    #: At most `MAX_REMEMBERED_LOSSES`, the oldest first; and how many units those before were.
    missing_splits: list[MissingSplits] = msgspec.field(default_factory=list)
    num_older_missing: int = 0
    #: All tasks that it ever had; at most one RUNNING per worker. While the iteration is unfinished
    #: and deals units, no worker that was never leaving is without one that is not LOST, unless
    #: none is RUNNING: then a client that is silent is waited for, and nothing is there to deal.
    #: Where it has neither units nor shards, each worker that was never leaving had a task, or a
    #: task that is not LOST has its address, unless three workers that had tasks were lost.
    tasks: list[int] = msgspec.field(default_factory=list)
    #: RUNNING tasks on workers that stay, and on workers that are leaving.
    num_active_tasks: int = 0
    num_draining_tasks: int = 0
    #: Grows with every change that its clients should hear of.
    version: int = 0
    #: Exactly the clients that read it now.
    clients: set[str] = msgspec.field(default_factory=set)
    readers: IterationReaders | None = None
    #: A task reached the end of all there is, and not only of what its leaving worker had.
    reached_end: bool = False
    #: Only if no task is RUNNING.
    finished: bool = False
    #: Why it was given up; only if it is finished.
    failure_reason: str = ""
    #: Tells the place at which it began; empty: the beginning.
    start_position_id: str = ""
    #: Clients that left before the end: workers refuse them.
    departed_clients: set[str] = msgspec.field(default_factory=set)

    @property
    def assigns_splits(self) -> bool:
        """Whether its units are dealt to its tasks; else each task is a whole copy."""
        return self.pool.num_splits is not None

    @property
    def clients_read_together(self) -> bool:
        """Whether every client must hear of every task, and clients wait for each other."""
        return self.mode_state is not None and self.mode_state.clients_read_together

    def may_be_poison(self, task: DispatcherTask) -> bool:
        """Whether what a task that is gone held may have killed its worker, or made it fail.

        Only a process that was seen to end counts, and no silence.
        """
        return not task.timed_out and not (self.pool.exactly_once and task.reason == WORKER_LEFT)

    def recoverable_splits(self, task: DispatcherTask) -> Ranges:
        """Return units of a task that is gone which are to be dealt again, in dealt order."""
        if not self.pool.exactly_once:
            return task.assigned.undelivered
        missing = task.missing_splits
        if missing and self.pool.abandoned:
            missing = subtracted(missing, task.assigned.to_assignment_order(self.pool.abandoned))
        return missing


class AssignedSplits(msgspec.Struct):
    """The units that a task was dealt.

    They are numbered from 0 in dealt order; `returned`, `delivered` and `partially_delivered` are
    ranges of those numbers.
    """

    #: Number of grants, and the last of them in case it is asked for again.
    num_assignments: int = 0
    last_assignment: tuple[int, int] = (0, 0)
    #: Ordinals of the last grant; empty: all.
    last_ordinals: Ranges = ()
    #: How many units were dealt to it, and how many of them were known to be done.
    num_assigned: int = 0
    num_done: int = 0
    #: Where in the stream units `num_done` to `num_assigned` - 1 are.
    runs: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: None before `num_done`; what was received was touched. What was lost with a client is no
    #: longer with the task, as if it were returned.
    returned: Ranges = ()
    delivered: Ranges = ()
    #: Units of which a client that said so, or one that left, may have received something.
    partially_delivered: Ranges = ()
    #: Ordinals that the task is still to give, some for each unit that it holds and is not to give
    #: whole. None before `num_done`, none of what was returned or received.
    remaining_ordinals: dict[int, Ranges] = msgspec.field(default_factory=dict)
    #: What clients have of it and did not say that they used: units and parts. Only where elements
    #: have origins, and only if the task is gone.
    unacknowledged: dict[str, tuple[Ranges, Parts]] = msgspec.field(default_factory=dict)

    @property
    def num_held(self) -> int:
        """Units that were dealt to the task, and are neither done nor returned."""
        return self.num_assigned - self.num_done - count(self.returned)

    @property
    def undelivered(self) -> Ranges:
        """Units that the task holds, in dealt order, of which no client received anything."""
        known = united((*self.returned, *self.partially_delivered))
        return subtracted(((self.num_done, self.num_assigned),), known) if self.num_held else ()

    def to_split_indices(self, assigned: Ranges) -> Ranges:
        """Return where in the stream units in dealt order are."""
        return located(self.runs, self.num_done, assigned)

    def to_assignment_order(self, splits: Ranges) -> Ranges:
        """Return which units in dealt order are at places of the stream."""
        return numbered(self.runs, self.num_done, splits)


class DispatcherTask(msgspec.Struct):
    """An iteration on one worker."""

    task_id: int
    iteration_id: int
    worker_id: str
    address: str
    """The worker's, which may be gone."""
    task_token: str
    """Proves that the dispatcher sent somebody to this task."""
    assigned: AssignedSplits = msgspec.field(default_factory=AssignedSplits)
    #: What the mode of its job adds.
    mode_state: AnyTaskModeState | None = None
    phase: TaskPhase = TaskPhase.RUNNING
    reason: str = ""
    #: It was given up because of silence: nobody saw its worker's process end.
    timed_out: bool = False
    #: How often all tasks that the iteration had were lost before; 0 where units are dealt.
    attempt: int = 0
    #: A copy that was begun when more copies were lost than had been replaced.
    is_replacement: bool = False
    #: It ran for long, without anything dealt: the loss of all copies counts as the first again.
    is_stable: bool = False
    #: It ended before its copy did, because its worker was asked to leave.
    cut_short: bool = False
    #: Clients of its iteration that must still say what they received.
    awaiting_reports: set[str] = msgspec.field(default_factory=set)
    #: Clients that are gone, of which the worker has not yet said what they had not acknowledged,
    #: with the units that were dealt to the task until they left; only if it is not gone.
    unconfirmed_clients: dict[str, int] = msgspec.field(default_factory=dict)
    #: The worker is lost or has left, or the task failed: what was not received will not come.
    is_unavailable: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether it handed out its last element."""
        return self.phase is TaskPhase.FINISHED

    @property
    def missing_splits(self) -> Ranges:
        """Units that it held when it was lost and that came whole to nobody, in dealt order."""
        splits = self.assigned
        if not (self.is_unavailable and splits.num_held):
            return ()
        known = united((*splits.delivered, *splits.returned))
        return subtracted(((splits.num_done, splits.num_assigned),), known)


class DispatcherState(msgspec.Struct):
    """Everything that survives a restart."""

    dispatcher_id: str = ""
    secret: bytes = b""
    #: digest -> bytes of the plan
    plan_sizes: dict[bytes, int] = msgspec.field(default_factory=dict)
    datasets: dict[str, RegisteredDataset] = msgspec.field(default_factory=dict)
    workers: dict[str, Worker] = msgspec.field(default_factory=dict)
    slots: list[WorkerSlot] = msgspec.field(default_factory=list)
    jobs: dict[int, Job] = msgspec.field(default_factory=dict)
    iterations: dict[int, JobIteration] = msgspec.field(default_factory=dict)
    tasks: dict[int, DispatcherTask] = msgspec.field(default_factory=dict)
    #: client id -> iteration id
    clients: dict[str, int] = msgspec.field(default_factory=dict)
    #: Ways in by name: token -> dataset id, address -> worker id, name or owner -> job id.
    datasets_by_token: dict[str, str] = msgspec.field(default_factory=dict)
    workers_by_address: dict[str, str] = msgspec.field(default_factory=dict)
    jobs_by_name: dict[str, int] = msgspec.field(default_factory=dict)
    jobs_by_owner: dict[str, int] = msgspec.field(default_factory=dict)
    #: Numbers are never used twice, whatever is forgotten. `next_dataset_id` is not a dataset's id.
    next_dataset_id: int = FIRST_DATASET_ID
    next_iteration_id: int = FIRST_ITERATION_ID
    next_task_id: int = FIRST_TASK_ID
    next_job_id: int = FIRST_JOB_ID
    #: By id, the oldest first: those that are not closed, and the last ones that are.
    saves: dict[str, SaveState] = msgspec.field(default_factory=dict)

    @property
    def plans_in_use(self) -> set[bytes]:
        """Digests of the plans that datasets and jobs have."""
        costs = {
            job.options.cost_fn_digest for job in self.jobs.values() if job.options.cost_fn_digest
        }
        return costs.union(dataset.digest for dataset in self.datasets.values())

    def task_token(self, task_id: int) -> str:
        """Return the ticket that a task of this number has."""
        proof = hashlib.blake2b(str(task_id).encode(), key=self.secret, digest_size=16)
        return f"{self.dispatcher_id}-{proof.hexdigest()}"

    def dataset(self, dataset_id: str) -> RegisteredDataset:
        """Return a dataset.

        Raises:
            NotFoundError: It is not registered.
        """
        found = self.datasets.get(dataset_id)
        if found is None:
            raise NotFoundError(
                f"Dataset id {dataset_id} not found. It must be registered with "
                "`register_dataset` before it is read. (One that `distribute` registered is "
                "forgotten when nobody has read it for a week, or when `max_plan_bytes` needs the "
                "room: apply `distribute` again.)"
            )
        return found

    def task(self, task_id: int) -> DispatcherTask:
        """Return a task.

        Raises:
            NotFoundError: It never existed, or its iteration was collected or forgotten.
        """
        found = self.tasks.get(task_id)
        if found is None:
            raise NotFoundError(
                f"task {task_id} is not known: its iteration is over, or was given up because "
                "nobody read it; open the iteration again"
            )
        return found

    def worker(self, worker_id: str) -> Worker:
        """Return a worker.

        Raises:
            NotFoundError: It never registered, left, or was declared lost.
        """
        found = self.workers.get(worker_id)
        if found is None:
            raise NotFoundError(
                f"worker {worker_id} is not registered, or was silent for so long that it counts "
                "as lost; register again under a new id"
            )
        return found

    def client_iteration(self, client_id: str) -> JobIteration:
        """Return the iteration that a client reads.

        Raises:
            NotFoundError: The client never opened one, closed it, or was silent for too long.
        """
        iteration_id = self.clients.get(client_id)
        if iteration_id is None:
            raise NotFoundError(
                f"Unknown iteration client id {client_id}. The client closed its iteration, was "
                "silent for longer than the client timeout, or the dispatcher was restarted "
                "without fault tolerant mode; open the iteration again"
            )
        return self.iterations[iteration_id]

    def tasks_of(self, iteration: JobIteration) -> list[DispatcherTask]:
        """Return all tasks that an iteration ever had."""
        return [self.tasks[task_id] for task_id in iteration.tasks]

    def running_tasks(self, iteration: JobIteration) -> list[DispatcherTask]:
        """Return the tasks of an iteration that are not over."""
        return [task for task in self.tasks_of(iteration) if task.phase is TaskPhase.RUNNING]

    def may_return_splits(self, iteration: JobIteration) -> bool:
        """Whether units may come back from a task that is lost or failed, or from a client."""
        return any(
            task.awaiting_reports or (task.unconfirmed_clients and task.assigned.num_held)
            for task in self.tasks_of(iteration)
        )

    def dataset_of(self, iteration: JobIteration) -> RegisteredDataset:
        """Return the dataset that an iteration goes through."""
        return self.datasets[self.jobs[iteration.job_id].dataset_id]
