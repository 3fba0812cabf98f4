"""A status as the JSON that the page shows, and the measurements for its charts.

The words for states, waits and bottlenecks are those of `headrace top`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from headrace.cli.coordinator_frame import measure_server
from headrace.cli.dispatcher_frame import (
    find_bottleneck,
    find_save_bottleneck,
    short_client_name,
)
from headrace.cli.formatting import version_mismatches
from headrace.cli.status_client import ServerSnapshot, StatusSnapshot
from headrace.coordinator.status import CoordinatorStatus, TrainingWorkerStatus
from headrace.parameter_server.messages import ServerStatus
from headrace.service.config import ShardingPolicy
from headrace.service.messages import (
    ClientStatus,
    DispatcherStatus,
    IterationStatus,
    JobStatus,
    TaskStatus,
    WorkerStatus,
)

__all__ = ["View", "describe_snapshot", "measure_snapshot"]

View: TypeAlias = dict[str, Any]
"""JSON object."""

_MAX_FINISHED = 3
"""Maximum number of finished epochs of a job that are shown."""
_MAX_ROWS = 5000
"""Number of tasks and clients of all epochs from which on only some of each epoch are shown."""
_MIN_ROWS = 20
"""Number of tasks, and of clients, that are shown of each epoch in any case."""


def describe_snapshot(snapshot: StatusSnapshot, previous: StatusSnapshot | None) -> View:
    """Return what the page shows of a server.

    Args:
        snapshot: Latest status.
        previous: Earlier status, for the rates of parameter servers; None without one.
    """
    match snapshot.status:
        case DispatcherStatus() as status:
            return _dispatcher(status)
        case CoordinatorStatus() as status:
            return _coordinator(status, snapshot, previous)
        case status:
            return _single_server(status, snapshot, previous)


def measure_snapshot(view: View) -> dict[str, float]:
    """Return the measurements of a view for the charts, by name."""
    return _MEASUREMENTS[view["kind"]](view)


# --- Dispatcher -----------------------------------------------------------------------------------


def _dispatcher(status: DispatcherStatus) -> View:
    limit = _row_limit(status)
    return {
        "kind": "dispatcher",
        "uptime": status.uptime_seconds,
        "versions": str(status.versions),
        "mismatches": list(version_mismatches(status.versions, status.workers)),
        "id": status.dispatcher_id,
        "clients": status.clients,
        "datasets": status.datasets,
        "plan_bytes": status.plan_bytes,
        "elements": status.elements,
        "bytes": status.bytes,
        "slots": status.slots,
        "occupied_slots": status.occupied_slots,
        "refused": status.refused_connections,
        "num_lost": status.workers_lost,
        "lost": [
            {"address": each.address, "reason": each.reason, "seconds_ago": each.seconds_ago}
            for each in status.recently_lost_workers
        ],
        "wanted_workers": status.wanted_workers,
        "workers": [_worker(each) for each in status.workers],
        "jobs": [_job(each, limit) for each in status.jobs],
    }


def _row_limit(status: DispatcherStatus) -> int | None:
    """Return how many tasks, and how many clients, of each epoch are shown; None for all.

    With 1,000 workers and 200 jobs, all of them would be 30 MB with each update.
    """
    epochs = [epoch for job in status.jobs for epoch in job.iterations]
    rows = sum(len(each.tasks) + len(each.clients) for each in epochs)
    return None if rows <= _MAX_ROWS else max(_MIN_ROWS, _MAX_ROWS // (2 * len(epochs)))


def _worker(worker: WorkerStatus) -> View:
    return {
        "id": worker.worker_id,
        "address": worker.address,
        "state": "draining" if worker.draining else "running",
        "tasks": worker.tasks,
        "elements": worker.elements_per_second,
        "bytes": worker.bytes_per_second,
        "buffered": worker.buffered_batches,
        "buffered_bytes": worker.buffered_bytes,
        "heartbeat": worker.seconds_since_heartbeat,
        "tags": ", ".join(worker.tags),
    }


def _job(job: JobStatus, limit: int | None) -> View:
    finished = [each for each in job.iterations if each.finished][-_MAX_FINISHED:]
    active = [each for each in job.iterations if not each.finished]
    mode = ShardingPolicy(job.processing_mode).name
    if job.ordered:
        mode = f"{mode}, ordered"
    if job.num_consumers is not None:
        mode = f"{mode}, {job.num_consumers} consumers (remainder: {job.remainder})"
    return {
        "id": job.job_id,
        "name": job.name,
        "path": job.path,
        "dataset": job.dataset_id,
        "mode": mode,
        "num_epochs": job.num_epochs,
        "clients": job.clients,
        "tasks": job.running_tasks,
        "elements": job.elements,
        "bytes": job.bytes,
        "wait_seconds": job.wait_seconds,
        "epochs": [_epoch(each, limit, is_save=bool(job.path)) for each in [*finished, *active]],
    }


def _epoch(epoch: IterationStatus, limit: int | None, *, is_save: bool) -> View:
    bound = find_save_bottleneck(epoch) if is_save else find_bottleneck(epoch)
    clients: Sequence[ClientStatus] = epoch.clients
    tasks: Sequence[TaskStatus] = epoch.tasks
    if limit is not None:
        clients = sorted(clients, key=lambda each: each.wait_ratio, reverse=True)[:limit]
        tasks = sorted(tasks, key=lambda each: each.elements_per_second)[:limit]
    return {
        "id": epoch.iteration_id,
        "name": ".".join(map(str, epoch.epoch)),
        "finished": epoch.finished,
        "elapsed": epoch.elapsed_seconds,
        "progress": epoch.progress,
        "remaining": epoch.remaining_seconds,
        "num_splits": epoch.num_splits,
        "assigned": epoch.splits_assigned,
        "in_progress": epoch.splits_in_progress,
        "unassigned": epoch.splits_unassigned,
        "abandoned": epoch.splits_abandoned,
        "elements": epoch.elements,
        "bytes": epoch.bytes,
        "elements_per_second": epoch.elements_per_second,
        "bytes_per_second": epoch.bytes_per_second,
        "failure": epoch.failure_reason,
        "client_wait": _mean([each.wait_ratio for each in epoch.clients]),
        "task_client_wait": _mean([each.client_wait_ratio for each in epoch.tasks]),
        "task_split_wait": _mean([each.split_wait_ratio for each in epoch.tasks]),
        "bound_by": None if bound is None else bound.location,
        "advice": "" if bound is None else bound.advice,
        "num_clients": len(epoch.clients),
        "clients": [
            {
                "id": each.client_id,
                "name": short_client_name(each.client_id),
                "wait": each.wait_ratio,
                "wait_seconds": each.wait_seconds,
                "elements": each.elements_per_second,
                "total": each.elements,
                "buffered": each.buffered_batches,
                "heartbeat": each.seconds_since_heartbeat,
            }
            for each in clients
        ],
        "num_tasks": len(epoch.tasks),
        "tasks": [_task(each) for each in tasks],
        "steps": [
            {"name": each.step, "seconds": each.seconds, "threads": each.busy_threads}
            for each in epoch.steps
        ],
    }


_WAITS = {"": "nothing", "clients": "clients", "units": "splits"}
"""What a task waits for, as users know it."""


def _task(task: TaskStatus) -> View:
    return {
        "id": task.task_id,
        "worker": task.worker_address,
        "waiting_for": _WAITS.get(task.waiting_for, task.waiting_for),
        "client_wait": task.client_wait_ratio,
        "split_wait": task.split_wait_ratio,
        "elements": task.elements_per_second,
        "splits": task.splits_held,
        "buffered": task.buffered_batches,
        "lag": max((each.lag for each in task.trainers), default=None),
    }


def _measure_dispatcher(view: View) -> dict[str, float]:
    values = {"elements": 0.0, "bytes": 0.0, "workers": float(len(view["workers"]))}
    waiting, num_clients = 0.0, 0
    for job in view["jobs"]:
        active = [each for each in job["epochs"] if not each["finished"]]
        values["elements"] += sum(each["elements_per_second"] for each in active)
        values["bytes"] += sum(each["bytes_per_second"] for each in active)
        for each in active:
            waiting += (each["client_wait"] or 0.0) * each["num_clients"]
            num_clients += each["num_clients"]
    if num_clients:
        values["wait"] = waiting / num_clients
    return values


# --- Coordinator and parameter servers ------------------------------------------------------------


def _coordinator(
    status: CoordinatorStatus, snapshot: StatusSnapshot, previous: StatusSnapshot | None
) -> View:
    longest = status.longest_running
    before = {} if previous is None else {each.address: each.status for each in previous.servers}
    return {
        "kind": "coordinator",
        "uptime": status.uptime_seconds,
        "versions": str(status.versions),
        "mismatches": list(version_mismatches(status.versions, status.workers)),
        "queued": status.num_waiting,
        "in_flight": status.num_in_flight,
        "unfinished": status.num_unfinished,
        "finished": status.num_finished,
        "per_second": status.finished_per_second,
        "returned": status.num_returned,
        "total_seconds": status.total_seconds,
        "retried": status.num_retried,
        "failed": status.num_failed,
        "num_lost": status.num_workers_lost,
        "gap": status.staleness_gap,
        "max_gap": status.max_staleness_gap,
        "staleness": status.staleness,
        "failure": status.failure,
        "longest": None
        if longest is None
        else {
            "name": longest.name,
            "worker": longest.worker,
            "seconds": longest.seconds,
            "median": longest.median_seconds,
        },
        "workers": [_training_worker(each) for each in status.workers],
        "servers": [
            _server(each, before.get(each.address), _interval(snapshot, previous))
            for each in snapshot.servers
        ],
    }


def _training_worker(worker: TrainingWorkerStatus) -> View:
    state = "connected" if worker.is_connected else "missing"
    return {
        "number": worker.worker,
        "address": worker.address,
        "state": "draining" if worker.is_draining else state,
        "reason": "" if worker.is_connected else worker.reason or "not connected yet",
        "seconds_in_state": worker.seconds_in_state,
        "in_flight": worker.num_in_flight,
        "running": [{"name": name, "seconds": seconds} for name, seconds in worker.running],
        "finished": worker.num_finished,
        "losses": worker.num_losses,
    }


def _server(each: ServerSnapshot, before: ServerStatus | None, interval: float | None) -> View:
    status = each.status
    if status is None:
        return {"address": each.address, "state": "no reply", "problem": each.problem}
    rates = measure_server(status, before, interval)
    roles = sorted(set(status.replicas.values()))
    return {
        "address": each.address,
        "state": "running",
        "problem": "",
        "index": status.index,
        "roles": ", ".join(roles),
        "uptime": status.uptime_seconds,
        "requests": rates.requests,
        "in": rates.bytes_in,
        "out": rates.bytes_out,
        "busy": rates.busy,
        "waiting": status.waiting_requests,
        "total": status.requests,
        "failed": status.failed,
        "shards": status.shards,
        "tables": status.tables,
        "rows": status.rows,
        "stored": status.bytes_stored,
    }


def _single_server(
    status: ServerStatus, snapshot: StatusSnapshot, previous: StatusSnapshot | None
) -> View:
    before = None if previous is None else previous.status
    return {
        "kind": "server",
        "uptime": status.uptime_seconds,
        "versions": str(status.versions),
        "mismatches": [],
        "operations": [{"name": name, "count": count} for name, count in status.operations.items()],
        "servers": [
            _server(
                ServerSnapshot("", status),
                before if isinstance(before, ServerStatus) else None,
                _interval(snapshot, previous),
            )
        ],
    }


def _interval(snapshot: StatusSnapshot, previous: StatusSnapshot | None) -> float | None:
    return None if previous is None else snapshot.taken_at - previous.taken_at


def _measure_servers(view: View) -> dict[str, float]:
    servers = [each for each in view["servers"] if each["state"] == "running"]
    if not servers:
        return {}
    return {
        "requests": sum(each["requests"] for each in servers),
        "in": sum(each["in"] for each in servers),
        "out": sum(each["out"] for each in servers),
        "busy": fmean(each["busy"] for each in servers),
        "stored": float(sum(each["stored"] for each in servers)),
    }


def _measure_coordinator(view: View) -> dict[str, float]:
    return {
        "functions": view["per_second"],
        "queued": float(view["queued"]),
        "in_flight": float(view["in_flight"]),
        "gap": float(view["gap"]),
        "workers": float(sum(each["state"] != "missing" for each in view["workers"])),
        **_measure_servers(view),
    }


_MEASUREMENTS: Mapping[str, Callable[[View], dict[str, float]]] = {
    "dispatcher": _measure_dispatcher,
    "coordinator": _measure_coordinator,
    "server": _measure_servers,
}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
