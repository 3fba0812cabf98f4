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
from headrace.service.messages import Terms
from headrace.service.modes.coordinated_reads.records import Consumers, TaskRounds
from headrace.service.modes.distributed_save.records import Save, TaskFiles
from headrace.service.modes.static.records import Shard
from headrace.service.ranges import Ranges, count, located, numbered, subtracted, united
from headrace.service.rows import Parts
from headrace.versions import Versions

__all__ = [
    "AssignedSplits",
    "Dataset",
    "DispatcherState",
    "Iteration",
    "IterationMode",
    "Job",
    "Missing",
    "Readers",
    "Slot",
    "SplitPool",
    "Task",
    "TaskMode",
    "TaskPhase",
    "Worker",
]

IterationMode: TypeAlias = Consumers
"""What modes add to an iteration."""
TaskMode: TypeAlias = TaskRounds | TaskFiles | Shard
"""What modes add to a task."""

LEFT = "it left"
"""The reason of tasks whose worker left on its own."""
PASSES_REMEMBERED = 100
LOSSES_REMEMBERED = 200

FIRST_DATASET = 1000
FIRST_ITERATION = 2000
FIRST_TASK = 4000
FIRST_JOB = 5000


class TaskPhase(enum.IntEnum):
    """Where a task stands; it leaves RUNNING once and never comes back."""

    RUNNING = 0
    FINISHED = 1
    LOST = 2
    FAILED = 3


class Dataset(msgspec.Struct):
    """What a client said about a dataset; the plan's bytes are kept elsewhere, by digest."""

    dataset_id: str
    token: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    positions: int | None
    compression: str | None
    #: Nobody was given its id to keep.
    anonymous: bool = False
    origins: bool = False
    #: Names of its steps, each with a fingerprint.
    steps: tuple[tuple[str, str], ...] = ()
    #: The minor version of Python that pickled its plan; empty: not known.
    python: str = ""


class Worker(msgspec.Struct):
    """A worker that is alive as far as is known."""

    worker_id: str
    address: str
    tags: tuple[str, ...]
    leaving: bool = False
    #: Exactly the RUNNING tasks of this worker.
    tasks: set[int] = msgspec.field(default_factory=set)
    #: Exactly its FINISHED tasks that were dealt units, or read a copy, or are read in rounds.
    finished: set[int] = msgspec.field(default_factory=set)
    versions: Versions = Versions()


class Slot(msgspec.Struct):
    """A place in the fixed list of workers (`slots`)."""

    pattern: str
    """Which addresses fit."""
    #: Of the worker that took it last; empty: none ever did.
    address: str = ""
    #: Of the worker that holds it, which is there; empty: none. A worker holds one slot at most.
    worker_id: str = ""


class Readers(msgspec.Struct):
    """Who opened an iteration before it was finished."""

    first: str
    clients: int = 1


class Job(msgspec.Struct):
    """A dataset, how it is read, and who may join: all by `name`, the `owner` alone, or nobody."""

    job_id: int
    #: Exactly one of name, owner and save is set.
    name: str | None
    owner: str | None
    dataset_id: str
    terms: Terms
    #: It writes the save of this id, which is not closed.
    save: str = ""
    #: pass number -> iteration id: exactly its iterations in `DispatcherState.iterations`.
    iterations: dict[tuple[int, ...], int] = msgspec.field(default_factory=dict)
    #: Passes whose iteration finished and was forgotten, with who read it: at most
    #: `PASSES_REMEMBERED` of them, the oldest first.
    forgotten: dict[tuple[int, ...], Readers | None] = msgspec.field(default_factory=dict)
    #: Those that were forgotten before: ranges of the last number, by the numbers before it.
    over: dict[tuple[int, ...], Ranges] = msgspec.field(default_factory=dict)

    def is_over(self, pass_number: tuple[int, ...]) -> bool:
        """Whether a pass was read, and its iteration forgotten."""
        if pass_number in self.forgotten:
            return True
        ranges = self.over.get(pass_number[:-1], ()) if pass_number else ()
        return any(start <= pass_number[-1] < stop for start, stop in ranges)

    @property
    def passes(self) -> int:
        """Number of passes that were begun."""
        before = sum(count(ranges) for ranges in self.over.values())
        return len(self.iterations) + len(self.forgotten) + before


class Missing(msgspec.Struct):
    """Units of the stream that are dealt no more.

    They were sent to a client which is gone, or were lost with a task that is forgotten.
    """

    task_id: int
    client_id: str
    """Empty: they were lost with the task."""
    units: Ranges
    """Empty: the rest of a copy is missing."""
    address: str
    reason: str = ""


class SplitPool(msgspec.Struct):
    """The units of an iteration's stream: which were dealt, came back, or were given up."""

    #: How many there are; INFINITE (-1); None: nothing is dealt.
    positions: int | None
    #: Elements have origins: what nobody has of a unit in part is dealt again (`rows`).
    exactly_once: bool = False
    #: The first unit that was not dealt yet; at most `positions` where those end.
    next: int = 0
    #: Units that were dealt and came back; all before `next`. They are dealt first.
    returned: Ranges = ()
    #: Units that came back in part: ordinals that are to be dealt again. None is in `returned`, and
    #: no ordinal is with a task. Only where elements have origins.
    parts: dict[int, Ranges] = msgspec.field(default_factory=dict)
    #: Units that the running tasks hold.
    held: int = 0
    #: Units that came back from tasks that were lost or failed: once at least, twice at least. The
    #: second are part of the first, which are before `next`. Those that were given up are neither.
    recovered: Ranges = ()
    suspects: Ranges = ()
    given_up: Ranges = ()
    #: How many suspects a task may be dealt at once; at least one.
    suspects_at_once: int = 1
    #: Addresses of workers that died with a suspect which was dealt alone, and gave nothing of it.
    #: Those of units that were given up stay.
    deaths: dict[int, tuple[str, ...]] = msgspec.field(default_factory=dict)

    @property
    def rest(self) -> int | None:
        """Units that can still be dealt; None: without end."""
        if self.positions is None:
            return 0
        if self.positions < 0:
            return None
        return self.positions - self.next + count(self.returned) + len(self.parts)

    @property
    def assigned(self) -> int:
        """Units that were dealt and did not come back."""
        return self.next - count(self.returned) - len(self.parts)


class Iteration(msgspec.Struct):
    """One pass of a job."""

    iteration_id: int
    job_id: int
    pass_number: tuple[int, ...]
    seed: int
    splits: SplitPool
    #: What the mode of its job adds.
    mode: IterationMode | None = None
    #: What steps draw from that draw the same in each pass; empty: what the plan says.
    fixed_seeds: tuple[int, ...] = ()
    #: At most `LOSSES_REMEMBERED`, the oldest first; and how many units those before were.
    missing: list[Missing] = msgspec.field(default_factory=list)
    missing_before: int = 0
    #: All tasks that it ever had; at most one RUNNING per worker. While the iteration is unfinished
    #: and deals units, no worker that was never leaving is without one that is not LOST, unless
    #: none is RUNNING: then a client that is silent is waited for, and nothing is there to deal.
    #: Where it has neither units nor shards, each worker that was never leaving had a task, or a
    #: task that is not LOST has its address, unless three workers that had tasks were lost.
    tasks: list[int] = msgspec.field(default_factory=list)
    #: RUNNING tasks on workers that stay, and on workers that are leaving.
    takers: int = 0
    leavers: int = 0
    #: Grows with every change that its clients should hear of.
    version: int = 0
    #: Exactly the clients that read it now.
    clients: set[str] = msgspec.field(default_factory=set)
    readers: Readers | None = None
    #: A task reached the end of all there is, and not only of what its leaving worker had.
    ended: bool = False
    #: Only if no task is RUNNING.
    finished: bool = False
    #: Why it was given up; only if it is finished.
    failed: str = ""
    #: Tells the place at which it began; empty: the beginning.
    start: str = ""
    #: Clients that left before the end: workers refuse them.
    left: set[str] = msgspec.field(default_factory=set)

    @property
    def is_dealt(self) -> bool:
        """Whether its units are dealt to its tasks; else each task is a whole copy."""
        return self.splits.positions is not None

    @property
    def clients_read_together(self) -> bool:
        """Whether every client must hear of every task, and clients wait for each other."""
        return self.mode is not None and self.mode.clients_read_together

    def may_be_poison(self, task: Task) -> bool:
        """Whether what a task that is gone held may have killed its worker, or made it fail.

        Only a process that was seen to end counts, and no silence.
        """
        return not task.silent and not (self.splits.exactly_once and task.reason == LEFT)

    def left_of(self, task: Task) -> Ranges:
        """Return units of a task that is gone which are to be dealt again, in dealt order."""
        if not self.splits.exactly_once:
            return task.splits.untouched
        missing = task.missing
        if missing and self.splits.given_up:
            missing = subtracted(missing, task.splits.numbered(self.splits.given_up))
        return missing


class AssignedSplits(msgspec.Struct):
    """The units that a task was dealt.

    They are numbered from 0 in dealt order; `returned`, `received` and `touched` are ranges of
    those numbers.
    """

    #: Number of grants, and the last of them in case it is asked for again.
    grants: int = 0
    last: tuple[int, int] = (0, 0)
    #: Ordinals of the last grant; empty: all.
    last_rows: Ranges = ()
    #: How many units were dealt to it, and how many of them were known to be done.
    dealt: int = 0
    done: int = 0
    #: Where in the stream units `done` to `dealt` - 1 are.
    runs: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: None before `done`; what was received was touched. What was lost with a client is no longer
    #: with the task, as if it were returned.
    returned: Ranges = ()
    received: Ranges = ()
    #: Units of which a client that said so, or one that left, may have received something.
    touched: Ranges = ()
    #: Ordinals that the task is still to give, some for each unit that it holds and is not to give
    #: whole. None before `done`, none of what was returned or received.
    rows: dict[int, Ranges] = msgspec.field(default_factory=dict)
    #: What clients have of it and did not say that they used: units and parts. Only where elements
    #: have origins, and only if the task is gone.
    kept_by: dict[str, tuple[Ranges, Parts]] = msgspec.field(default_factory=dict)

    @property
    def held(self) -> int:
        """Units that were dealt to the task, and are neither done nor returned."""
        return self.dealt - self.done - count(self.returned)

    @property
    def untouched(self) -> Ranges:
        """Units that the task holds, in dealt order, of which no client received anything."""
        known = united((*self.returned, *self.touched))
        return subtracted(((self.done, self.dealt),), known) if self.held else ()

    def located(self, units: Ranges) -> Ranges:
        """Return where in the stream units in dealt order are."""
        return located(self.runs, self.done, units)

    def numbered(self, places: Ranges) -> Ranges:
        """Return which units in dealt order are at places of the stream."""
        return numbered(self.runs, self.done, places)


class Task(msgspec.Struct):
    """An iteration on one worker."""

    task_id: int
    iteration_id: int
    worker_id: str
    address: str
    """The worker's, which may be gone."""
    ticket: str
    """Proves that the dispatcher sent somebody to this task."""
    splits: AssignedSplits = msgspec.field(default_factory=AssignedSplits)
    #: What the mode of its job adds.
    mode: TaskMode | None = None
    phase: TaskPhase = TaskPhase.RUNNING
    reason: str = ""
    #: It was given up because of silence: nobody saw its worker's process end.
    silent: bool = False
    #: How often all tasks that the iteration had were lost before; 0 where units are dealt.
    attempt: int = 0
    #: A copy that was begun when more copies were lost than had been replaced.
    replaces: bool = False
    #: It ran for long, without anything dealt: the loss of all copies counts as the first again.
    lasted: bool = False
    #: It ended before its copy did, because its worker was asked to leave.
    cut: bool = False
    #: Clients of its iteration that must still say what they received.
    unsettled: set[str] = msgspec.field(default_factory=set)
    #: Clients that are gone, of which the worker has not yet said what they had not acknowledged,
    #: with the units that were dealt to the task until they left; only if it is not gone.
    departed: dict[str, int] = msgspec.field(default_factory=dict)
    #: The worker is lost or has left, or the task failed: what was not received will not come.
    gone: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether it handed out its last element."""
        return self.phase is TaskPhase.FINISHED

    @property
    def missing(self) -> Ranges:
        """Units that it held when it was lost and that came whole to nobody, in dealt order."""
        splits = self.splits
        if not (self.gone and splits.held):
            return ()
        known = united((*splits.received, *splits.returned))
        return subtracted(((splits.done, splits.dealt),), known)


class DispatcherState(msgspec.Struct):
    """Everything that survives a restart."""

    incarnation: str = ""
    secret: bytes = b""
    #: digest -> bytes of the plan
    plans: dict[bytes, int] = msgspec.field(default_factory=dict)
    datasets: dict[str, Dataset] = msgspec.field(default_factory=dict)
    workers: dict[str, Worker] = msgspec.field(default_factory=dict)
    slots: list[Slot] = msgspec.field(default_factory=list)
    jobs: dict[int, Job] = msgspec.field(default_factory=dict)
    iterations: dict[int, Iteration] = msgspec.field(default_factory=dict)
    tasks: dict[int, Task] = msgspec.field(default_factory=dict)
    #: client id -> iteration id
    clients: dict[str, int] = msgspec.field(default_factory=dict)
    #: Ways in by name: token -> dataset id, address -> worker id, name or owner -> job id.
    tokens: dict[str, str] = msgspec.field(default_factory=dict)
    addresses: dict[str, str] = msgspec.field(default_factory=dict)
    names: dict[str, int] = msgspec.field(default_factory=dict)
    owners: dict[str, int] = msgspec.field(default_factory=dict)
    #: Numbers are never used twice, whatever is forgotten. `next_dataset` is not a dataset's id.
    next_dataset: int = FIRST_DATASET
    next_iteration: int = FIRST_ITERATION
    next_task: int = FIRST_TASK
    next_job: int = FIRST_JOB
    #: By id, the oldest first: those that are not closed, and the last ones that are.
    saves: dict[str, Save] = msgspec.field(default_factory=dict)

    @property
    def plans_in_use(self) -> set[bytes]:
        """Digests of the plans that datasets and jobs have."""
        costs = {job.terms.cost_plan for job in self.jobs.values() if job.terms.cost_plan}
        return costs.union(dataset.digest for dataset in self.datasets.values())

    def ticket(self, task_id: int) -> str:
        """Return the ticket that a task of this number has."""
        proof = hashlib.blake2b(str(task_id).encode(), key=self.secret, digest_size=16)
        return f"{self.incarnation}-{proof.hexdigest()}"

    def dataset(self, dataset_id: str) -> Dataset:
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

    def task(self, task_id: int) -> Task:
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

    def client_iteration(self, client_id: str) -> Iteration:
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

    def tasks_of(self, iteration: Iteration) -> list[Task]:
        """Return all tasks that an iteration ever had."""
        return [self.tasks[task_id] for task_id in iteration.tasks]

    def running_tasks(self, iteration: Iteration) -> list[Task]:
        """Return the tasks of an iteration that are not over."""
        return [task for task in self.tasks_of(iteration) if task.phase is TaskPhase.RUNNING]

    def may_recover(self, iteration: Iteration) -> bool:
        """Whether units may come back from a task that is lost or failed, or from a client."""
        return any(
            task.unsettled or (task.departed and task.splits.held)
            for task in self.tasks_of(iteration)
        )

    def dataset_of(self, iteration: Iteration) -> Dataset:
        """Return the dataset that an iteration goes through."""
        return self.datasets[self.jobs[iteration.job_id].dataset_id]
