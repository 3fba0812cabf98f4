"""Latency of an epoch of one element, and of a client after the SIGKILL of a dispatcher.

One element: an epoch of `range(1)` is opened, read to its end and closed, through a worker process.

Killed dispatcher: short epochs are read one after another; opening each one needs a reply of the
dispatcher, which writes a journal. The dispatcher is killed and restarted at once. The figure is
the time from when it listens again to the first element of an epoch that was opened after the kill;
the restart itself, mostly the start of a Python process, is not counted.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.dispatcher_process import start_dispatcher, start_worker
from benchmarks.workload import Bound, Contender, Elements, Pipeline, Workload, expect

__all__ = ["WORKLOADS"]

_ELEMENTS, _SECONDS_PER_ELEMENT = 4, 0.005


def _slow(element: Any) -> Any:
    time.sleep(_SECONDS_PER_ELEMENT)
    return element


def _one_element(mode: str) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=1, processes=True))
        read = hr.service.distribute(hr.service.ShardingPolicy[mode], cluster.target)
        remote = hr.Dataset.range(1).apply(read)

        def epochs() -> Iterator[Any]:
            while True:
                yield list(remote)

        return epochs

    return build


def _killed_dispatcher(_: Path, stack: ExitStack) -> Pipeline:
    import headrace as hr

    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    pool = stack.enter_context(ThreadPoolExecutor(1))
    process, address = start_dispatcher(stack, directory, _stable_port())
    start_worker(stack, address)
    read = hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, address)
    remote = hr.Dataset.range(_ELEMENTS).map(_slow).apply(read)

    def restart() -> tuple[Any, float]:
        started, _address = start_dispatcher(stack, directory, int(address.rpartition(":")[2]))
        return started, time.perf_counter()

    def waits() -> Iterator[Any]:
        nonlocal process
        while True:
            for _epoch in range(3):
                expect(sorted(map(int, remote)) == list(range(_ELEMENTS)), "an epoch is incomplete")
            process.kill()
            process.wait()
            restarted = pool.submit(restart)
            with iter(remote) as epoch:
                next(epoch)
                arrived = time.perf_counter()
            process, listened = restarted.result()
            yield 1, max(arrived - listened, 1e-6)

    return waits


def _stable_port() -> int:
    """Return a port outside the ephemeral range, which a restarted server can bind again."""
    from headrace.transport.address import find_stable_port

    return find_stable_port()


def _check_epochs(epochs: Elements) -> None:
    for epoch in islice(epochs, 3):
        expect([int(element) for element in epoch] == [0], f"an epoch is {epoch}")


def _check_waits(waits: Elements) -> None:
    next(waits)


WORKLOADS = (
    Workload(
        name="epochs of one element",
        unit="epochs",
        check=_check_epochs,
        reopen=False,
        contenders=tuple(
            Contender(
                name=f"headrace, {mode}",
                build=_one_element(mode),
                needs=("headrace",),
                role="headrace",
            )
            for mode in ("OFF", "DYNAMIC")
        ),
        targets=tuple(Bound(at_most=0.010, by=f"headrace, {mode}") for mode in ("OFF", "DYNAMIC")),
    ),
    Workload(
        name="dispatcher killed, wait after restart",
        unit="kills",
        check=_check_waits,
        reopen=False,
        self_timed=True,
        element_seconds=2.0,
        contenders=(
            Contender(
                name="headrace", build=_killed_dispatcher, needs=("headrace",), role="headrace"
            ),
        ),
        targets=(Bound(at_most=0.5),),
    ),
)
