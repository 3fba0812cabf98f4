"""What Headrace counts, for Prometheus: a registry of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

__all__ = [
    "REGISTRY",
    "count_answer_withheld",
    "count_connection_cut",
    "count_delivered",
    "count_handshake_refused",
    "count_memory_refused",
    "count_request_too_large",
    "count_skipped",
    "count_split_granted",
    "count_user_function_error",
]

REGISTRY = CollectorRegistry()
"""All counters below and nothing else, so that a user's own registry stays the user's."""


class _Tally(Collector):
    """A counter that is added to often, for which `IterationCounter` takes long."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name, self._documentation = name, documentation
        self._lock = threading.Lock()
        self._value = 0
        self._since = time.time()
        REGISTRY.register(self)

    def add(self, amount: int) -> None:
        with self._lock:
            self._value += amount

    def collect(self) -> list[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._documentation)
        family.add_metric([], self._value, created=self._since)
        return [family]


_DELIVERED = _Tally(
    "headrace_elements_delivered", "Elements that a client received from the service."
)
_SKIPPED = Counter(
    "headrace_elements_skipped",
    "Elements that a trainer did not get, because it fell behind others of its job.",
    registry=REGISTRY,
)
_SPLITS = Counter(
    "headrace_splits_granted",
    "Ranges of positions that the dispatcher dealt out.",
    registry=REGISTRY,
)
_USER_ERRORS = Counter(
    "headrace_user_function_errors",
    "Exceptions that users' functions raised while they produced elements.",
    registry=REGISTRY,
)

_HANDSHAKES = Counter(
    "headrace_handshakes_refused",
    "Connections to servers that ended before they began: wrong keys, or no peer of ours.",
    ["reason"],
    registry=REGISTRY,
)
_TOO_LARGE = Counter(
    "headrace_requests_too_large",
    "Requests that servers refused because of their size.",
    registry=REGISTRY,
)
_WITHHELD = Counter(
    "headrace_answers_withheld",
    "Answers that were dropped because their peers had too many bytes unread.",
    registry=REGISTRY,
)
_CUT = Counter(
    "headrace_connections_cut",
    "Connections that servers ended because their peers had stopped reading.",
    registry=REGISTRY,
)
_MEMORY = Counter(
    "headrace_memory_refused",
    "Offers of shared memory that were refused because they named something else.",
    registry=REGISTRY,
)

count_split_granted: Callable[[], None] = _SPLITS.inc
"""Count one range of positions that was dealt out."""
count_user_function_error: Callable[[], None] = _USER_ERRORS.inc
"""Count one exception of a user's function."""
count_request_too_large: Callable[[], None] = _TOO_LARGE.inc
"""Count one request that a server refused because of its size."""
count_answer_withheld: Callable[[], None] = _WITHHELD.inc
"""Count one answer that was dropped because its peer had too many bytes unread."""
count_connection_cut: Callable[[], None] = _CUT.inc
"""Count one connection that a server ended because its peer had stopped reading."""
count_memory_refused: Callable[[], None] = _MEMORY.inc
"""Count one offer of shared memory that named something else."""


def count_handshake_refused(reason: str) -> None:
    """Count one connection that ended before it began: "keys", "protocol" or "ended"."""
    _HANDSHAKES.labels(reason).inc()


def count_skipped(elements: int) -> None:
    """Count elements that were gone when a trainer came for them."""
    _SKIPPED.inc(elements)


count_delivered: Callable[[int], None] = _DELIVERED.add
"""Count elements that a client received."""
