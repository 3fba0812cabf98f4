"""What the dispatcher says of its service to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.service.messages import DispatcherStatus, IterationStatus, JobStatus

__all__ = ["metrics_of"]


def metrics_of(status: DispatcherStatus) -> Iterator[Metric]:
    """Return the metrics of a service; of jobs, those of the named ones."""
    gauges = {
        "headrace_workers": ("Workers that are registered.", len(status.workers)),
        "headrace_workers_leaving": (
            "Workers that take no more work and deliver what they have.",
            sum(worker.leaving for worker in status.workers),
        ),
        "headrace_clients": ("Clients that read.", status.clients),
        "headrace_datasets": ("Datasets that are registered.", status.datasets),
        "headrace_plan_bytes": ("Bytes that are kept of datasets.", status.plan_bytes),
        "headrace_jobs": ("Jobs that are remembered.", len(status.jobs)),
        "headrace_tasks_running": (
            "Tasks that run, on all workers.",
            sum(job.running_tasks for job in status.jobs),
        ),
        "headrace_buffers": (
            "Portions that workers have made, and that no client has asked for.",
            sum(worker.buffers for worker in status.workers),
        ),
        "headrace_buffer_bytes": (
            "Bytes of the portions that no client has asked for.",
            sum(worker.buffer_bytes for worker in status.workers),
        ),
        "headrace_slots": ("Places in the fixed list of workers.", status.slots),
        "headrace_slots_held": ("Places in that list that a worker has.", status.slots_held),
        "headrace_dispatcher_uptime_seconds": (
            "Seconds since the dispatcher started.",
            status.seconds_up,
        ),
    }
    for name, (words, value) in gauges.items():
        yield GaugeMetricFamily(name, words, value=value)
    counters = {
        "headrace_produced_elements": ("Elements that workers made.", status.elements),
        "headrace_produced_bytes": ("Bytes of the elements that workers made.", status.bytes),
        "headrace_client_wait_seconds": (
            "Seconds for which clients waited for elements, added up.",
            status.waited,
        ),
        "headrace_workers_lost": ("Workers that were declared lost.", status.workers_lost),
        "headrace_peers_refused": (
            "Connections that ended before they began: wrong keys, or no words of ours.",
            status.peers_refused,
        ),
    }
    for name, (words, value) in counters.items():
        yield CounterMetricFamily(name, words, value=value)
    yield from _of_jobs([job for job in status.jobs if job.name])


def _of_jobs(jobs: list[JobStatus]) -> Iterator[Metric]:
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
        waited.add_metric([job.name], job.waited)
    yield from (produced, size, waited)
    clients = GaugeMetricFamily(
        "headrace_job_clients", "Clients that read a named job.", labels=["job"]
    )
    in_hand = GaugeMetricFamily(
        "headrace_job_units_in_hand",
        "Units of the job's open passes that are with workers or on the way to clients.",
        labels=["job"],
    )
    left = GaugeMetricFamily(
        "headrace_job_units_left",
        "Units of the job's open passes that wait to be dealt; absent where there is no end.",
        labels=["job"],
    )
    progress = GaugeMetricFamily(
        "headrace_job_progress_ratio",
        "The part of the job's newest pass that is done, from 0 to 1; absent where it is unknown.",
        labels=["job"],
    )
    busy = GaugeMetricFamily(
        "headrace_job_stage_busy_threads",
        "Threads of workers that are at a step of the job's dataset, in the mean of some seconds.",
        labels=["job", "stage"],
    )
    for job in jobs:
        open_ = [each for each in job.passes if not each.finished]
        clients.add_metric([job.name], job.clients)
        in_hand.add_metric([job.name], sum(each.units_in_hand for each in open_))
        rest = [each.units_left for each in open_ if each.units_left is not None]
        if len(rest) == len(open_):
            left.add_metric([job.name], sum(rest))
        if job.passes and job.passes[-1].progress is not None:
            progress.add_metric([job.name], job.passes[-1].progress)
        for stage, threads in _busy(open_).items():
            busy.add_metric([job.name, stage], threads)
    yield from (clients, in_hand, left, progress, busy)


def _busy(passes: list[IterationStatus]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in passes:
        for stage in each.stages:
            found[stage.stage] = found.get(stage.stage, 0.0) + stage.busy
    return found
