"""Parameter servers of this process, and a strategy over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from headrace.cluster.resolver import SimpleClusterResolver
from headrace.cluster.spec import ClusterSpec
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.strategy import ParameterServerStrategy


def resolver_of(*addresses: str, worker: str = "localhost:1") -> SimpleClusterResolver:
    return SimpleClusterResolver(
        ClusterSpec({"worker": [worker], "ps": list(addresses)}), task_type=None
    )


@contextmanager
def servers(count: int) -> Iterator[list[ParameterServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ParameterServer(index)) for index in range(count)]


@contextmanager
def cluster(count: int = 2, partitioner: Any = None, **options: Any) -> Iterator[Any]:
    """Yield a strategy over so many servers."""
    with servers(count) as started:
        strategy = ParameterServerStrategy(
            resolver_of(*(each.address for each in started)), partitioner, **options
        )
        try:
            yield strategy
        finally:
            strategy.close()
