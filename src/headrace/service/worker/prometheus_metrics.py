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
            "1 if the worker is registered with the dispatcher, else 0.",
            int(is_registered),
        ),
        "headrace_worker_tasks_running": ("Tasks running on this worker.", tasks),
        "headrace_worker_buffered_batches": (
            "Result batches that no client has requested yet.",
            totals.buffered_batches,
        ),
        "headrace_worker_buffered_bytes": (
            "Bytes of result batches that no client has requested yet.",
            totals.buffered_bytes,
        ),
    }
    for name, (description, value) in gauges.items():
        yield GaugeMetricFamily(name, description, value=value)
    yield CounterMetricFamily(
        "headrace_worker_elements", "Elements produced by this worker.", value=totals.elements
    )
    yield CounterMetricFamily(
        "headrace_worker_bytes",
        "Bytes of the elements produced by this worker.",
        value=totals.bytes,
    )
    waited = CounterMetricFamily(
        "headrace_worker_wait_seconds",
        "Seconds that tasks of this worker waited for clients or for splits.",
        labels=["reason"],
    )
    waited.add_metric([WAITING_FOR_CLIENTS], totals.client_wait_seconds)
    waited.add_metric([WAITING_FOR_SPLITS], totals.split_wait_seconds)
    yield waited
    steps = CounterMetricFamily(
        "headrace_worker_step_seconds",
        "Seconds that threads of this worker spent in each step of a dataset.",
        labels=["step"],
    )
    for step, seconds in totals.steps.items():
        steps.add_metric([step], seconds)
    yield steps
