"""Rates of an epoch of a job, from statuses of its dispatcher."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

from headrace.execution.pipeline_model import PipelineMeasurement, StepCost
from headrace.service.messages import (
    ClientStatus,
    DispatcherStatus,
    IterationStatus,
    JobStatus,
    TaskStatus,
    WorkerStatus,
)

__all__ = ["EpochObservation", "StatusAt", "measure_epoch", "observe"]

_MIN_BUSY_SHARE = 0.02
"""Smallest share of busy time from which a capacity is extrapolated."""
_MIN_SECONDS = 2.0
"""Minimum seconds between two reports; otherwise the averages of the dispatcher are used."""

R = TypeVar("R", TaskStatus, ClientStatus)


@dataclass(frozen=True)
class StatusAt:
    """Status of a dispatcher, and when it was received.

    Attributes:
        status: The status.
        taken_at: Time in seconds of a monotonic clock.
    """

    status: DispatcherStatus
    taken_at: float


@dataclass
class EpochObservation:
    """First and last status in which an epoch was active.

    Attributes:
        job: The job, as in the last status.
        iteration: The epoch, as in the last status.
        before: First status with the epoch.
        after: Last status with the epoch, the first one if there is no other.
    """

    job: JobStatus
    iteration: IterationStatus
    before: StatusAt
    after: StatusAt = field(init=False)

    def __post_init__(self) -> None:
        self.after = self.before

    @property
    def seconds(self) -> float:
        """Seconds between both statuses."""
        return self.after.taken_at - self.before.taken_at


def observe(
    observations: dict[int, EpochObservation],
    found: StatusAt,
    is_wanted: Callable[[JobStatus], bool],
) -> None:
    """Add a status to the observations of active epochs, by iteration id."""
    for job in filter(is_wanted, found.status.jobs):
        for iteration in job.iterations:
            if iteration.finished:
                continue
            known = observations.setdefault(
                iteration.iteration_id, EpochObservation(job, iteration, found)
            )
            known.job, known.iteration, known.after = job, iteration, found


def measure_epoch(observed: EpochObservation) -> PipelineMeasurement:
    """Return the rates of an epoch between two statuses.

    A counter is divided by the time between the reports that contained it, not between the
    statuses. Where there were no two reports, or the dispatcher does not tell their times, the
    averages of the dispatcher are used.
    """
    now = observed.iteration
    before = _find_iteration(observed.before.status, now.iteration_id) or now
    reports = _Reports(observed.before.taken_at, observed.after.taken_at)
    tasks = [reports.task(task, _find_task(before, task)) for task in now.tasks]
    workers = _find_workers(observed, now)
    uses = [reports.worker(*each) for each in workers]
    rate = sum(each.rate for each in tasks)
    clients = [reports.client(client, _find_client(before, client)) for client in now.clients]
    return PipelineMeasurement(
        elements_per_second=rate,
        num_tasks=len(now.tasks),
        steps=_step_costs(before, now),
        num_clients=len(now.clients),
        client_wait=_mean([each.wait for each in clients]),
        task_client_wait=_mean([each.wait for each in tasks]),
        task_split_wait=_mean([each.split_wait for each in tasks]),
        client_capacity=_client_capacity(clients),
        bytes_per_element=_ratio(now.bytes - before.bytes, now.elements - before.elements)
        or _ratio(now.bytes, now.elements)
        or 0.0,
        cores=_count_cores(each for each, _ in workers),
        idle_cores=_idle_cores(uses),
        cpu_seconds=_cpu_seconds(uses, rate),
        has_splits=now.num_splits is not None,
        is_ending=now.splits_unassigned == 0,
    )


@dataclass(frozen=True)
class _Rate:
    """Elements per second, and fractions of the time waited."""

    rate: float
    wait: float
    split_wait: float = 0.0


@dataclass(frozen=True)
class _ProcessorUse:
    """Processor use of a worker.

    Attributes:
        host: Its machine.
        cores: Cores that it may use.
        busy: Cores that it used; None if unknown, or if it includes other tasks.
        machine_busy: Cores that all programs used; None if unknown.
    """

    host: str
    cores: float
    busy: float | None
    machine_busy: float | None


@dataclass(frozen=True)
class _Reports:
    """Times of two statuses; converts counters in them to rates."""

    before: float
    after: float

    def seconds(self, now: R, before: R | None) -> float:
        """Return the seconds between the reports of two records; 0.0 if too few."""
        if (
            before is None
            or now.seconds_since_report is None
            or before.seconds_since_report is None
        ):
            return 0.0
        seconds = (self.after - now.seconds_since_report) - (
            self.before - before.seconds_since_report
        )
        return seconds if seconds >= _MIN_SECONDS else 0.0

    def task(self, now: TaskStatus, before: TaskStatus | None) -> _Rate:
        """Return the rate of a task."""
        seconds = self.seconds(now, before)
        if not seconds or before is None:
            return _Rate(now.elements_per_second, now.client_wait_ratio, now.split_wait_ratio)
        return _Rate(
            max(0, now.elements - before.elements) / seconds,
            _fraction(now.client_wait_seconds - before.client_wait_seconds, seconds),
            _fraction(now.split_wait_seconds - before.split_wait_seconds, seconds),
        )

    def worker(self, now: WorkerStatus, before: WorkerStatus | None) -> _ProcessorUse:
        """Return the processor use of a worker; its heartbeats report it."""
        busy: float | None = now.busy_cores
        machine_busy = None
        if before is not None:
            seconds = (self.after - now.seconds_since_heartbeat) - (
                self.before - before.seconds_since_heartbeat
            )
            if before.cores and seconds >= _MIN_SECONDS:
                busy = max(0.0, now.cpu_seconds - before.cpu_seconds) / seconds
                if before.machine_cpu_seconds:
                    machine = now.machine_cpu_seconds - before.machine_cpu_seconds
                    machine_busy = max(0.0, machine) / seconds
        if not now.cores or now.tasks > 1:
            busy = None
        return _ProcessorUse(_host(now), now.cores, busy, machine_busy)

    def client(self, now: ClientStatus, before: ClientStatus | None) -> _Rate:
        """Return the rate of a client."""
        seconds = self.seconds(now, before)
        if not seconds or before is None:
            return _Rate(now.elements_per_second, now.wait_ratio)
        return _Rate(
            max(0, now.elements - before.elements) / seconds,
            _fraction(now.wait_seconds - before.wait_seconds, seconds),
        )


def _step_costs(before: IterationStatus, now: IterationStatus) -> tuple[StepCost, ...]:
    """Return the costs of the steps by decreasing time.

    Seconds and elements arrive in the same heartbeats, so their ratio needs no time.
    """
    earlier = {each.step: each.seconds for each in before.steps}
    elements = now.elements - before.elements
    if elements <= 0:
        earlier, elements = {}, now.elements
    if elements <= 0:
        return ()
    costs = [
        StepCost(
            name=each.step,
            seconds=max(0.0, each.seconds - earlier.get(each.step, 0.0)) / elements,
            position=each.position,
            threads=each.threads,
        )
        for each in now.steps
    ]
    return tuple(sorted(costs, key=lambda each: -each.seconds))


def _client_capacity(clients: Sequence[_Rate]) -> float | None:
    capacity = sum(each.rate / max(_MIN_BUSY_SHARE, 1.0 - each.wait) for each in clients)
    return capacity or None


def _find_workers(
    observed: EpochObservation, now: IterationStatus
) -> list[tuple[WorkerStatus, WorkerStatus | None]]:
    """Return the workers of the tasks, as in the last and as in the first status."""
    addresses = {each.worker_address for each in now.tasks}
    earlier = {each.worker_id: each for each in observed.before.status.workers}
    return [
        (each, earlier.get(each.worker_id))
        for each in observed.after.status.workers
        if each.address in addresses
    ]


def _host(worker: WorkerStatus) -> str:
    return worker.address.rpartition(":")[0]


def _count_cores(workers: Iterable[WorkerStatus]) -> float:
    """Return the cores of the workers' machines, each counted once; 0.0 if unknown."""
    by_host: dict[str, float] = {}
    for worker in workers:
        by_host[_host(worker)] = max(by_host.get(_host(worker), 0.0), worker.cores)
    return 0.0 if 0.0 in by_host.values() else sum(by_host.values())


def _idle_cores(uses: Sequence[_ProcessorUse]) -> float | None:
    """Return the idle cores of the workers' machines, each counted once; None if unknown."""
    by_host: dict[str, float] = {}
    for use in uses:
        if use.machine_busy is None:
            return None
        by_host[use.host] = max(0.0, use.cores - use.machine_busy)
    return sum(by_host.values()) if by_host else None


def _cpu_seconds(uses: Sequence[_ProcessorUse], rate: float) -> float | None:
    """Return the workers' processor time per element; None if unknown."""
    busy = [each.busy for each in uses if each.busy is not None]
    return _ratio(sum(busy), rate) if busy and len(busy) == len(uses) else None


def _find_iteration(status: DispatcherStatus, iteration_id: int) -> IterationStatus | None:
    found = (each for job in status.jobs for each in job.iterations)
    return next((each for each in found if each.iteration_id == iteration_id), None)


def _find_task(iteration: IterationStatus, task: TaskStatus) -> TaskStatus | None:
    return next((each for each in iteration.tasks if each.task_id == task.task_id), None)


def _find_client(iteration: IterationStatus, client: ClientStatus) -> ClientStatus | None:
    return next((each for each in iteration.clients if each.client_id == client.client_id), None)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _fraction(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def _ratio(amount: float, elements: float) -> float | None:
    ratio = amount / elements if elements > 0 else math.nan
    return ratio if math.isfinite(ratio) else None
