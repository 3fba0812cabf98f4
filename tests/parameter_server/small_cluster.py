"""Parameter servers in this process, and strategies over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from headrace.cluster.resolver import SimpleClusterResolver
from headrace.cluster.spec import ClusterSpec
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.strategy import ParameterServerStrategy


def resolver_of(*addresses: str, worker: str = "localhost:1") -> SimpleClusterResolver:
    return SimpleClusterResolver(
        ClusterSpec({"worker": [worker], "ps": list(addresses)}), task_type=None
    )


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until a condition is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_threads(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Call `function(number)` in `count` threads at the same time; return the results."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(function, range(count)))


def is_replicated(roles: list[dict[int, str]]) -> bool:
    """Return whether each store is on two servers, given the roles of each server by store."""
    next_roles = [*roles[1:], roles[0]]
    return all(
        {first.get(store), second.get(store)} == {"leader", "follower"}
        for store, (first, second) in enumerate(zip(roles, next_roles, strict=True))
    )


def restarted(server: ParameterServer, **options: Any) -> ParameterServer:
    """Stop a server, and start an empty one at its address."""
    server.stop()
    port = int(server.address.rpartition(":")[2])
    return ParameterServer(server.index, port=port, **options)


@contextmanager
def servers(count: int) -> Iterator[list[ParameterServer]]:
    started = [ParameterServer(index) for index in range(count)]
    try:
        yield started
    finally:
        for each in started:
            each.stop()


@contextmanager
def strategy_at(
    servers: Iterable[Any], partitioner: Any = None, *, worker: str = "localhost:1", **options: Any
) -> Iterator[Any]:
    """Yield a strategy over running servers."""
    resolver = resolver_of(*(each.address for each in servers), worker=worker)
    strategy = ParameterServerStrategy(resolver, partitioner, **options)
    try:
        yield strategy
    finally:
        strategy.close()


@contextmanager
def restartable(
    count: int = 1, partitioner: Any = None, **options: Any
) -> Iterator[tuple[Any, Callable[..., ParameterServer]]]:
    """Yield a strategy over `count` servers, and a function that restarts one of them empty."""
    with servers(count) as started, strategy_at(started, partitioner, **options) as strategy:

        def restart(index: int = 0) -> ParameterServer:
            started[index] = restarted(started[index])
            return started[index]

        yield strategy, restart


@contextmanager
def cluster(count: int = 2, partitioner: Any = None, **options: Any) -> Iterator[Any]:
    """Yield a strategy over `count` servers."""
    with servers(count) as started, strategy_at(started, partitioner, **options) as strategy:
        yield strategy
