"""How much does one dispatcher bear, and does it matter how many peers it has?

The real dispatcher in a process of its own, with connections to light peers (`simulated_peers`):
they send over real sockets what real workers and clients send, and do nothing else.

Splits: 256 workers ask for one unit each, and for the next as soon as they have it; each grant is
in the journal on a disk before it is answered. The core is the same without sockets: batches of 256
requests are handed to it in this process.

Idle: 1,000 workers and 1,000 clients of one job send their heartbeats and nothing else. What is
measured is the processor time of the dispatcher's process for a second of them, the threads of its
sockets included; and that of the core alone, to which as many are handed by eight.

Heartbeats: workers and clients send one heartbeat at a time, each in turn. What is measured is the
processor time of the dispatcher's process for a heartbeat.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.cpu_time import cpu_seconds_of
from benchmarks.dispatcher_process import start_dispatcher
from benchmarks.workload import Bound, Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "granted", "heartbeats", "idle_seconds"]

_ASKING, _CROWD = 256, 1000


def granted(asking: int) -> Callable[[Path, ExitStack], Pipeline]:
    """Return what builds a stream of grants, which so many workers ask for over sockets."""

    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.simulated_peers import SimulatedPeers

        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _process, address = start_dispatcher(stack, directory)
        crowd = SimulatedPeers(stack, address, asking)
        return crowd.splits

    return build


def idle_seconds(count: int, seconds: float = 1.0) -> Callable[[Path, ExitStack], Pipeline]:
    """Return what builds a stream of seconds in which so many of each only send heartbeats."""

    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.simulated_peers import SimulatedPeers

        process, address = start_dispatcher(stack)
        crowd = SimulatedPeers(stack, address, count)
        # Until each was told by a heartbeat when to send the next one.
        crowd.idle(crowd.longest_interval)

        def measured() -> Iterator[Any]:
            while True:
                before = cpu_seconds_of(process.pid)
                lasted = crowd.idle(seconds)
                yield lasted, cpu_seconds_of(process.pid) - before

        return measured

    return build


def heartbeats(count: int) -> Callable[[Path, ExitStack], Pipeline]:
    """Return what builds a stream of heartbeats where there are so many of each."""

    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.simulated_peers import SimulatedPeers

        process, address = start_dispatcher(stack)
        crowd = SimulatedPeers(stack, address, count)

        def measured() -> Iterator[Any]:
            while True:
                before = cpu_seconds_of(process.pid)
                crowd.beat(200)
                yield 200, cpu_seconds_of(process.pid) - before

        return measured

    return build


def _core_grants(asking: int) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.held_requests import HeldCrowd
        from headrace.service import DispatcherConfig

        directory = stack.enter_context(tempfile.TemporaryDirectory())
        config = DispatcherConfig(work_dir=directory, fault_tolerant_mode=True)
        return HeldCrowd(stack, config, asking).grants

    return build


def _core_idle(count: int) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.held_requests import HeldCrowd
        from headrace.service import DispatcherConfig

        crowd = HeldCrowd(stack, DispatcherConfig(), count, count)

        def measured() -> Iterator[Any]:
            while True:
                before = time.thread_time()
                crowd.idle_second()
                yield 1, time.thread_time() - before

        return measured

    return build


def _check_grants(found: Elements) -> None:
    expect(all(count == 1 for count in islice(found, 1000)), "a grant is not one unit")


def _check_measured(measured: Elements) -> None:
    for items, seconds in islice(measured, 1):
        expect(items > 0 and seconds > 0, "nothing was measured")


def _heartbeats_by(counts: Sequence[int]) -> tuple[Contender, ...]:
    return tuple(
        Contender(
            name=f"headrace, {count:,} + {count:,} peers",
            build=heartbeats(count),
            needs=("headrace",),
            role="headrace" if count == max(counts) else "peer",
        )
        for count in counts
    )


WORKLOADS = (
    Workload(
        name="dispatcher, durable splits",
        unit="splits",
        check=_check_grants,
        reopen=False,
        stretch=0.5,
        contenders=(
            Contender(
                name=f"headrace, {_ASKING} workers",
                build=granted(_ASKING),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name=f"headrace, the core, {_ASKING} in hand",
                build=_core_grants(_ASKING),
                needs=("headrace",),
                role="headrace",
            ),
        ),
        targets=(
            Target(by=f"headrace, {_ASKING} workers", of=(), at_least=25_000.0),
            Target(by=f"headrace, the core, {_ASKING} in hand", of=(), at_least=25_000.0),
        ),
    ),
    Workload(
        name=f"dispatcher, {_CROWD:,} + {_CROWD:,} idle, CPU a second",
        unit="seconds",
        check=_check_measured,
        reopen=False,
        own_clock=True,
        stretch=0.8,
        contenders=(
            Contender(
                name="headrace", build=idle_seconds(_CROWD), needs=("headrace",), role="headrace"
            ),
            Contender(
                name="headrace, the core",
                build=_core_idle(_CROWD),
                needs=("headrace",),
                role="headrace",
            ),
        ),
        targets=(Bound(at_most=0.1), Bound(at_most=0.1, by="headrace, the core")),
    ),
    Workload(
        name="dispatcher, CPU of a heartbeat",
        unit="heartbeats",
        check=_check_measured,
        reopen=False,
        own_clock=True,
        stretch=0.3,
        contenders=_heartbeats_by((1, 10, 100, _CROWD)),
        # Independent of their number: within a quarter.
        targets=(
            Target(
                by=f"headrace, {_CROWD:,} + {_CROWD:,} peers",
                of=("headrace, 10 + 10 peers",),
                at_least=0.8,
            ),
        ),
    ),
)
