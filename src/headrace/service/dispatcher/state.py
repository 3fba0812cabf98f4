"""What the facts add up to. `apply` changes the state, and nothing else does.

Deciders read a state and never write; `apply` writes and never decides. Times are not part of it:
who was heard from when is a matter of one run of the process (`decision.Presence`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import NotFoundError
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.updates import Update

__all__ = [
    "Dataset",
    "DispatcherState",
    "Grant",
    "Iteration",
    "Job",
    "SourceProgress",
    "Task",
    "TaskPhase",
    "Worker",
]

FIRST_DATASET = 1000
FIRST_ITERATION = 2000
FIRST_TASK = 4000
FIRST_JOB = 5000


class TaskPhase(enum.IntEnum):
    """Where a task stands; it leaves RUNNING once and never comes back."""

    RUNNING = 0
    FINISHED = 1
    LOST = 2


class Dataset(msgspec.Struct):
    """What a client told about a dataset; the plan's bytes are kept elsewhere."""

    dataset_id: str
    token: str
    fingerprint: str
    element_spec: bytes
    cardinality: int
    split_sizes: tuple[int, ...]
    compression: str | None
    plan: bytes

    @property
    def splittable(self) -> bool:
        """Whether parts of it may be read by different workers."""
        return bool(self.split_sizes)


class Worker(msgspec.Struct):
    """A worker that is alive as far as is known."""

    worker_id: str
    address: str
    tags: tuple[str, ...]
    #: Exactly the RUNNING tasks of this worker.
    tasks: set[int] = msgspec.field(default_factory=set)


class Job(msgspec.Struct):
    """A dataset, how it is processed, and who may join: all by `name`, or the `owner` alone."""

    job_id: int
    #: Exactly one of name and owner is set.
    name: str | None
    owner: str | None
    dataset_id: str
    processing_mode: int
    target_workers: str
    #: repetition -> iteration id. An id that is no longer in `DispatcherState.iterations` belongs
    #: to an iteration that finished and was forgotten.
    iterations: dict[int, int] = msgspec.field(default_factory=dict)


class SourceProgress(msgspec.Struct):
    """How far one source of a DYNAMIC iteration is dealt out."""

    #: The current pass; () before the first. Never goes back.
    repetition: tuple[int, ...] = ()
    #: The first index of this pass that was not dealt yet; at most the source's size.
    next: int = 0


class Iteration(msgspec.Struct):
    """One pass of a job."""

    iteration_id: int
    job_id: int
    repetition: int
    #: One per source for DYNAMIC, else empty.
    sources: list[SourceProgress]
    #: All tasks that it ever had; at most one RUNNING per worker, and while the iteration is
    #: unfinished, no live worker is without one that is RUNNING or FINISHED.
    tasks: list[int] = msgspec.field(default_factory=list)
    #: Exactly the clients that read it now.
    clients: set[str] = msgspec.field(default_factory=set)
    #: Only if no task is RUNNING and at least one is FINISHED.
    finished: bool = False


class Grant(msgspec.Struct):
    """The last split that a task got of one source, in case it asks for it again."""

    number: int
    start: int
    stop: int


class Task(msgspec.Struct):
    """An iteration on one worker."""

    task_id: int
    iteration_id: int
    worker_id: str
    phase: TaskPhase = TaskPhase.RUNNING
    #: source -> the last split
    grants: dict[int, Grant] = msgspec.field(default_factory=dict)


class DispatcherState(msgspec.Struct):
    """Everything that survives a restart."""

    datasets: dict[str, Dataset] = msgspec.field(default_factory=dict)
    workers: dict[str, Worker] = msgspec.field(default_factory=dict)
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

    def apply(self, update: Update) -> None:
        """Change the state by one fact."""
        _APPLY[type(update)](self, update)

    def dataset(self, dataset_id: str) -> Dataset:
        """Return a dataset.

        Raises:
            NotFoundError: It is not registered.
        """
        found = self.datasets.get(dataset_id)
        if found is None:
            raise NotFoundError(
                f"Dataset id {dataset_id} not found. It must be registered with "
                "`register_dataset` before it is read."
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
            NotFoundError: It never registered, or was declared lost.
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

    def running_tasks(self, iteration: Iteration) -> list[Task]:
        """Return the tasks of an iteration that are neither finished nor lost."""
        tasks = (self.tasks[task_id] for task_id in iteration.tasks)
        return [task for task in tasks if task.phase is TaskPhase.RUNNING]

    def dataset_of(self, iteration: Iteration) -> Dataset:
        """Return the dataset that an iteration goes through."""
        return self.datasets[self.jobs[iteration.job_id].dataset_id]

    def validate(self) -> None:
        """Check every `#:` comment of this file; raise AssertionError if one does not hold."""
        running: dict[str, set[int]] = {worker_id: set() for worker_id in self.workers}
        for task_id, task in self.tasks.items():
            assert task.task_id == task_id < self.next_task, task
            assert task_id in self.iterations[task.iteration_id].tasks, task
            if task.phase is TaskPhase.RUNNING:
                running[task.worker_id].add(task_id)
        for worker_id, worker in self.workers.items():
            assert worker.worker_id == worker_id, worker
            assert worker.tasks == running[worker_id], (worker, running[worker_id])
            assert self.addresses[worker.address] == worker_id, worker
        assert len(self.addresses) == len(self.workers)
        self._validate_jobs()
        readers: dict[str, int] = {}
        for iteration_id, iteration in self.iterations.items():
            self._validate_iteration(iteration_id, iteration)
            readers.update(dict.fromkeys(iteration.clients, iteration_id))
        assert readers == self.clients, (readers, self.clients)
        assert sum(len(each.clients) for each in self.iterations.values()) == len(self.clients)
        assert str(self.next_dataset) not in self.datasets
        for token, dataset_id in self.tokens.items():
            assert self.datasets[dataset_id].token == token

    def _validate_jobs(self) -> None:
        for job_id, job in self.jobs.items():
            assert job.job_id == job_id < self.next_job, job
            assert job.dataset_id in self.datasets, job
            if job.name is not None:
                assert job.owner is None, job
                assert self.names[job.name] == job_id, job
            else:
                assert job.owner is not None, job
                assert self.owners[job.owner] == job_id, job
        assert len(self.names) + len(self.owners) == len(self.jobs)

    def _validate_iteration(self, iteration_id: int, iteration: Iteration) -> None:
        assert iteration.iteration_id == iteration_id < self.next_iteration, iteration
        assert self.jobs[iteration.job_id].iterations[iteration.repetition] == iteration_id
        tasks = [self.tasks[task_id] for task_id in iteration.tasks]
        assert len(set(iteration.tasks)) == len(tasks), iteration
        running = [task.worker_id for task in tasks if task.phase is TaskPhase.RUNNING]
        assert len(set(running)) == len(running), iteration
        over = not running and any(task.phase is TaskPhase.FINISHED for task in tasks)
        assert iteration.finished == over, (iteration, tasks)
        if not iteration.finished:
            served = {task.worker_id for task in tasks if task.phase is not TaskPhase.LOST}
            assert served >= set(self.workers), (iteration, self.workers)
        sizes = self.dataset_of(iteration).split_sizes
        assert len(iteration.sources) in (0, len(sizes)), iteration
        for progress, size in zip(iteration.sources, sizes, strict=False):
            assert progress.next >= 0, progress
            assert size < 0 or progress.next <= size, (progress, size)


def _dataset_registered(state: DispatcherState, fact: updates.DatasetRegistered) -> None:
    state.datasets[fact.dataset_id] = Dataset(
        dataset_id=fact.dataset_id,
        token=fact.token,
        fingerprint=fact.fingerprint,
        element_spec=fact.element_spec,
        cardinality=fact.cardinality,
        split_sizes=fact.split_sizes,
        compression=fact.compression,
        plan=fact.plan,
    )
    state.tokens[fact.token] = fact.dataset_id
    while str(state.next_dataset) in state.datasets:
        state.next_dataset += 1


def _worker_registered(state: DispatcherState, fact: updates.WorkerRegistered) -> None:
    known = state.workers.get(fact.worker_id)
    if known is None:
        known = Worker(worker_id=fact.worker_id, address=fact.address, tags=fact.tags)
        state.workers[fact.worker_id] = known
        state.addresses[fact.address] = fact.worker_id
    known.tags = fact.tags


def _worker_lost(state: DispatcherState, fact: updates.WorkerLost) -> None:
    worker = state.workers.pop(fact.worker_id)
    del state.addresses[worker.address]
    for task_id in worker.tasks:
        state.tasks[task_id].phase = TaskPhase.LOST


def _job_created(state: DispatcherState, fact: updates.JobCreated) -> None:
    state.jobs[fact.job_id] = Job(
        job_id=fact.job_id,
        name=fact.name,
        owner=fact.owner,
        dataset_id=fact.dataset_id,
        processing_mode=fact.processing_mode,
        target_workers=fact.target_workers,
    )
    if fact.name is not None:
        state.names[fact.name] = fact.job_id
    elif fact.owner is not None:
        state.owners[fact.owner] = fact.job_id
    state.next_job = fact.job_id + 1


def _job_forgotten(state: DispatcherState, fact: updates.JobForgotten) -> None:
    job = state.jobs.pop(fact.job_id)
    if job.name is not None:
        del state.names[job.name]
    elif job.owner is not None:
        del state.owners[job.owner]


def _iteration_created(state: DispatcherState, fact: updates.IterationCreated) -> None:
    job = state.jobs[fact.job_id]
    dealt = job.processing_mode == ShardingPolicy.DYNAMIC
    sizes = state.datasets[job.dataset_id].split_sizes if dealt else ()
    state.iterations[fact.iteration_id] = Iteration(
        iteration_id=fact.iteration_id,
        job_id=fact.job_id,
        repetition=fact.repetition,
        sources=[SourceProgress() for _ in sizes],
    )
    job.iterations[fact.repetition] = fact.iteration_id
    state.next_iteration = fact.iteration_id + 1


def _iteration_finished(state: DispatcherState, fact: updates.IterationFinished) -> None:
    state.iterations[fact.iteration_id].finished = True


def _iteration_collected(state: DispatcherState, fact: updates.IterationCollected) -> None:
    iteration = _drop_iteration(state, fact.iteration_id)
    del state.jobs[iteration.job_id].iterations[iteration.repetition]


def _iteration_forgotten(state: DispatcherState, fact: updates.IterationForgotten) -> None:
    _drop_iteration(state, fact.iteration_id)


def _drop_iteration(state: DispatcherState, iteration_id: int) -> Iteration:
    iteration = state.iterations.pop(iteration_id)
    for task_id in iteration.tasks:
        task = state.tasks.pop(task_id)
        if task.phase is TaskPhase.RUNNING:
            state.workers[task.worker_id].tasks.discard(task_id)
    return iteration


def _task_created(state: DispatcherState, fact: updates.TaskCreated) -> None:
    state.tasks[fact.task_id] = Task(
        task_id=fact.task_id, iteration_id=fact.iteration_id, worker_id=fact.worker_id
    )
    state.iterations[fact.iteration_id].tasks.append(fact.task_id)
    state.workers[fact.worker_id].tasks.add(fact.task_id)
    state.next_task = fact.task_id + 1


def _task_finished(state: DispatcherState, fact: updates.TaskFinished) -> None:
    task = state.tasks[fact.task_id]
    task.phase = TaskPhase.FINISHED
    state.workers[task.worker_id].tasks.discard(fact.task_id)


def _client_joined(state: DispatcherState, fact: updates.ClientJoined) -> None:
    state.clients[fact.client_id] = fact.iteration_id
    state.iterations[fact.iteration_id].clients.add(fact.client_id)


def _client_left(state: DispatcherState, fact: updates.ClientLeft) -> None:
    iteration_id = state.clients.pop(fact.client_id)
    state.iterations[iteration_id].clients.discard(fact.client_id)


def _split_produced(state: DispatcherState, fact: updates.SplitProduced) -> None:
    task = state.tasks[fact.task_id]
    progress = state.iterations[task.iteration_id].sources[fact.source]
    progress.repetition = fact.repetition
    progress.next = fact.stop
    task.grants[fact.source] = Grant(number=fact.number, start=fact.start, stop=fact.stop)


_APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    updates.DatasetRegistered: _dataset_registered,
    updates.WorkerRegistered: _worker_registered,
    updates.WorkerLost: _worker_lost,
    updates.JobCreated: _job_created,
    updates.JobForgotten: _job_forgotten,
    updates.IterationCreated: _iteration_created,
    updates.IterationFinished: _iteration_finished,
    updates.IterationCollected: _iteration_collected,
    updates.IterationForgotten: _iteration_forgotten,
    updates.TaskCreated: _task_created,
    updates.TaskFinished: _task_finished,
    updates.ClientJoined: _client_joined,
    updates.ClientLeft: _client_left,
    updates.SplitProduced: _split_produced,
}
