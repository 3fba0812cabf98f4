"""Prometheus metrics of the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.service.messages import DispatcherStatus, IterationStatus, JobStatus

__all__ = ["collect_metrics"]


def collect_metrics(status: DispatcherStatus) -> Iterator[Metric]:
    """Return the metrics of a service; per-job metrics only for named jobs."""
    gauges = {
        "headrace_workers": ("Workers that are registered.", len(status.workers)),
        "headrace_workers_draining": (
            "Workers that take no more work and deliver what they have.",
            sum(worker.draining for worker in status.workers),
        ),
        "headrace_clients": ("Clients that read.", status.clients),
        "headrace_datasets": ("Datasets that are registered.", status.datasets),
        "headrace_plan_bytes": ("Bytes that are kept of datasets.", status.plan_bytes),
        "headrace_jobs": ("Jobs that are remembered.", len(status.jobs)),
        "headrace_tasks_running": (
            "Tasks that run, on all workers.",
            sum(job.running_tasks for job in status.jobs),
        ),
        "headrace_buffered_batches": (
            "Portions that workers have made, and that no client has asked for.",
            sum(worker.buffered_batches for worker in status.workers),
        ),
        "headrace_buffered_bytes": (
            "Bytes of the portions that no client has asked for.",
            sum(worker.buffered_bytes for worker in status.workers),
        ),
        "headrace_slots": ("Places in the fixed list of workers.", status.slots),
        "headrace_occupied_slots": (
            "Places in that list that a worker has.",
            status.occupied_slots,
        ),
        "headrace_dispatcher_uptime_seconds": (
            "Seconds since the dispatcher started.",
            status.uptime_seconds,
        ),
    }
    for name, (words, value) in gauges.items():
        yield GaugeMetricFamily(name, words, value=value)
    counters = {
        "headrace_produced_elements": ("Elements that workers made.", status.elements),
        "headrace_produced_bytes": ("Bytes of the elements that workers made.", status.bytes),
        "headrace_client_wait_seconds": (
            "Seconds for which clients waited for elements, added up.",
            status.wait_seconds,
        ),
        "headrace_workers_lost": ("Workers that were declared lost.", status.workers_lost),
        "headrace_refused_connections": (
            "Connections that ended before they began: wrong keys, or no words of ours.",
            status.refused_connections,
        ),
    }
    for name, (words, value) in counters.items():
        yield CounterMetricFamily(name, words, value=value)
    yield from _job_metrics([job for job in status.jobs if job.name])


def _job_metrics(jobs: list[JobStatus]) -> Iterator[Metric]:
    produced = CounterMetricFamily(
        "headrace_job_elements", "Elements that workers made for a named job.", labels=["job"]
    )
    size = CounterMetricFamily(
        "headrace_job_bytes",
        "Bytes of the elements that were made for a named job.",
        labels=["job"],
    )
    waited = CounterMetricFamily(
        "headrace_job_client_wait_seconds",
        "Seconds for which the clients of a named job waited for elements, added up.",
        labels=["job"],
    )
    for job in jobs:
        produced.add_metric([job.name], job.elements)
        size.add_metric([job.name], job.bytes)
        waited.add_metric([job.name], job.wait_seconds)
    yield from (produced, size, waited)
    clients = GaugeMetricFamily(
        "headrace_job_clients", "Clients that read a named job.", labels=["job"]
    )
    in_hand = GaugeMetricFamily(
        "headrace_job_splits_in_progress",
        "Units of the job's open passes that are with workers or on the way to clients.",
        labels=["job"],
    )
    left = GaugeMetricFamily(
        "headrace_job_splits_unassigned",
        "Units of the job's open passes that wait to be dealt; absent where there is no end.",
        labels=["job"],
    )
    progress = GaugeMetricFamily(
        "headrace_job_progress_ratio",
        "The part of the job's newest pass that is done, from 0 to 1; absent where it is unknown.",
        labels=["job"],
    )
    busy = GaugeMetricFamily(
        "headrace_job_step_busy_threads",
        "Threads of workers that are at a step of the job's dataset, in the mean of some seconds.",
        labels=["job", "step"],
    )
    for job in jobs:
        open_ = [each for each in job.iterations if not each.finished]
        clients.add_metric([job.name], job.clients)
        in_hand.add_metric([job.name], sum(each.splits_in_progress for each in open_))
        rest = [each.splits_unassigned for each in open_ if each.splits_unassigned is not None]
        if len(rest) == len(open_):
            left.add_metric([job.name], sum(rest))
        if job.iterations and job.iterations[-1].progress is not None:
            progress.add_metric([job.name], job.iterations[-1].progress)
        for stage, threads in _busy_threads(open_).items():
            busy.add_metric([job.name, stage], threads)
    yield from (clients, in_hand, left, progress, busy)


def _busy_threads(passes: list[IterationStatus]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in passes:
        for stage in each.steps:
            found[stage.step] = found.get(stage.step, 0.0) + stage.busy_threads
    return found
