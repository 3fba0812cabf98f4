"""Prometheus metrics of a coordinator and of a closure worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.coordinator.status import CoordinatorStatus

__all__ = ["WorkerCounters", "coordinator_metrics", "worker_metrics"]


def coordinator_metrics(status: CoordinatorStatus) -> Iterator[Metric]:
    """Return the metrics of a coordinator."""
    name = "headrace_coordinator_"
    longest_seconds = 0.0 if status.longest_running is None else status.longest_running.seconds
    yield from _gauges(
        name,
        ("functions_waiting", "Functions waiting for a worker.", status.num_waiting),
        ("functions_in_flight", "Functions assigned to workers.", status.num_in_flight),
        (
            "longest_seconds",
            "Run time of the longest-running function in seconds.",
            longest_seconds,
        ),
        (
            "staleness",
            "Distance between the newest function sent and the oldest one that has not ended.",
            status.staleness_gap,
        ),
        ("workers", "Connected workers.", sum(w.is_connected for w in status.workers)),
        (
            "workers_missing",
            "Workers that are not connected.",
            sum(not w.is_connected for w in status.workers),
        ),
        ("uptime_seconds", "Seconds since the coordinator started.", status.uptime_seconds),
    )
    yield from _counters(
        name,
        ("functions", "Functions that are done.", status.num_finished),
        ("calls", "Function calls that returned or raised.", status.num_returned),
        ("calls_failed", "Function calls that raised.", status.num_failed),
        ("calls_retried", "Function calls reassigned from lost workers.", status.num_retried),
        ("call_seconds", "Total run time of functions in seconds.", status.total_seconds),
        ("workers_lost", "Worker losses.", status.num_workers_lost),
    )


def worker_metrics(counters: WorkerCounters) -> Iterator[Metric]:
    """Return the metrics of a worker that runs closures."""
    name = "headrace_closure_worker_"
    yield from _gauges(
        name,
        (
            "connected",
            ("1 if a coordinator has a session with this worker, else 0."),
            int(counters.has_session),
        ),
        ("functions_running", "Running functions.", counters.num_running),
        ("functions_waiting", "Functions waiting for a thread.", counters.num_waiting),
    )
    yield from _counters(
        name,
        ("sessions", "Sessions started by coordinators.", counters.num_sessions),
        ("functions", "Functions that returned or raised.", counters.num_returned),
        ("functions_failed", "Functions that raised.", counters.num_failed),
        (
            "functions_abandoned",
            "Functions abandoned while running.",
            counters.num_abandoned,
        ),
        ("function_seconds", "Total run time of functions in seconds.", counters.total_seconds),
    )


def _gauges(prefix: str, *metrics: tuple[str, str, float]) -> Iterator[Metric]:
    for name, description, value in metrics:
        yield GaugeMetricFamily(f"{prefix}{name}", description, value=value)


def _counters(prefix: str, *metrics: tuple[str, str, float]) -> Iterator[Metric]:
    for name, description, value in metrics:
        yield CounterMetricFamily(f"{prefix}{name}", description, value=value)


# --- counters of a worker over all its coordinators -----------------------------------------------


@dataclass(eq=False)
class WorkerCounters:
    """Counters since the worker's start.

    Attributes:
        num_sessions: Number of sessions started by coordinators.
        num_returned: Number of functions that returned or raised.
        num_failed: Number of functions that raised.
        num_abandoned: Number of functions abandoned while running.
        total_seconds: Total run time of functions.
        has_session: Whether a coordinator has a session now.
        num_running: Number of functions running in that session.
        num_waiting: Number of functions waiting for a thread.
    """

    num_sessions: int = 0
    num_returned: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    total_seconds: float = 0.0
    has_session: bool = False
    num_running: int = 0
    num_waiting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def record_returned(self, seconds: float, *, failed: bool) -> None:
        """Count a function that has returned or raised."""
        with self._lock:
            self.num_returned += 1
            self.num_failed += failed
            self.total_seconds += seconds
