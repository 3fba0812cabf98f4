"""One frame of `headrace top` on a dispatcher, as text, with what bounds an epoch.

clients wait | tasks wait for clients | what bounds it
-------------+------------------------+------------------------------------------------
yes          | no                     | the workers, or that there is nothing to read
no           | yes                    | the clients
yes          | yes                    | the connection between them
no           | no                     | nothing: both have what they need
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from headrace.cli.tables import (
    bytes_of,
    duration,
    fitted,
    letters,
    number,
    other_versions,
    plural,
    rate,
    table,
    trend,
)
from headrace.service.config import ShardingPolicy
from headrace.service.messages import (
    ClientStatus,
    DispatcherStatus,
    IterationStatus,
    JobStatus,
    WorkerStatus,
)

__all__ = ["Bound", "bound_of", "bound_of_save", "render"]


_WAITS = 0.2
"""Who waits for a part of the time that is less does not wait; nor who waits for half as long as
the others."""
_TOO_SOON = 3.0
"""Seconds in which too little was heard to judge."""


@dataclass(frozen=True)
class Bound:
    """What bounds a pass."""

    by: str
    """A few words, to stand after "bound by"."""
    advice: str
    """What would help; empty where nothing needs to."""


def bound_of(reading: IterationStatus) -> Bound | None:
    """Return what bounds a pass; None: it is over, or too little was heard of it."""
    if reading.finished:
        return None
    if not reading.tasks:
        return Bound("nobody who works", "no worker reads for this job; start one, or wait for it")
    if not reading.clients:
        return Bound("nobody who reads", "its elements wait for a client to come back")
    if reading.elapsed_seconds < _TOO_SOON:
        return None
    clients_wait = _mean([each.wait_ratio for each in reading.clients])
    tasks_wait = _mean([each.client_wait_ratio for each in reading.tasks])
    clients = clients_wait >= max(_WAITS, tasks_wait / 2)
    tasks = tasks_wait >= max(_WAITS, clients_wait / 2)
    if clients and tasks:
        return Bound(
            "the way between workers and clients",
            "both wait: see the network, put workers nearer, or raise max_outstanding_requests",
        )
    if tasks:
        return Bound(
            "the clients", "workers wait for them: training takes the time, and fewer workers do"
        )
    if clients:
        return _short_of_work(reading)
    return Bound("nothing", "")


def bound_of_save(saving: IterationStatus) -> Bound | None:
    """Return what bounds a save, which nobody reads; None: it is over, or began just now."""
    if saving.finished:
        return None
    if not saving.tasks:
        return Bound("nobody who works", "no worker writes its files; start one, or wait for it")
    if saving.elapsed_seconds < _TOO_SOON:
        return None
    if _mean([each.client_wait_ratio for each in saving.tasks]) >= _WAITS:
        return Bound("the dispatcher", "workers wait until it has heard of their files")
    return _short_of_work(saving)


def _short_of_work(reading: IterationStatus) -> Bound:
    starved = _mean([each.split_wait_ratio for each in reading.tasks]) >= 0.5
    if starved and reading.splits_unassigned == 0:
        return Bound("the last units", "all units are dealt; the pass ends when they are done")
    if starved:
        return Bound(
            "the dealing of units",
            "workers wait for units: make them larger (a batch before distribute, larger files)",
        )
    if not reading.steps:
        return Bound("the workers", "add workers")
    stage = reading.steps[0]
    return Bound(f"{stage.step}, on the workers", "add workers, or make that step faster")


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


_BAR = 24
_MOST_CLIENTS = 3
_MOST_STAGES = 3
_MOST_LOST = 3
_LOST_SECONDS = 600.0
"""For how long a lost worker is shown."""


def render(stats: DispatcherStatus, previous: DispatcherStatus | None, width: int) -> str:
    """Return a status as lines of at most `width` letters.

    Args:
        stats: What is shown.
        previous: The status before it, for what rises and falls; None: there is none.
        width: Of the terminal.
    """
    before = _rates(previous)
    lines = [*_head(stats)]
    for job in stats.jobs:
        lines += ["", *_job(job, before)]
    if not stats.jobs:
        lines += ["", "nobody reads: there is no job"]
    lines += ["", *_workers(stats)]
    return fitted(lines, width)


def _head(stats: DispatcherStatus) -> Iterator[str]:
    parts = [
        plural(len(stats.workers), "worker"),
        plural(stats.clients, "client"),
        plural(len(stats.jobs), "job"),
        f"{plural(stats.datasets, 'dataset')} ({bytes_of(stats.plan_bytes)})",
        f"up {duration(stats.uptime_seconds)}",
    ]
    if stats.slots:
        parts.insert(1, f"{stats.occupied_slots} of {plural(stats.slots, 'slot')} held")
    if stats.refused_connections:
        parts.append(f"{plural(stats.refused_connections, 'peer')} refused")
    if stats.workers_lost:
        parts.append(f"{plural(stats.workers_lost, 'worker')} lost")
    yield "  ".join(parts)
    yield from other_versions(stats.versions, stats.workers)
    recent = [each for each in stats.recently_lost_workers if each.seconds_ago < _LOST_SECONDS]
    for lost in recent[:_MOST_LOST]:
        yield f"lost {duration(lost.seconds_ago)} ago: {lost.address}: {lost.reason}"


def _job(job: JobStatus, before: dict[int, float]) -> Iterator[str]:
    if job.path:
        files = f"{number(job.elements)} elements, {bytes_of(job.bytes)} in files"
        yield f"save into {job.path}  dataset {job.dataset_id}  {files}"
    else:
        name = job.name or "of a client's own"
        mode = ShardingPolicy(job.processing_mode).name
        if job.ordered:
            mode += ", in order"
        if job.num_consumers is not None:
            mode += f", {plural(job.num_consumers, 'consumer')} (remainder: {job.remainder})"
        passes = plural(job.num_epochs, "pass", "passes")
        yield f"job {name}  {mode}  dataset {job.dataset_id}  {passes}"
    reading = [each for each in job.iterations if not each.finished]
    for each in reading:
        yield from _pass(each, before.get(each.iteration_id), is_save=bool(job.path))
    if not reading:
        yield "  no pass is being read"


def _pass(reading: IterationStatus, before: float | None, *, is_save: bool) -> Iterator[str]:
    title = f"pass {'.'.join(map(str, reading.epoch))}" if reading.epoch else "pass"
    made = f"{rate(reading.elements_per_second)}{trend(reading.elements_per_second, before)}"
    parts = [_bar(reading.progress), made, f"{bytes_of(reading.bytes_per_second)}/s"]
    if reading.remaining_seconds is not None:
        parts.append(f"{duration(reading.remaining_seconds)} left")
    yield f"  {title}  {'  '.join(parts)}"
    if len(reading.history) > 1:
        yield f"    made      {letters(reading.history)} {rate(max(reading.history))} at most"
    if reading.num_splits is not None:
        total = "without end" if reading.num_splits < 0 else f"of {number(reading.num_splits)}"
        in_progress = number(reading.splits_in_progress)
        units = f"{number(reading.splits_assigned)} dealt {total}, {in_progress} in hand"
        if reading.splits_unassigned is not None:
            units += f", {number(reading.splits_unassigned)} left"
        if reading.splits_abandoned:
            units += f", {number(reading.splits_abandoned)} given up"
        yield f"    units     {units}"
    if not is_save:
        yield f"    clients   {_clients(reading.clients)}"
    yield f"    tasks     {_tasks(reading, 'the dispatcher' if is_save else 'clients')}"
    yield from _trainers(reading)
    if reading.steps:
        steps = [f"{each.step} {each.busy_threads:.1f}" for each in reading.steps[:_MOST_STAGES]]
        yield f"    threads   {', '.join(steps)}"
    bound = bound_of_save(reading) if is_save else bound_of(reading)
    if bound is not None:
        yield f"    bound by  {bound.by}{f': {bound.advice}' if bound.advice else ''}"


def _bar(progress: float | None) -> str:
    if progress is None:
        return f"[{'?' * _BAR}]"
    full = int(progress * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {progress:4.0%}"


def _clients(clients: Sequence[ClientStatus]) -> str:
    if not clients:
        return "none"
    most = sorted(clients, key=lambda each: -each.wait_ratio)
    shown = [f"{_short(each.client_id)} {each.wait_ratio:.0%}" for each in most[:_MOST_CLIENTS]]
    more = f" and {len(most) - _MOST_CLIENTS} more" if len(most) > _MOST_CLIENTS else ""
    return f"{len(clients)}; time spent waiting for elements: {', '.join(shown)}{more}"


def _tasks(reading: IterationStatus, takers: str) -> str:
    if not reading.tasks:
        return "none runs"
    count = len(reading.tasks)
    for_clients = sum(each.client_wait_ratio for each in reading.tasks) / count
    for_units = sum(each.split_wait_ratio for each in reading.tasks) / count
    return f"{count}; time spent waiting for {takers} {for_clients:.0%}, for units {for_units:.0%}"


def _trainers(reading: IterationStatus) -> Iterator[str]:
    """Say how far each trainer is that shares the pass with others."""
    behind: dict[str, tuple[int, int]] = {}
    for task in reading.tasks:
        for each in task.trainers:
            far, skipped = behind.get(each.trainer_id, (0, 0))
            behind[each.trainer_id] = (far + each.lag, skipped + each.skipped)
    if not behind:
        return
    last = sorted(behind.items(), key=lambda item: -item[1][0])
    parts = [
        f"{name} {number(far)}" + (f" ({number(skipped)} skipped)" if skipped else "")
        for name, (far, skipped) in last[:_MOST_CLIENTS]
    ]
    more = f" and {len(last) - _MOST_CLIENTS} more" if len(last) > _MOST_CLIENTS else ""
    yield f"    trainers  {len(last)}; elements behind: {', '.join(parts)}{more}"


def _workers(stats: DispatcherStatus) -> Iterator[str]:
    if not stats.workers:
        yield "no worker is registered; start one with `headrace worker --dispatcher HOST:PORT`"
        return
    head = ("worker", "tasks", "made", "bytes", "ready", "last heard of")
    yield from table([head, *(_worker(each) for each in stats.workers)])


def _worker(worker: WorkerStatus) -> tuple[str, ...]:
    return (
        f"{worker.address} (leaving)" if worker.draining else worker.address,
        str(worker.tasks),
        rate(worker.elements_per_second),
        f"{bytes_of(worker.bytes_per_second)}/s",
        f"{worker.buffered_batches} ({bytes_of(worker.buffered_bytes)})",
        f"{duration(worker.seconds_since_heartbeat)} ago",
    )


def _short(client_id: str) -> str:
    """Return host and process of a client, without what makes it unique."""
    return client_id.rpartition("-")[0] or client_id


def _rates(status: DispatcherStatus | None) -> dict[int, float]:
    if status is None:
        return {}
    return {
        each.iteration_id: each.elements_per_second
        for job in status.jobs
        for each in job.iterations
    }
