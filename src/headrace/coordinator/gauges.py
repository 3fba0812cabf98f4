"""What a coordinator and a worker say of themselves to Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.coordinator.status import CoordinatorStatus

__all__ = ["Totals", "metrics_of", "metrics_of_worker"]


def metrics_of(status: CoordinatorStatus) -> Iterator[Metric]:
    """Return the metrics of a coordinator."""
    name = "headrace_coordinator_"
    longest = 0.0 if status.longest is None else status.longest.seconds
    yield from _gauges(
        name,
        ("functions_waiting", "Functions that no worker has.", status.waiting),
        ("functions_in_flight", "Functions that workers have.", status.in_flight),
        ("longest_seconds", "For how long the oldest function that runs has been at it.", longest),
        ("staleness", "How far the oldest function is behind the newest one sent.", status.gap),
        ("workers", "Workers that can be reached.", sum(w.is_there for w in status.workers)),
        (
            "workers_missing",
            "Workers that are waited for.",
            sum(not w.is_there for w in status.workers),
        ),
        ("uptime_seconds", "Seconds since the coordinator was made.", status.seconds_up),
    )
    yield from _counters(
        name,
        ("functions", "Functions that are over.", status.finished),
        ("calls", "Calls of functions that returned or raised.", status.returned),
        ("calls_failed", "Calls of functions that raised.", status.failed),
        ("calls_retried", "Calls that were taken back from lost workers.", status.retried),
        ("call_seconds", "Seconds for which functions ran, added up.", status.seconds),
        ("workers_lost", "Workers that were lost, each time.", status.workers_lost),
    )


def metrics_of_worker(totals: Totals) -> Iterator[Metric]:
    """Return the metrics of a worker that runs closures."""
    name = "headrace_closure_worker_"
    yield from _gauges(
        name,
        ("greeted", "Whether a coordinator has this worker: 1, or 0.", int(totals.is_greeted)),
        ("functions_running", "Functions that run.", totals.running),
        ("functions_waiting", "Functions that wait for a thread.", totals.waiting),
    )
    yield from _counters(
        name,
        ("greetings", "How often a coordinator took this worker.", totals.greetings),
        ("functions", "Functions that returned or raised.", totals.ended),
        ("functions_failed", "Functions that raised.", totals.failed),
        ("functions_abandoned", "Functions that were given up while they ran.", totals.abandoned),
        ("function_seconds", "Seconds for which functions ran, added up.", totals.seconds),
    )


def _gauges(prefix: str, *found: tuple[str, str, float]) -> Iterator[Metric]:
    for name, words, value in found:
        yield GaugeMetricFamily(f"{prefix}{name}", words, value=value)


def _counters(prefix: str, *found: tuple[str, str, float]) -> Iterator[Metric]:
    for name, words, value in found:
        yield CounterMetricFamily(f"{prefix}{name}", words, value=value)


# --- what a worker has done for all coordinators that it had --------------------------------------


@dataclass(eq=False)
class Totals:
    """Counts, from the worker's start on.

    Attributes:
        greetings: How often a coordinator took the worker.
        ended: Functions that returned or raised.
        failed: Those that raised.
        abandoned: Functions that were given up while they ran.
        seconds: For which functions ran.
        is_greeted: Whether a coordinator has the worker now.
        running: Functions that run now, for that one.
        waiting: Functions that wait for a thread.
    """

    greetings: int = 0
    ended: int = 0
    failed: int = 0
    abandoned: int = 0
    seconds: float = 0.0
    is_greeted: bool = False
    running: int = 0
    waiting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def ran(self, seconds: float, *, failed: bool) -> None:
        """Take note that a function has returned or raised."""
        with self._lock:
            self.ended += 1
            self.failed += failed
            self.seconds += seconds
