"""What Headrace counts, for Prometheus: a registry of its own, and an endpoint only when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, start_http_server

__all__ = [
    "REGISTRY",
    "count_delivered",
    "count_split_granted",
    "count_user_function_error",
    "expose",
]

REGISTRY = CollectorRegistry()
"""All counters below and nothing else, so that a user's own registry stays the user's."""

_DELIVERED = Counter(
    "headrace_elements_delivered",
    "Elements that a client received from the service.",
    registry=REGISTRY,
)
_SPLITS = Counter(
    "headrace_splits_granted",
    "Ranges of source indices that the dispatcher dealt out.",
    registry=REGISTRY,
)
_USER_ERRORS = Counter(
    "headrace_user_function_errors",
    "Exceptions that users' functions raised while they produced elements.",
    registry=REGISTRY,
)

count_split_granted: Callable[[], None] = _SPLITS.inc
"""Count one split that was dealt out."""
count_user_function_error: Callable[[], None] = _USER_ERRORS.inc
"""Count one exception of a user's function."""


def count_delivered(elements: int) -> None:
    """Count elements that a client received."""
    _DELIVERED.inc(elements)


@contextmanager
def expose(port: int) -> Iterator[int]:
    """Serve the counters at http://127.0.0.1:port/metrics; yield the port (0 chooses a free one).

    Raises:
        OSError: The port is taken.
    """
    server, thread = start_http_server(port, addr="127.0.0.1", registry=REGISTRY)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
