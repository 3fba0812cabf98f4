"""Prometheus metrics of this process, in a separate registry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

__all__ = [
    "REGISTRY",
    "count_delivered",
    "count_handshake_refused",
    "count_reply_dropped",
    "count_request_too_large",
    "count_shared_memory_refused",
    "count_skipped",
    "count_slow_connection_closed",
    "count_split_assigned",
    "count_user_function_error",
]

REGISTRY = CollectorRegistry()
"""Registry of the counters below only, so that the user's registry is unchanged."""


class _FastCounter(Collector):
    """Counter for frequent increments, for which the client library's counter is too slow."""

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


_DELIVERED = _FastCounter(
    "headrace_elements_delivered", "Elements that a client received from the service."
)
_SKIPPED = Counter(
    "headrace_elements_skipped",
    "Elements that a trainer did not receive because they were evicted from "
    "the cross-trainer cache first.",
    registry=REGISTRY,
)
_SPLITS_ASSIGNED = Counter(
    "headrace_splits_assigned",
    "Ranges of splits that the dispatcher assigned to tasks.",
    registry=REGISTRY,
)
_USER_ERRORS = Counter(
    "headrace_user_function_errors",
    "Exceptions that users' functions raised while elements were produced.",
    registry=REGISTRY,
)

_HANDSHAKES = Counter(
    "headrace_handshakes_refused",
    "Connections to servers that ended during the handshake, by reason: keys, protocol or ended.",
    ["reason"],
    registry=REGISTRY,
)
_TOO_LARGE = Counter(
    "headrace_requests_too_large",
    "Requests that servers refused because of their size.",
    registry=REGISTRY,
)
_REPLIES_DROPPED = Counter(
    "headrace_replies_dropped",
    "Replies that were dropped because their peers had too many unread bytes.",
    registry=REGISTRY,
)
_CONNECTIONS_CLOSED = Counter(
    "headrace_slow_connections_closed",
    "Connections that servers ended because their peers had stopped reading.",
    registry=REGISTRY,
)
_SHARED_MEMORY_REFUSED = Counter(
    "headrace_shared_memory_refused",
    "Offers of shared memory that were refused because they referred to another object.",
    registry=REGISTRY,
)

count_split_assigned: Callable[[], None] = _SPLITS_ASSIGNED.inc
"""Count one assigned split."""
count_user_function_error: Callable[[], None] = _USER_ERRORS.inc
"""Count one exception of a user's function."""
count_request_too_large: Callable[[], None] = _TOO_LARGE.inc
"""Count one request that a server refused because of its size."""
count_reply_dropped: Callable[[], None] = _REPLIES_DROPPED.inc
"""Count one reply dropped because its peer had too many unread bytes."""
count_slow_connection_closed: Callable[[], None] = _CONNECTIONS_CLOSED.inc
"""Count one connection closed because its peer had stopped reading."""
count_shared_memory_refused: Callable[[], None] = _SHARED_MEMORY_REFUSED.inc
"""Count one offer of shared memory that referred to another object."""


def count_handshake_refused(reason: str) -> None:
    """Count one connection that ended during the handshake: "keys", "protocol" or "ended"."""
    _HANDSHAKES.labels(reason).inc()


def count_skipped(elements: int) -> None:
    """Count elements of a cross-trainer cache that a trainer requested after their removal."""
    _SKIPPED.inc(elements)


count_delivered: Callable[[int], None] = _DELIVERED.add
"""Count elements that a client received."""
