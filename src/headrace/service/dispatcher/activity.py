"""Activity: what is done for iterations, as workers and clients say in their heartbeats.

Rule 1. Nothing of this is journaled: it begins again with each run of the process.
Rule 2. A heartbeat costs what it says: nobody else's numbers are looked at. Sums are kept as the
        reports come, each as the difference to the one before.
        Of tasks and clients from before, the first report is of all that they ever did: it counts,
        and has no part in rates.
Rule 3. Whatever is forgotten elsewhere is forgotten here; what a job has done stays as long as it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.history import History
from headrace.service.dispatcher.state import DispatcherState, Iteration
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.distributed_save.records import SaveClosed
from headrace.service.ranges import count
from headrace.serving.rates import Rate

__all__ = ["Activity", "ClientWork", "IterationWork", "JobWork", "Lost", "TaskWork", "WorkerWork"]

_LOST_REMEMBERED = 20
_MOST_STAGES = 64
_OTHER_STAGES = "other steps"
_MOST = 1 << 62
"""No sum grows by more between two heartbeats."""

N = TypeVar("N", int, float)


class Produced:
    """Elements and bytes, with their rates."""

    def __init__(self, now: float) -> None:
        self.elements = self.bytes = 0
        self.element_rate, self.byte_rate = Rate(now), Rate(now)

    def add(self, elements: int, size: int, now: float, is_recent: bool = True) -> None:
        """Count elements of so many bytes; those that are not recent have no part in the rates."""
        self.elements += elements
        self.bytes += size
        if is_recent:
            self.element_rate.add(elements, now)
            self.byte_rate.add(size, now)


class TaskWork(Produced):
    """What was done for one task."""

    def __init__(self, task_id: int, now: float) -> None:
        super().__init__(now)
        self.last = messages.TaskActivity(task_id=task_id, elements=0, bytes=0)
        self.said_at = now
        self.for_clients, self.for_units = Rate(now), Rate(now)


class WorkerWork(Produced):
    """What a worker has made, and what it holds ready."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.buffers = self.buffer_bytes = 0


class Stage:
    """One step of a dataset."""

    def __init__(self, now: float) -> None:
        self.seconds = 0.0
        self.rate = Rate(now)


class IterationWork(Produced):
    """What was done for one iteration."""

    def __init__(self, now: float, done_before: int = 0) -> None:
        super().__init__(now)
        self.history = History(now)
        self.began = now
        #: Units that were done before.
        self.done_before = done_before
        self.waited = 0.0
        self.stages: dict[str, Stage] = {}

    def add(self, elements: int, size: int, now: float, is_recent: bool = True) -> None:
        """Count elements of so many bytes."""
        super().add(elements, size, now, is_recent)
        if is_recent:
            self.history.add(elements, now)

    def stage(self, name: str, now: float) -> Stage:
        """Return a step by name; of very many, the later ones are one."""
        if name not in self.stages and len(self.stages) >= _MOST_STAGES:
            name = _OTHER_STAGES
        return self.stages.setdefault(name, Stage(now))


class ClientWork(Produced):
    """What a client has received, and how long it waited."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.waited = 0.0
        self.waiting = Rate(now)
        self.buffers = 0


@dataclass
class JobWork:
    """What was done for all passes of a job."""

    elements: int = 0
    bytes: int = 0
    waited: float = 0.0


class Lost(NamedTuple):
    """A worker that was lost."""

    address: str
    reason: str
    at: float


@dataclass
class Activity:
    """What is done, for tasks, workers, clients, iterations and jobs."""

    began: float = 0.0
    tasks: dict[int, TaskWork] = field(default_factory=dict)
    workers: dict[str, WorkerWork] = field(default_factory=dict)
    clients: dict[str, ClientWork] = field(default_factory=dict)
    iterations: dict[int, IterationWork] = field(default_factory=dict)
    jobs: dict[int, JobWork] = field(default_factory=dict)
    lost: deque[Lost] = field(default_factory=lambda: deque(maxlen=_LOST_REMEMBERED))
    workers_lost: int = 0
    total: JobWork = field(default_factory=JobWork)
    """Of all jobs, those that are forgotten too."""
    unheard: set[int | str] = field(default_factory=set)
    """Tasks and clients from before this run of the process that have not reported in it."""
    peers_refused: Callable[[], int] = int
    """Says how many connections ended before they began."""

    @classmethod
    def of(cls, state: DispatcherState, now: float) -> Activity:
        """Begin with what there is."""
        iterations = {
            number: IterationWork(now, done_of(state, iteration))
            for number, iteration in state.iterations.items()
        }
        return cls(began=now, iterations=iterations, unheard={*state.tasks, *state.clients})

    # --- heartbeats -----------------------------------------------------------------------------

    def hear(self, state: DispatcherState, request: messages.DispatcherRequest, now: float) -> None:
        """Take what a heartbeat says of somebody who is known."""
        if isinstance(request, messages.ClientHeartbeat):
            self._hear_client(state, request, now)
        elif isinstance(request, messages.WorkerHeartbeat) and request.activity:
            self._hear_worker(state, request, now)

    def _hear_client(
        self, state: DispatcherState, request: messages.ClientHeartbeat, now: float
    ) -> None:
        iteration_id = state.clients.get(request.client_id)
        if iteration_id is None:
            return
        known = self.clients.get(request.client_id)
        is_recent = self._is_recent(request.client_id)
        if known is None:
            known = self.clients[request.client_id] = ClientWork(now)
        known.buffers = request.buffers
        elements = grown(request.elements, known.elements)
        if elements:
            known.add(elements, 0, now, is_recent)
        waited = grown(request.waited, known.waited)
        if waited:
            known.waited = request.waited
            if is_recent:
                known.waiting.add(waited, now)
            self.iterations[iteration_id].waited += waited
            self._job(state, iteration_id).waited += waited
            self.total.waited += waited

    def _hear_worker(
        self, state: DispatcherState, request: messages.WorkerHeartbeat, now: float
    ) -> None:
        if request.worker_id not in state.workers:
            return
        worker = self.workers.get(request.worker_id)
        if worker is None:
            worker = self.workers[request.worker_id] = WorkerWork(now)
        for said in request.activity:
            task = state.tasks.get(said.task_id)
            if task is not None and task.worker_id == request.worker_id:
                self._hear_task(state, task.iteration_id, worker, said, now)

    def _hear_task(
        self,
        state: DispatcherState,
        iteration_id: int,
        worker: WorkerWork,
        said: messages.TaskActivity,
        now: float,
    ) -> None:
        known = self.tasks.get(said.task_id)
        is_recent = self._is_recent(said.task_id)
        if known is None:
            known = self.tasks[said.task_id] = TaskWork(said.task_id, now)
        before, known.last, known.said_at = known.last, said, now
        elements = grown(said.elements, before.elements)
        size = grown(said.bytes, before.bytes)
        iteration = self.iterations[iteration_id]
        if elements or size:
            for produced in (known, worker, iteration):
                produced.add(elements, size, now, is_recent)
            for job in (self._job(state, iteration_id), self.total):
                job.elements += elements
                job.bytes += size
        worker.buffers += said.buffers - before.buffers
        worker.buffer_bytes += said.buffer_bytes - before.buffer_bytes
        if is_recent:
            known.for_clients.add(grown(said.waited_for_clients, before.waited_for_clients), now)
            known.for_units.add(grown(said.waited_for_units, before.waited_for_units), now)
        earlier = {each.stage: each.seconds for each in before.stages}
        for each in said.stages:
            spent = grown(each.seconds, earlier.get(each.stage, 0.0))
            if spent:
                stage = iteration.stage(each.stage, now)
                stage.seconds += spent
                if is_recent:
                    stage.rate.add(spent, now)

    def _is_recent(self, who: int | str) -> bool:
        """Return whether a report is of what was done since the last one, or since its beginning.

        Args:
            who: A task or a client that reports now.
        """
        if who not in self.unheard:
            return True
        self.unheard.discard(who)
        return False

    def _job(self, state: DispatcherState, iteration_id: int) -> JobWork:
        return self.jobs.setdefault(state.iterations[iteration_id].job_id, JobWork())

    # --- facts ----------------------------------------------------------------------------------

    def observe(self, fact: Update, state: DispatcherState, now: float) -> None:
        """Follow a fact that is about to be applied to `state`."""
        follow = _FOLLOW.get(type(fact))
        if follow is not None:
            follow(self, fact, state, now)

    def forget_tasks(self, task_ids: list[int] | tuple[int, ...], state: DispatcherState) -> None:
        """Forget tasks, and what is in their buffers."""
        for task_id in task_ids:
            self.unheard.discard(task_id)
            work = self.tasks.pop(task_id, None)
            task = state.tasks.get(task_id)
            worker = None if task is None else self.workers.get(task.worker_id)
            if work is not None and worker is not None:
                worker.buffers -= work.last.buffers
                worker.buffer_bytes -= work.last.buffer_bytes


def grown(after: N, before: N) -> N:
    """Return by how much a sum has grown; 0 for what cannot be, whoever says it."""
    growth = after - before
    return growth if 0 < growth < _MOST else type(after)()


def done_of(state: DispatcherState, iteration: Iteration) -> int:
    """Return how many units of an iteration are done, as far as is known."""
    gone = sum(count(iteration.left_of(task)) for task in state.tasks_of(iteration) if task.gone)
    return max(0, iteration.splits.assigned - iteration.splits.held - gone)


def _iteration_created(
    activity: Activity, fact: updates.IterationCreated, state: DispatcherState, now: float
) -> None:
    # Where it begins at a place, what is before that was done by others.
    before = fact.first_unit + count(fact.delivered)
    activity.iterations[fact.iteration_id] = IterationWork(now, before)


def _save_closed(activity: Activity, fact: SaveClosed, state: DispatcherState, now: float) -> None:
    # Its tasks are forgotten next, before heartbeats have said all that they wrote.
    save = state.saves[fact.save]
    work = activity.jobs.get(save.job_id) or JobWork()
    activity.total.elements += max(0, save.elements - work.elements)
    activity.total.bytes += max(0, save.size - work.bytes)


def _iteration_gone(
    activity: Activity,
    fact: updates.IterationCollected | updates.IterationForgotten,
    state: DispatcherState,
    now: float,
) -> None:
    activity.forget_tasks(state.iterations[fact.iteration_id].tasks, state)
    del activity.iterations[fact.iteration_id]


def _tasks_forgotten(
    activity: Activity, fact: updates.TasksForgotten, state: DispatcherState, now: float
) -> None:
    activity.forget_tasks(fact.task_ids, state)


def _client_left(
    activity: Activity, fact: updates.ClientLeft, state: DispatcherState, now: float
) -> None:
    activity.clients.pop(fact.client_id, None)
    activity.unheard.discard(fact.client_id)


def _worker_lost(
    activity: Activity, fact: updates.WorkerLost, state: DispatcherState, now: float
) -> None:
    activity.workers.pop(fact.worker_id, None)
    activity.workers_lost += 1
    address = state.workers[fact.worker_id].address
    activity.lost.appendleft(Lost(address, fact.reason, now))


def _worker_left(
    activity: Activity, fact: updates.WorkerLeft, state: DispatcherState, now: float
) -> None:
    activity.workers.pop(fact.worker_id, None)


def _job_forgotten(
    activity: Activity, fact: updates.JobForgotten, state: DispatcherState, now: float
) -> None:
    activity.jobs.pop(fact.job_id, None)


_FOLLOW: dict[type, Callable[[Activity, Any, DispatcherState, float], None]] = {
    updates.IterationCreated: _iteration_created,
    updates.IterationCollected: _iteration_gone,
    updates.IterationForgotten: _iteration_gone,
    updates.TasksForgotten: _tasks_forgotten,
    updates.ClientLeft: _client_left,
    updates.WorkerLost: _worker_lost,
    updates.WorkerLeft: _worker_left,
    updates.JobForgotten: _job_forgotten,
    SaveClosed: _save_closed,
}
