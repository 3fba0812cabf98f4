"""Prometheus metrics of a worker."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.service.messages import WAITING_FOR_CLIENTS, WAITING_FOR_SPLITS
from headrace.service.worker.task_metrics import WorkerTotals

__all__ = ["collect_metrics"]


def collect_metrics(totals: WorkerTotals, *, tasks: int, is_registered: bool) -> Iterator[Metric]:
    """Return the metrics of a worker.

    Args:
        totals: Totals since the worker's start.
        tasks: Number of running tasks.
        is_registered: Whether the dispatcher knows the worker.
    """
    gauges = {
        "headrace_worker_registered": (
            "Whether the dispatcher knows this worker: 1, or 0.",
            int(is_registered),
        ),
        "headrace_worker_tasks_running": ("Tasks that run on this worker.", tasks),
        "headrace_worker_buffers": (
            "Portions that this worker has made, and that no client has asked for.",
            totals.buffered_batches,
        ),
        "headrace_worker_buffer_bytes": (
            "Bytes of the portions that no client has asked for.",
            totals.buffered_bytes,
        ),
    }
    for name, (words, value) in gauges.items():
        yield GaugeMetricFamily(name, words, value=value)
    yield CounterMetricFamily(
        "headrace_worker_elements", "Elements that this worker made.", value=totals.elements
    )
    yield CounterMetricFamily(
        "headrace_worker_bytes", "Bytes of the elements that this worker made.", value=totals.bytes
    )
    waited = CounterMetricFamily(
        "headrace_worker_wait_seconds",
        "Seconds for which tasks of this worker stood still, for clients or for units to read.",
        labels=["reason"],
    )
    waited.add_metric([WAITING_FOR_CLIENTS], totals.client_wait_seconds)
    waited.add_metric([WAITING_FOR_SPLITS], totals.split_wait_seconds)
    yield waited
    stages = CounterMetricFamily(
        "headrace_worker_stage_seconds",
        "Seconds for which threads of this worker were at a step of a dataset.",
        labels=["stage"],
    )
    for stage, seconds in totals.steps.items():
        stages.add_metric([stage], seconds)
    yield stages
