"""One frame of `headrace top` for a dispatcher, as text, with the bottleneck of an epoch.

clients wait | tasks wait for clients | bottleneck
-------------+------------------------+------------------------------------------------
yes          | no                     | the workers, or there is nothing to read
no           | yes                    | the clients
yes          | yes                    | the connection between them
no           | no                     | none: both have what they need
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from headrace.cli.formatting import (
    density_bar,
    fit_lines,
    format_bytes,
    format_duration,
    format_number,
    format_rate,
    format_table,
    format_trend,
    pluralize,
    version_mismatches,
)
from headrace.execution.bottleneck import WAITING_SHARE, Bottleneck
from headrace.service.config import ShardingPolicy
from headrace.service.messages import (
    ClientStatus,
    DispatcherStatus,
    IterationStatus,
    JobStatus,
    WorkerStatus,
)

__all__ = [
    "Bottleneck",
    "find_bottleneck",
    "find_save_bottleneck",
    "format_wanted",
    "render_dispatcher",
    "short_client_name",
]


# A wait does not count below this fraction of the time; nor does a wait half as long as that of the
# other side.
_WAITING_SHARE = WAITING_SHARE
_MIN_SECONDS = 3.0
"""Minimum seconds of measurements for a result."""


def find_bottleneck(reading: IterationStatus) -> Bottleneck | None:
    """Return the bottleneck of an epoch; None if it has finished, or was measured too briefly."""
    if reading.finished:
        return None
    if not reading.tasks:
        return Bottleneck(
            "missing workers", "no worker runs a task of this job; start one, or wait for one"
        )
    if not reading.clients:
        return Bottleneck("missing clients", "tasks are idle until a client reconnects")
    if reading.elapsed_seconds < _MIN_SECONDS:
        return None
    clients_wait = _mean([each.wait_ratio for each in reading.clients])
    tasks_wait = _mean([each.client_wait_ratio for each in reading.tasks])
    clients = clients_wait >= max(_WAITING_SHARE, tasks_wait / 2)
    tasks = tasks_wait >= max(_WAITING_SHARE, clients_wait / 2)
    if clients and tasks:
        return Bottleneck(
            "the connection between workers and clients",
            "both wait: check the network, move workers closer, or raise max_outstanding_requests",
        )
    if tasks:
        return Bottleneck(
            "the clients", "workers wait for them: training is slower, and fewer workers suffice"
        )
    if clients:
        return _find_starvation(reading)
    return Bottleneck("nothing", "")


def find_save_bottleneck(saving: IterationStatus) -> Bottleneck | None:
    """Return the bottleneck of a save; None if it has finished, or has just started."""
    if saving.finished:
        return None
    if not saving.tasks:
        return Bottleneck("missing workers", "no worker writes files; start one, or wait for one")
    if saving.elapsed_seconds < _MIN_SECONDS:
        return None
    if _mean([each.client_wait_ratio for each in saving.tasks]) >= _WAITING_SHARE:
        return Bottleneck("the dispatcher", "workers wait for it to acknowledge their files")
    return _find_starvation(saving)


def _find_starvation(reading: IterationStatus) -> Bottleneck:
    starved = _mean([each.split_wait_ratio for each in reading.tasks]) >= 0.5
    if starved and reading.splits_unassigned == 0:
        return Bottleneck(
            "the last splits", "all splits are assigned; the epoch ends when they are done"
        )
    if starved:
        return Bottleneck(
            "split assignment",
            "workers wait for splits: make them larger (a batch before distribute, larger files)",
        )
    if not reading.steps:
        return Bottleneck("the workers", "add workers")
    stage = reading.steps[0]
    return Bottleneck(f"{stage.step}, on the workers", "add workers, or make that step faster")


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


_BAR = 24
_MAX_CLIENTS = 3
_MAX_STAGES = 3
_MAX_LOST = 3
_LOST_SECONDS = 600.0
"""Seconds for which a lost worker is shown."""


def render_dispatcher(
    stats: DispatcherStatus, previous: DispatcherStatus | None, width: int
) -> str:
    """Return a status as lines of at most `width` characters.

    Args:
        stats: Status to show.
        previous: Previous status, for trends; None without one.
        width: Width of the terminal.
    """
    before = _rates(previous)
    lines = [*_head(stats)]
    for job in stats.jobs:
        lines += ["", *_job(job, before)]
    if not stats.jobs:
        lines += ["", "no jobs"]
    lines += ["", *_workers(stats)]
    return fit_lines(lines, width)


def format_wanted(status: DispatcherStatus) -> str:
    """Return " (3 wanted)" if the jobs need another number of workers than there are, or ""."""
    if status.wanted_workers in (0, len(status.workers)):
        return ""
    return f" ({status.wanted_workers} wanted)"


def _head(stats: DispatcherStatus) -> Iterator[str]:
    parts = [
        pluralize(len(stats.workers), "worker"),
        pluralize(stats.clients, "client"),
        pluralize(len(stats.jobs), "job"),
        f"{pluralize(stats.datasets, 'dataset')} ({format_bytes(stats.plan_bytes)})",
        f"up {format_duration(stats.uptime_seconds)}",
    ]
    parts[0] += format_wanted(stats)
    if stats.slots:
        parts.insert(1, f"{stats.occupied_slots} of {pluralize(stats.slots, 'slot')} occupied")
    if stats.refused_connections:
        parts.append(f"{pluralize(stats.refused_connections, 'peer')} refused")
    if stats.workers_lost:
        parts.append(f"{pluralize(stats.workers_lost, 'worker')} lost")
    yield "  ".join(parts)
    yield from version_mismatches(stats.versions, stats.workers)
    recent = [each for each in stats.recently_lost_workers if each.seconds_ago < _LOST_SECONDS]
    for lost in recent[:_MAX_LOST]:
        yield f"lost {format_duration(lost.seconds_ago)} ago: {lost.address}: {lost.reason}"


def _job(job: JobStatus, before: dict[int, float]) -> Iterator[str]:
    if job.path:
        files = f"{format_number(job.elements)} elements, {format_bytes(job.bytes)} written"
        yield f"save into {job.path}  dataset {job.dataset_id}  {files}"
    else:
        name = job.name or "(anonymous)"
        mode = ShardingPolicy(job.processing_mode).name
        if job.ordered:
            mode += ", ordered"
        if job.num_consumers is not None:
            mode += f", {pluralize(job.num_consumers, 'consumer')} (remainder: {job.remainder})"
        epochs = pluralize(job.num_epochs, "epoch")
        yield f"job {name}  {mode}  dataset {job.dataset_id}  {epochs}"
    active = [each for each in job.iterations if not each.finished]
    for each in active:
        yield from _epoch(each, before.get(each.iteration_id), is_save=bool(job.path))
    if not active:
        yield "  no active epoch"


def _epoch(reading: IterationStatus, before: float | None, *, is_save: bool) -> Iterator[str]:
    title = f"epoch {'.'.join(map(str, reading.epoch))}" if reading.epoch else "epoch"
    speed = reading.elements_per_second
    rate = format_rate(speed) + format_trend(speed, before)
    parts = [_bar(reading.progress), rate, f"{format_bytes(reading.bytes_per_second)}/s"]
    if reading.remaining_seconds is not None:
        parts.append(f"{format_duration(reading.remaining_seconds)} left")
    yield f"  {title}  {'  '.join(parts)}"
    if len(reading.history) > 1:
        yield (
            f"    rate      {density_bar(reading.history)} maximum "
            f"{format_rate(max(reading.history))}"
        )
    if reading.num_splits is not None:
        total = (
            "of infinitely many"
            if reading.num_splits < 0
            else f"of {format_number(reading.num_splits)}"
        )
        in_progress = format_number(reading.splits_in_progress)
        splits = (
            f"{format_number(reading.splits_assigned)} {total} assigned, {in_progress} in progress"
        )
        if reading.splits_unassigned is not None:
            splits += f", {format_number(reading.splits_unassigned)} remaining"
        if reading.splits_abandoned:
            splits += f", {format_number(reading.splits_abandoned)} abandoned"
        yield f"    splits    {splits}"
    if not is_save:
        yield f"    clients   {_clients(reading.clients)}"
    yield f"    tasks     {_tasks(reading, 'the dispatcher' if is_save else 'clients')}"
    yield from _trainers(reading)
    if reading.steps:
        steps = [f"{each.step} {each.busy_threads:.1f}" for each in reading.steps[:_MAX_STAGES]]
        yield f"    threads   {', '.join(steps)}"
    bound = find_save_bottleneck(reading) if is_save else find_bottleneck(reading)
    if bound is not None:
        yield f"    bound by  {bound.location}{f': {bound.advice}' if bound.advice else ''}"


def _bar(progress: float | None) -> str:
    if progress is None:
        return f"[{'?' * _BAR}]"
    full = int(progress * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {progress:4.0%}"


def _clients(clients: Sequence[ClientStatus]) -> str:
    if not clients:
        return "none"
    by_wait = sorted(clients, key=lambda each: -each.wait_ratio)
    shown = [
        f"{short_client_name(each.client_id)} {each.wait_ratio:.0%}"
        for each in by_wait[:_MAX_CLIENTS]
    ]
    more = f" and {len(by_wait) - _MAX_CLIENTS} more" if len(by_wait) > _MAX_CLIENTS else ""
    return f"{len(clients)}; time spent waiting for elements: {', '.join(shown)}{more}"


def _tasks(reading: IterationStatus, consumers: str) -> str:
    if not reading.tasks:
        return "none"
    count = len(reading.tasks)
    for_clients = sum(each.client_wait_ratio for each in reading.tasks) / count
    for_splits = sum(each.split_wait_ratio for each in reading.tasks) / count
    return (
        f"{count}; time spent waiting for {consumers} {for_clients:.0%}, "
        f"for splits {for_splits:.0%}"
    )


def _trainers(reading: IterationStatus) -> Iterator[str]:
    """Yield the progress of each trainer that shares the epoch with others."""
    totals: dict[str, tuple[int, int]] = {}
    for task in reading.tasks:
        for each in task.trainers:
            lag, skipped = totals.get(each.trainer_id, (0, 0))
            totals[each.trainer_id] = (lag + each.lag, skipped + each.skipped)
    if not totals:
        return
    by_lag = sorted(totals.items(), key=lambda item: -item[1][0])
    parts = [
        f"{name} {format_number(lag)}" + (f" ({format_number(skipped)} skipped)" if skipped else "")
        for name, (lag, skipped) in by_lag[:_MAX_CLIENTS]
    ]
    more = f" and {len(by_lag) - _MAX_CLIENTS} more" if len(by_lag) > _MAX_CLIENTS else ""
    yield f"    trainers  {len(by_lag)}; elements behind: {', '.join(parts)}{more}"


def _workers(stats: DispatcherStatus) -> Iterator[str]:
    if not stats.workers:
        yield "no worker is registered; start one with `headrace worker --dispatcher HOST:PORT`"
        return
    head = ("worker", "tasks", "elements", "bytes", "buffered", "last heartbeat")
    yield from format_table([head, *(_worker(each) for each in stats.workers)])


def _worker(worker: WorkerStatus) -> tuple[str, ...]:
    return (
        f"{worker.address} (draining)" if worker.draining else worker.address,
        str(worker.tasks),
        format_rate(worker.elements_per_second),
        f"{format_bytes(worker.bytes_per_second)}/s",
        f"{worker.buffered_batches} ({format_bytes(worker.buffered_bytes)})",
        f"{format_duration(worker.seconds_since_heartbeat)} ago",
    )


def short_client_name(client_id: str) -> str:
    """Return host and process of a client, without the unique suffix."""
    return client_id.rpartition("-")[0] or client_id


def _rates(status: DispatcherStatus | None) -> dict[int, float]:
    if status is None:
        return {}
    return {
        each.iteration_id: each.elements_per_second
        for job in status.jobs
        for each in job.iterations
    }
