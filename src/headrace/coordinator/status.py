"""Status of a coordinator: for `headrace status`, and for log messages of long waits."""

from __future__ import annotations

import msgspec

from headrace.coordinator.coordinator_core import CoordinatorCore
from headrace.serving.rpc import Message, TypedRequest
from headrace.versions import Versions, own_versions

__all__ = [
    "CoordinatorStatus",
    "GetCoordinatorStatus",
    "RunningFunction",
    "TrainingWorkerStatus",
    "coordinator_status",
    "stall_report",
]


_MAX_LISTED = 10


class TrainingWorkerStatus(Message, frozen=True):
    """Status of one worker.

    Attributes:
        worker: Number of the worker.
        address: Address at which it listens.
        is_connected: Whether it is connected.
        seconds_in_state: Seconds since it was connected or lost.
        reason: Reason why it is not connected.
        num_in_flight: Number of functions assigned to it.
        running: Running functions and their run time in seconds.
        num_finished: Number of functions whose result or error it has returned.
        num_losses: Number of times it was lost.
        is_draining: Whether it is being removed and gets no new functions.
        versions: Versions of its process, if it was ever connected.
    """

    worker: int
    address: str
    is_connected: bool
    seconds_in_state: float
    reason: str = ""
    num_in_flight: int = 0
    running: tuple[tuple[str, float], ...] = ()
    num_finished: int = 0
    num_losses: int = 0
    is_draining: bool = False
    versions: Versions = Versions()


class RunningFunction(Message, frozen=True):
    """Running function.

    Attributes:
        name: Name of the function.
        worker: Number of the worker.
        seconds: Run time so far.
        median_seconds: Median run time; None after too few calls.
    """

    name: str
    worker: int
    seconds: float
    median_seconds: float | None = None


class CoordinatorStatus(Message, frozen=True):
    """Status of a coordinator.

    Attributes:
        num_waiting: Number of functions not assigned to a worker.
        num_unfinished: Number of functions that are not done.
        num_finished: Number of functions that are done.
        staleness_gap: Distance between the newest function sent and the oldest one that has not
            ended.
        failure: Error to be raised; empty if there is none.
        workers: Workers by ascending number.
        uptime_seconds: Seconds since the coordinator started.
        num_in_flight: Number of functions assigned to workers.
        finished_per_second: Average over about the last ten seconds.
        num_returned: Number of calls that have returned or raised.
        num_failed: Number of calls that raised.
        total_seconds: Total run time of all calls.
        num_retried: Number of calls reassigned from lost workers.
        num_workers_lost: Number of worker losses.
        max_staleness_gap: Maximum of `staleness_gap` so far.
        staleness: Staleness bound; None without a bound.
        longest_running: Function with the longest current run time; None if none runs.
        servers: Addresses of the parameter servers.
        versions: Versions of the coordinator's process.
    """

    num_waiting: int
    num_unfinished: int
    num_finished: int
    staleness_gap: int
    failure: str = ""
    workers: tuple[TrainingWorkerStatus, ...] = ()
    uptime_seconds: float = 0.0
    num_in_flight: int = 0
    finished_per_second: float = 0.0
    num_returned: int = 0
    num_failed: int = 0
    total_seconds: float = 0.0
    num_retried: int = 0
    num_workers_lost: int = 0
    max_staleness_gap: int = 0
    staleness: int | None = None
    longest_running: RunningFunction | None = None
    servers: tuple[str, ...] = ()
    versions: Versions = msgspec.field(default_factory=own_versions)


class GetCoordinatorStatus(TypedRequest[CoordinatorStatus], frozen=True):
    """Request for the coordinator's status."""


def coordinator_status(
    core: CoordinatorCore, now: float, staleness: int | None = None
) -> CoordinatorStatus:
    """Return the status of a coordinator with the given staleness bound (None without one)."""
    queue, stats = core.queue, core.stats
    loads = {load.worker: load for load in queue.worker_pool}
    workers: list[TrainingWorkerStatus] = []
    running: list[RunningFunction] = []
    for number, connection in sorted(core.connections.items()):
        load = loads.get(number)
        running_closures = [] if load is None else load.running_closures()
        durations = [
            (closure.name, now - closure.started_at)
            for closure in running_closures
            if closure.started_at is not None
        ]
        running += [RunningFunction(name=name, worker=number, seconds=s) for name, s in durations]
        workers.append(
            TrainingWorkerStatus(
                worker=number,
                address=connection.address,
                is_connected=connection.is_connected,
                seconds_in_state=now - connection.state_since,
                reason=connection.reason,
                num_in_flight=0 if load is None else len(load.in_flight),
                running=tuple(durations[:_MAX_LISTED]),
                num_finished=connection.num_finished,
                num_losses=connection.num_losses,
                is_draining=connection.is_draining,
                versions=connection.versions or Versions(),
            )
        )
    sent = [number for load in loads.values() for number in load.in_flight]
    return CoordinatorStatus(
        num_waiting=queue.num_waiting,
        num_unfinished=len(queue.unfinished),
        num_finished=queue.num_finished,
        staleness_gap=max(0, stats.newest_number - queue.first_unended),
        failure="" if queue.failure is None else str(queue.failure.error),
        workers=tuple(workers),
        uptime_seconds=stats.uptime(now),
        num_in_flight=sum(number > 0 for number in sent),
        finished_per_second=stats.rate(now),
        num_returned=stats.num_returned,
        num_failed=stats.num_failed,
        total_seconds=stats.total_seconds,
        num_retried=stats.num_retried,
        num_workers_lost=stats.num_workers_lost,
        max_staleness_gap=stats.max_staleness_gap,
        staleness=staleness,
        longest_running=_longest_running(core, running),
        servers=core.session_request.servers,
    )


def _longest_running(
    core: CoordinatorCore, running: list[RunningFunction]
) -> RunningFunction | None:
    if not running:
        return None
    found = max(running, key=lambda each: each.seconds)
    return msgspec.structs.replace(found, median_seconds=core.stats.median_seconds(found.name))


_MAX_LOGGED = 5


def stall_report(core: CoordinatorCore, now: float) -> str:
    """Describe running functions, unavailable workers and the number of waiting functions."""
    parts: list[str] = []
    running = [
        (now - closure.started_at, closure.name, load.worker)
        for load in core.queue.worker_pool
        for closure in load.running_closures()
        if closure.started_at is not None
    ]
    running.sort(key=lambda each: -each[0])
    for seconds, name, worker in running[:_MAX_LOGGED]:
        address = core.connections[worker].address
        parts.append(f"{name} has been running on worker {worker} ({address}) for {seconds:.0f} s")
    if len(running) > _MAX_LOGGED:
        parts.append(f"{len(running) - _MAX_LOGGED} more functions are running")
    parts += [each.describe(now) for each in core.connections.values() if not each.is_connected]
    if not core.connections:
        parts.append("no workers; add one with add_worker()")
    if core.queue.num_waiting:
        parts.append(f"{core.queue.num_waiting} functions waiting for a worker")
    return "; ".join(parts) or "all functions have just ended"
