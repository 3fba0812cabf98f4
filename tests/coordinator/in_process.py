"""A coordinator and workers in this process, and functions for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from headrace.coordinator import ClosureWorker, ClusterCoordinator
from headrace.coordinator.cluster import Workers

SECONDS = 30.0


@contextmanager
def coordinating(num_workers: int = 2, **options: Any) -> Iterator[ClusterCoordinator]:
    with ExitStack() as stack:
        workers = [stack.enter_context(ClosureWorker(index)) for index in range(num_workers)]
        strategy = Workers([worker.address for worker in workers])
        yield stack.enter_context(ClusterCoordinator(strategy, **options))


def wait_until(is_met: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def divide(a: int, b: int) -> float:
    return a / b


noted: list[Any] = []


def note(what: Any) -> None:
    noted.append(what)


#: Reached by functions of this module, which workers of this process import and do not copy.
shared_here: dict[str, Any] = {}


def wait_for_release() -> None:
    shared_here["release"].wait(SECONDS)


def begin_and_wait() -> str:
    shared_here["begun"].set()
    shared_here["release"].wait(SECONDS)
    return "done"


def take_next(iterator: Any) -> int:
    return int(next(iterator))
