"""A data service whose workers follow the speed of their consumer.

    python examples/autoscaling.py

A worker prepares 50 elements per second. The consumer first takes 20 per second, then as many as it
can get, then 20 again. The program prints the number of workers when it changes. Workers are
removed only after the demand was lower for most of a minute, so it runs for one or two minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import headrace as hr

MAX_WORKERS = 4
PREPARE_SECONDS = 0.02
SLOW_SECONDS = 0.05
"""Seconds that the slow consumer spends with an element."""
MAX_PHASE_SECONDS = 180.0


def prepare(index: Any) -> Any:
    """Stand in for decoding and augmentation."""
    time.sleep(PREPARE_SECONDS)
    return index


def count_workers(cluster: hr.service.LocalCluster) -> int:
    """Return the number of workers that are registered and not about to stop."""
    return sum(not worker.draining for worker in cluster.dispatcher.stats().workers)


def consume(
    elements: Iterator[Any],
    seconds_per_element: float,
    is_over: Callable[[int], bool],
    cluster: hr.service.LocalCluster,
    name: str,
) -> list[int]:
    """Read until `is_over(number of workers)`; print each number of workers, return the elements.

    Times in the output count from the first element of this call.

    Raises:
        TimeoutError: If that takes too long.
    """
    started_at = last = time.monotonic()
    taken: list[int] = []
    num_counted = shown = 0
    while True:
        taken.append(int(next(elements)))
        time.sleep(seconds_per_element)
        now = time.monotonic()
        if now - last < 1.0:
            continue
        workers = count_workers(cluster)
        rate = (len(taken) - num_counted) / (now - last)
        last, num_counted = now, len(taken)
        if workers != shown:
            print(
                f"{now - started_at:3.0f} s  {name} consumer  {rate:4.0f} elements/s  "
                f"workers {'#' * workers}",
                flush=True,
            )
            shown = workers
        if is_over(workers):
            return taken
        if now - started_at > MAX_PHASE_SECONDS:
            raise TimeoutError(f"the {name} consumer still has {workers} workers")


def run(max_workers: int = MAX_WORKERS) -> int:
    """Run the three phases; return the number of elements read.

    Raises:
        RuntimeError: If an element was delivered twice.
        TimeoutError: If the workers did not follow.
    """
    with hr.service.LocalCluster(num_workers=1, max_workers=max_workers) as cluster:
        dataset = hr.Dataset.range(1 << 40).map(prepare)
        dataset = dataset.apply(
            hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, service=cluster.target)
        )
        with iter(dataset) as elements:
            seconds = iter(range(5))
            taken = consume(
                elements, SLOW_SECONDS, lambda workers: next(seconds, None) is None, cluster, "slow"
            )
            taken += consume(elements, 0.0, lambda workers: workers == max_workers, cluster, "fast")
            taken += consume(elements, SLOW_SECONDS, lambda workers: workers == 1, cluster, "slow")
    if len(set(taken)) != len(taken):
        raise RuntimeError("an element was delivered twice")
    return len(taken)


if __name__ == "__main__":
    print(f"{run()} elements, none of them twice")
