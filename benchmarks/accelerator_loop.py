"""The training loop of the simulated accelerator, also while worker processes are killed."""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.accelerator_inputs import Task
from benchmarks.accelerator_peers import PROCESSES, headrace_dataset
from benchmarks.workload import Elements, Pipeline

__all__ = [
    "Epoch",
    "Service",
    "busy_steps",
    "epoch_with_kills",
    "headrace_service",
]

#: Seconds in which batches are read without steps, after a pause in which buffers were filled.
_DRAIN_SECONDS, _PAUSE_SECONDS = 0.3, 0.1

#: Seconds between the start of a worker's replacement and the next kill.
KILL_SECONDS = 3.0


def busy_steps(batches: Elements, batch: int, seconds: float) -> Iterator[tuple[float, float]]:
    """Train without end; yield the seconds in which each step computes, and those that it takes.

    Pauses between rounds are not counted.

    Args:
        batches: Batches of samples and their numbers; closed at the end.
        batch: Number of samples of a batch.
        seconds: Duration of the step on a whole batch.

    Raises:
        ValueError: If a sample is duplicated.
    """
    seen: set[int] = set()

    def step() -> float:
        _, numbers = next(batches)
        found = [int(number) for number in numbers]
        size = len(seen)
        seen.update(found)
        if len(seen) != size + len(found):
            raise ValueError(f"wrong data: samples of {sorted(found)} are duplicated")
        return len(found) / batch * seconds

    try:
        while True:
            end = time.perf_counter() + _DRAIN_SECONDS
            while time.perf_counter() < end:
                step()
            began = time.perf_counter()
            paused = False
            while not paused:
                busy = step()
                time.sleep(busy)
                ended = time.perf_counter()
                yield busy, ended - began
                began = time.perf_counter()
                paused = began - ended > _PAUSE_SECONDS
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch of training in which workers were killed.

    Attributes:
        busy: Seconds in which the accelerator computed.
        seconds: Duration of the epoch.
        samples: Number of samples of the dataset.
        kills: Number of killed workers.
        lost: Number of samples that were not delivered.
        duplicated: Number of samples that were delivered again.
    """

    busy: float
    seconds: float
    samples: int
    kills: int
    lost: int
    duplicated: int


@dataclass(frozen=True, kw_only=True)
class Service:
    """A data service of two worker processes.

    Attributes:
        epoch: Opens an epoch.
        kill: Kills the older worker (SIGKILL); returns when another has started.
    """

    epoch: Pipeline
    kill: Callable[[], object]


def epoch_with_kills(
    service: Service, task: Task, batches: int, seconds: float, pause: float = KILL_SECONDS
) -> Epoch:
    """Train for an epoch while a worker is killed again and again.

    Args:
        service: The service to read from.
        task: The task.
        batches: Number of batches of an epoch.
        seconds: Duration of the step on a whole batch.
        pause: Seconds between the start of a worker and the next kill.
    """
    ended = threading.Event()

    def kill_repeatedly() -> int:
        kills = 0
        while not ended.wait(pause):
            service.kill()
            kills += 1
        return kills

    delivered: Counter[int] = Counter()
    samples = batches * task.batch
    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        kills = pool.submit(kill_repeatedly)
        try:
            for _, numbers in service.epoch():
                time.sleep(len(numbers) / task.batch * seconds)
                delivered.update(int(number) for number in numbers)
            took = time.perf_counter() - began
        finally:
            ended.set()
    total = delivered.total()
    return Epoch(
        busy=total / task.batch * seconds,
        seconds=took,
        samples=samples,
        kills=kills.result(),
        lost=len(set(range(samples)) - delivered.keys()),
        duplicated=total - len(delivered),
    )


def headrace_service(task: Task, inputs: Path, batches: int, stack: ExitStack) -> Service:
    """Start a data service of Headrace."""
    import headrace as hr

    cluster = stack.enter_context(hr.service.LocalCluster(num_workers=PROCESSES, processes=True))
    policy = hr.service.ShardingPolicy.DYNAMIC
    remote = headrace_dataset(task, inputs, batches).apply(
        hr.service.distribute(policy, cluster.target, visitation="exactly_once")
    )
    oldest = count()

    def kill() -> None:
        cluster.kill_worker(next(oldest))
        cluster.add_worker()

    return Service(epoch=lambda: iter(remote), kill=kill)
