"""A coordinator and workers in this process, and functions for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from headrace.cluster.resolver import SimpleClusterResolver
from headrace.cluster.spec import ClusterSpec
from headrace.coordinator import ClosureWorker, ClusterCoordinator
from headrace.coordinator.cluster import Workers
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.strategy import ParameterServerStrategy

SECONDS = 30.0


@contextmanager
def coordinating(num_workers: int = 2, **options: Any) -> Iterator[ClusterCoordinator]:
    with ExitStack() as stack:
        workers = [stack.enter_context(ClosureWorker(index)) for index in range(num_workers)]
        strategy = Workers([worker.address for worker in workers])
        yield stack.enter_context(ClusterCoordinator(strategy, **options))


@contextmanager
def with_servers(
    num_workers: int = 2, num_ps: int = 2, partitioner: Any = None, **options: Any
) -> Iterator[tuple[Any, ClusterCoordinator]]:
    """Yield a strategy over parameter servers of this process, and its coordinator."""
    with ExitStack() as stack:
        tasks = {
            "worker": [stack.enter_context(ClosureWorker(index)) for index in range(num_workers)],
            "ps": [stack.enter_context(ParameterServer(index)) for index in range(num_ps)],
        }
        resolver = resolver_of({kind: [each.address for each in of] for kind, of in tasks.items()})
        strategy = ParameterServerStrategy(resolver, partitioner, **options)
        stack.callback(strategy.close)
        yield strategy, stack.enter_context(ClusterCoordinator(strategy))


def resolver_of(tasks: dict[str, list[str]]) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(tasks), task_type=None)


def wait_until(is_met: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def divide(a: int, b: int) -> float:
    return a / b


noted: list[Any] = []


def note(what: Any) -> None:
    noted.append(what)


#: Shared with functions of this module, which workers of this process import instead of copying.
shared_here: dict[str, Any] = {}


def wait_for_release() -> None:
    shared_here["release"].wait(SECONDS)


def begin_and_wait() -> str:
    shared_here["begun"].set()
    shared_here["release"].wait(SECONDS)
    return "done"


def take_next(iterator: Any) -> int:
    return int(next(iterator))
