"""Activity of iterations, as reported in the heartbeats of workers and clients.

Rule 1. Activity is not journaled: it starts at zero with each process.
Rule 2. The cost of a heartbeat depends only on its own contents. Sums are updated as the reports
        arrive, each by the difference to the previous one. The first report of a task or client
        from an earlier process covers all that it ever did: it counts in sums, but not in rates.
Rule 3. Records that the dispatcher forgets are forgotten here too; the counters of a job stay as
        long as the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.rate_history import RateHistory
from headrace.service.dispatcher.state import DispatcherState, JobIteration
from headrace.service.modes.distributed_save.records import SaveClosed
from headrace.service.ranges import total_length
from headrace.serving.rates import Rate

__all__ = [
    "ClientCounters",
    "DataWorkerCounters",
    "IterationCounters",
    "JobCounters",
    "ServiceActivity",
    "TaskCounters",
    "WorkerLoss",
]

_BLOCKED_SECONDS = 3.0
"""Seconds after which a task that reported to wait, and nothing since, counts as waiting all the
time."""
_MAX_WORKER_LOSSES = 20
_MAX_STEPS = 64
_OTHER_STEPS = "other steps"
_MAX_INCREASE = 1 << 62
"""Exclusive bound of a sum's growth between two heartbeats."""

N = TypeVar("N", int, float)


class ProductionCounters:
    """Numbers of elements and bytes, with their rates."""

    def __init__(self, now: float) -> None:
        self.elements = self.bytes = 0
        self.element_rate, self.byte_rate = Rate(now), Rate(now)

    def add(self, elements: int, size: int, now: float, is_recent: bool = True) -> None:
        """Count elements with a total size in bytes; only recent ones affect the rates."""
        self.elements += elements
        self.bytes += size
        if is_recent:
            self.element_rate.add(elements, now)
            self.byte_rate.add(size, now)


class TaskCounters(ProductionCounters):
    """Counters of one task."""

    def __init__(self, task_id: int, now: float) -> None:
        super().__init__(now)
        self.last_report = messages.TaskActivity(task_id=task_id, elements=0, bytes=0)
        self.reported_at = now
        self.client_wait_rate, self.split_wait_rate = Rate(now), Rate(now)

    def client_wait_ratio(self, now: float) -> float:
        """Return the fraction of the last seconds that production waited for clients."""
        return self._wait_ratio(self.client_wait_rate, messages.WAITING_FOR_CLIENTS, now)

    def split_wait_ratio(self, now: float) -> float:
        """Return the fraction of the last seconds that production waited for splits."""
        return self._wait_ratio(self.split_wait_rate, messages.WAITING_FOR_SPLITS, now)

    def _wait_ratio(self, rate: Rate, reason: str, now: float) -> float:
        waiting_for = self.last_report.waiting_for
        if waiting_for and now - self.reported_at > _BLOCKED_SECONDS:
            return float(waiting_for == reason)
        return min(1.0, rate.read(now))


class DataWorkerCounters(ProductionCounters):
    """Counters of what a worker produced and has buffered."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.buffered_batches = self.buffered_bytes = 0
        self.cores = self.cpu_seconds = self.machine_cpu_seconds = 0.0
        self.cpu_rate: Rate = Rate(now)

    def add_processor_use(self, cores: float, cpu_seconds: float, now: float) -> None:
        """Record the cores that its process may use, and its processor time so far."""
        if self.cores:  # the first report covers the time before
            self.cpu_rate.add(increase(cpu_seconds, self.cpu_seconds), now)
        self.cores, self.cpu_seconds = cores, cpu_seconds


class StepCounters:
    """Time spent in one step of a dataset."""

    def __init__(self, now: float) -> None:
        self.seconds: float = 0.0
        self.rate: Rate = Rate(now)
        #: As in `StepSeconds`, of the last report.
        self.position, self.threads = -1, 0


class IterationCounters(ProductionCounters):
    """Counters of one iteration."""

    def __init__(self, now: float, initially_done: int = 0) -> None:
        super().__init__(now)
        self.history: RateHistory = RateHistory(now)
        self.started_at = now
        #: Number of splits that were done before.
        self.initially_done = initially_done
        self.wait_seconds: float = 0.0
        self.steps: dict[str, StepCounters] = {}

    def add(self, elements: int, size: int, now: float, is_recent: bool = True) -> None:
        """Count elements with a total size in bytes."""
        super().add(elements, size, now, is_recent)
        if is_recent:
            self.history.add(elements, now)

    def step(self, name: str, now: float) -> StepCounters:
        """Return the counters of a step; after `_MAX_STEPS` steps, the others share one."""
        if name not in self.steps and len(self.steps) >= _MAX_STEPS:
            name = _OTHER_STEPS
        return self.steps.setdefault(name, StepCounters(now))


class ClientCounters(ProductionCounters):
    """Counters of what a client received, and how long it waited."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.wait_seconds: float = 0.0
        self.wait_rate: Rate = Rate(now)
        self.buffered_batches = 0
        self.reported_at = now

    def wait_ratio(self, now: float) -> float:
        """Return the fraction of the last seconds that the consumer waited."""
        return min(1.0, self.wait_rate.read(now))


@dataclass
class JobCounters:
    """Counters of all epochs of a job."""

    elements: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0


class WorkerLoss(NamedTuple):
    """A worker that was lost."""

    address: str
    reason: str
    lost_at: float


@dataclass
class ServiceActivity:
    """Activity of tasks, workers, clients, iterations and jobs."""

    started_at: float = 0.0
    tasks: dict[int, TaskCounters] = field(default_factory=dict)
    workers: dict[str, DataWorkerCounters] = field(default_factory=dict)
    clients: dict[str, ClientCounters] = field(default_factory=dict)
    iterations: dict[int, IterationCounters] = field(default_factory=dict)
    jobs: dict[int, JobCounters] = field(default_factory=dict)
    recently_lost_workers: deque[WorkerLoss] = field(
        default_factory=lambda: deque(maxlen=_MAX_WORKER_LOSSES)
    )
    num_workers_lost: int = 0
    total: JobCounters = field(default_factory=JobCounters)
    """Totals of all jobs, including forgotten ones."""
    unreported: set[int | str] = field(default_factory=set)
    """Tasks and clients from an earlier process that have not reported yet."""
    count_refused_connections: Callable[[], int] = int
    """Returns the number of connections that were refused."""

    @classmethod
    def from_state(cls, state: DispatcherState, now: float) -> ServiceActivity:
        """Create the counters for a state."""
        iterations = {
            iteration_id: IterationCounters(now, count_done_splits(state, iteration))
            for iteration_id, iteration in state.iterations.items()
        }
        return cls(started_at=now, iterations=iterations, unreported={*state.tasks, *state.clients})

    # --- heartbeats -----------------------------------------------------------------------------

    def record_heartbeat(
        self, state: DispatcherState, request: messages.DispatcherRequest, now: float
    ) -> None:
        """Record the activity in a heartbeat of a known client or worker."""
        if isinstance(request, messages.ClientHeartbeat):
            self._record_client(state, request, now)
        elif isinstance(request, messages.WorkerHeartbeat) and (request.activity or request.cores):
            self._record_worker(state, request, now)

    def _record_client(
        self, state: DispatcherState, request: messages.ClientHeartbeat, now: float
    ) -> None:
        iteration_id = state.clients.get(request.client_id)
        if iteration_id is None:
            return
        counters = self.clients.get(request.client_id)
        is_recent = self._is_recent(request.client_id)
        if counters is None:
            counters = self.clients[request.client_id] = ClientCounters(now)
        counters.buffered_batches, counters.reported_at = request.buffered_batches, now
        elements = increase(request.elements, counters.elements)
        if elements:
            counters.add(elements, 0, now, is_recent)
        waited = increase(request.wait_seconds, counters.wait_seconds)
        if waited:
            counters.wait_seconds = request.wait_seconds
            if is_recent:
                counters.wait_rate.add(waited, now)
            self.iterations[iteration_id].wait_seconds += waited
            self._job(state, iteration_id).wait_seconds += waited
            self.total.wait_seconds += waited

    def _record_worker(
        self, state: DispatcherState, request: messages.WorkerHeartbeat, now: float
    ) -> None:
        if request.worker_id not in state.workers:
            return
        worker = self.workers.get(request.worker_id)
        if worker is None:
            worker = self.workers[request.worker_id] = DataWorkerCounters(now)
        if request.cores:
            worker.add_processor_use(request.cores, request.cpu_seconds, now)
            worker.machine_cpu_seconds = request.machine_cpu_seconds
        for report in request.activity:
            task = state.tasks.get(report.task_id)
            if task is not None and task.worker_id == request.worker_id:
                self._record_task(state, task.iteration_id, worker, report, now)

    def _record_task(
        self,
        state: DispatcherState,
        iteration_id: int,
        worker: DataWorkerCounters,
        report: messages.TaskActivity,
        now: float,
    ) -> None:
        counters = self.tasks.get(report.task_id)
        is_recent = self._is_recent(report.task_id)
        if counters is None:
            counters = self.tasks[report.task_id] = TaskCounters(report.task_id, now)
        previous, counters.last_report, counters.reported_at = counters.last_report, report, now
        elements = increase(report.elements, previous.elements)
        size = increase(report.bytes, previous.bytes)
        iteration = self.iterations[iteration_id]
        if elements or size:
            for producer in (counters, worker, iteration):
                producer.add(elements, size, now, is_recent)
            for job in (self._job(state, iteration_id), self.total):
                job.elements += elements
                job.bytes += size
        worker.buffered_batches += report.buffered_batches - previous.buffered_batches
        worker.buffered_bytes += report.buffered_bytes - previous.buffered_bytes
        if is_recent:
            counters.client_wait_rate.add(
                increase(report.client_wait_seconds, previous.client_wait_seconds), now
            )
            counters.split_wait_rate.add(
                increase(report.split_wait_seconds, previous.split_wait_seconds), now
            )
        previous_seconds = {step.step: step.seconds for step in previous.steps}
        for step in report.steps:
            seconds = increase(step.seconds, previous_seconds.get(step.step, 0.0))
            if seconds:
                step_counters = iteration.step(step.step, now)
                step_counters.seconds += seconds
                step_counters.position, step_counters.threads = step.position, step.threads
                if is_recent:
                    step_counters.rate.add(seconds, now)

    def _is_recent(self, reporter: int | str) -> bool:
        """Return whether a report covers only work of this process.

        That is False for the first report of a task or client from an earlier process.

        Args:
            reporter: Task or client that sent the report.
        """
        if reporter not in self.unreported:
            return True
        self.unreported.discard(reporter)
        return False

    def _job(self, state: DispatcherState, iteration_id: int) -> JobCounters:
        return self.jobs.setdefault(state.iterations[iteration_id].job_id, JobCounters())

    # --- events ---------------------------------------------------------------------------------

    def observe(self, event: AnyEvent, state: DispatcherState, now: float) -> None:
        """Follow an event that is about to be applied to `state`."""
        follow = _OBSERVE.get(type(event))
        if follow is not None:
            follow(self, event, state, now)

    def forget_tasks(self, task_ids: list[int] | tuple[int, ...], state: DispatcherState) -> None:
        """Forget tasks and the contents of their buffers."""
        for task_id in task_ids:
            self.unreported.discard(task_id)
            counters = self.tasks.pop(task_id, None)
            task = state.tasks.get(task_id)
            worker = None if task is None else self.workers.get(task.worker_id)
            if counters is not None and worker is not None:
                worker.buffered_batches -= counters.last_report.buffered_batches
                worker.buffered_bytes -= counters.last_report.buffered_bytes


def increase(after: N, before: N) -> N:
    """Return by how much a sum has grown; 0 for an impossible value."""
    growth = after - before
    return growth if 0 < growth < _MAX_INCREASE else type(after)()


def count_done_splits(state: DispatcherState, iteration: JobIteration) -> int:
    """Return the number of splits of an iteration that are known to be done."""
    num_recoverable = sum(
        total_length(iteration.recoverable_splits(task))
        for task in state.tasks_of(iteration)
        if task.is_unavailable
    )
    return max(0, iteration.pool.num_assigned - iteration.pool.num_held - num_recoverable)


def _iteration_created(
    activity: ServiceActivity, event: events.IterationCreated, state: DispatcherState, now: float
) -> None:
    # Everything before a start position was read by others.
    initially_done = event.first_split + total_length(event.delivered)
    activity.iterations[event.iteration_id] = IterationCounters(now, initially_done)


def _save_closed(
    activity: ServiceActivity, event: SaveClosed, state: DispatcherState, now: float
) -> None:
    # Its tasks are forgotten next, before heartbeats have reported everything that they wrote.
    save = state.saves[event.save_id]
    counters = activity.jobs.get(save.job_id) or JobCounters()
    activity.total.elements += max(0, save.num_elements - counters.elements)
    activity.total.bytes += max(0, save.num_bytes - counters.bytes)


def _iteration_removed(
    activity: ServiceActivity,
    event: events.IterationDiscarded | events.IterationForgotten,
    state: DispatcherState,
    now: float,
) -> None:
    activity.forget_tasks(state.iterations[event.iteration_id].tasks, state)
    del activity.iterations[event.iteration_id]


def _tasks_forgotten(
    activity: ServiceActivity, event: events.TasksForgotten, state: DispatcherState, now: float
) -> None:
    activity.forget_tasks(event.task_ids, state)


def _client_left(
    activity: ServiceActivity, event: events.ClientLeft, state: DispatcherState, now: float
) -> None:
    activity.clients.pop(event.client_id, None)
    activity.unreported.discard(event.client_id)


def _worker_lost(
    activity: ServiceActivity, event: events.WorkerLost, state: DispatcherState, now: float
) -> None:
    activity.workers.pop(event.worker_id, None)
    activity.num_workers_lost += 1
    address = state.workers[event.worker_id].address
    activity.recently_lost_workers.appendleft(WorkerLoss(address, event.reason, now))


def _worker_left(
    activity: ServiceActivity, event: events.WorkerLeft, state: DispatcherState, now: float
) -> None:
    activity.workers.pop(event.worker_id, None)


def _job_forgotten(
    activity: ServiceActivity, event: events.JobForgotten, state: DispatcherState, now: float
) -> None:
    activity.jobs.pop(event.job_id, None)


_OBSERVE: dict[type, Callable[[ServiceActivity, Any, DispatcherState, float], None]] = {
    events.IterationCreated: _iteration_created,
    events.IterationDiscarded: _iteration_removed,
    events.IterationForgotten: _iteration_removed,
    events.TasksForgotten: _tasks_forgotten,
    events.ClientLeft: _client_left,
    events.WorkerLost: _worker_lost,
    events.WorkerLeft: _worker_left,
    events.JobForgotten: _job_forgotten,
    SaveClosed: _save_closed,
}
