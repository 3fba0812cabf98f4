"""Prometheus metrics of the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.service.messages import DispatcherStatus, IterationStatus, JobStatus

__all__ = ["collect_metrics"]


def collect_metrics(status: DispatcherStatus) -> Iterator[Metric]:
    """Return the metrics of a service; per-job metrics only for named jobs."""
    gauges = {
        "headrace_workers": ("Registered workers.", len(status.workers)),
        "headrace_workers_draining": (
            "Draining workers: they get no new work and deliver their computed elements.",
            sum(worker.draining for worker in status.workers),
        ),
        "headrace_wanted_workers": (
            "Workers that the jobs need, by the scaling policy.",
            status.wanted_workers,
        ),
        "headrace_clients": ("Clients that read an iteration.", status.clients),
        "headrace_datasets": ("Registered datasets.", status.datasets),
        "headrace_plan_bytes": ("Total size of the stored plans in bytes.", status.plan_bytes),
        "headrace_jobs": ("Jobs in the dispatcher's state.", len(status.jobs)),
        "headrace_tasks_running": (
            "Running tasks of all workers.",
            sum(job.running_tasks for job in status.jobs),
        ),
        "headrace_buffered_batches": (
            "Result batches that workers have computed and no client has requested.",
            sum(worker.buffered_batches for worker in status.workers),
        ),
        "headrace_buffered_bytes": (
            "Size in bytes of the result batches that no client has requested.",
            sum(worker.buffered_bytes for worker in status.workers),
        ),
        "headrace_slots": ("Slots in the fixed list of workers.", status.slots),
        "headrace_occupied_slots": (
            "Slots that a registered worker holds.",
            status.occupied_slots,
        ),
        "headrace_dispatcher_uptime_seconds": (
            "Seconds since the dispatcher started.",
            status.uptime_seconds,
        ),
    }
    for name, (help_text, value) in gauges.items():
        yield GaugeMetricFamily(name, help_text, value=value)
    counters = {
        "headrace_produced_elements": ("Elements that workers produced.", status.elements),
        "headrace_produced_bytes": (
            "Size in bytes of the elements that workers produced.",
            status.bytes,
        ),
        "headrace_client_wait_seconds": (
            "Total seconds that clients waited for elements.",
            status.wait_seconds,
        ),
        "headrace_workers_lost": ("Workers declared lost.", status.workers_lost),
        "headrace_refused_connections": (
            "Refused connections: wrong keys, or another protocol.",
            status.refused_connections,
        ),
    }
    for name, (help_text, value) in counters.items():
        yield CounterMetricFamily(name, help_text, value=value)
    yield from _job_metrics([job for job in status.jobs if job.name])


def _job_metrics(jobs: list[JobStatus]) -> Iterator[Metric]:
    produced = CounterMetricFamily(
        "headrace_job_elements", "Elements that workers produced for a named job.", labels=["job"]
    )
    size = CounterMetricFamily(
        "headrace_job_bytes",
        "Size in bytes of the elements that workers produced for a named job.",
        labels=["job"],
    )
    wait_seconds = CounterMetricFamily(
        "headrace_job_client_wait_seconds",
        "Total seconds that the clients of a named job waited for elements.",
        labels=["job"],
    )
    for job in jobs:
        produced.add_metric([job.name], job.elements)
        size.add_metric([job.name], job.bytes)
        wait_seconds.add_metric([job.name], job.wait_seconds)
    yield from (produced, size, wait_seconds)
    clients = GaugeMetricFamily("headrace_job_clients", "Clients of a named job.", labels=["job"])
    in_progress = GaugeMetricFamily(
        "headrace_job_splits_in_progress",
        "Splits of the job's open epochs that are assigned and not done.",
        labels=["job"],
    )
    unassigned = GaugeMetricFamily(
        "headrace_job_splits_unassigned",
        "Splits of the job's open epochs that are not assigned; absent for infinite datasets.",
        labels=["job"],
    )
    progress = GaugeMetricFamily(
        "headrace_job_progress_ratio",
        "Completed fraction of the job's newest epoch, from 0 to 1; absent if unknown.",
        labels=["job"],
    )
    busy_threads = GaugeMetricFamily(
        "headrace_job_step_busy_threads",
        "Worker threads in a step of the job's dataset, averaged over a few seconds.",
        labels=["job", "step"],
    )
    for job in jobs:
        open_iterations = [each for each in job.iterations if not each.finished]
        clients.add_metric([job.name], job.clients)
        in_progress.add_metric([job.name], sum(each.splits_in_progress for each in open_iterations))
        unassigned_counts = [
            each.splits_unassigned for each in open_iterations if each.splits_unassigned is not None
        ]
        if len(unassigned_counts) == len(open_iterations):
            unassigned.add_metric([job.name], sum(unassigned_counts))
        if job.iterations and job.iterations[-1].progress is not None:
            progress.add_metric([job.name], job.iterations[-1].progress)
        for step, threads in _busy_threads(open_iterations).items():
            busy_threads.add_metric([job.name, step], threads)
    yield from (clients, in_progress, unassigned, progress, busy_threads)


def _busy_threads(iterations: list[IterationStatus]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for iteration in iterations:
        for step in iteration.steps:
            totals[step.step] = totals.get(step.step, 0.0) + step.busy_threads
    return totals
