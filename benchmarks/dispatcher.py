"""Capacity of one dispatcher, and its dependence on the number of peers.

A dispatcher in its own process serves simulated workers and clients (`simulated_peers`), which send
the messages of real ones over sockets and do no work.

Splits: each of 256 workers requests one split at a time. The dispatcher writes each assignment to
its journal on disk before it replies. "Core only" passes batches of 256 requests to the core in
this process, without sockets.

Idle: 1,000 workers and 1,000 clients of one job only send heartbeats. The figure is the processor
time of the dispatcher's process, its socket threads included, per second of heartbeats. "Core only"
passes the same number of heartbeats to the core, eight at a time.

Heartbeats, measured by `dispatcher_curves` only: workers and clients send one heartbeat at a time,
in rotation. The figure is the processor time of the dispatcher's process per heartbeat.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.cpu_time import cpu_seconds_of
from benchmarks.dispatcher_process import start_dispatcher
from benchmarks.workload import Bound, Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "assigned_splits", "heartbeats", "idle_seconds"]

_NUM_REQUESTING, _NUM_PEERS = 256, 1000


def assigned_splits(workers: int) -> Callable[[Path, ExitStack], Pipeline]:
    """Return the builder of a stream of assignments that workers request over sockets."""

    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.simulated_peers import SimulatedPeers

        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _process, address = start_dispatcher(stack, directory)
        peers = SimulatedPeers(stack, address, workers)
        return peers.splits

    return build


def idle_seconds(count: int, seconds: float = 1.0) -> Callable[[Path, ExitStack], Pipeline]:
    """Return the builder of measurements of `count` idle workers and as many idle clients."""

    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.simulated_peers import SimulatedPeers

        process, address = start_dispatcher(stack)
        peers = SimulatedPeers(stack, address, count)
        # The first interval: until each peer has received its heartbeat interval.
        peers.idle(peers.longest_interval)

        def measured() -> Iterator[Any]:
            while True:
                before = cpu_seconds_of(process.pid)
                elapsed = peers.idle(seconds)
                yield elapsed, cpu_seconds_of(process.pid) - before

        return measured

    return build


def heartbeats(count: int) -> Callable[[Path, ExitStack], Pipeline]:
    """Return the builder of measurements of single heartbeats, with `count` peers per kind."""

    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.simulated_peers import SimulatedPeers

        process, address = start_dispatcher(stack)
        peers = SimulatedPeers(stack, address, count)

        def measured() -> Iterator[Any]:
            while True:
                before = cpu_seconds_of(process.pid)
                peers.heartbeat(200)
                yield 200, cpu_seconds_of(process.pid) - before

        return measured

    return build


def _core_splits(workers: int) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.in_process_requests import InProcessPeers
        from headrace.service import DispatcherConfig

        directory = stack.enter_context(tempfile.TemporaryDirectory())
        config = DispatcherConfig(work_dir=directory, fault_tolerant_mode=True)
        return InProcessPeers.of_config(stack, config, workers).splits

    return build


def _core_idle(count: int) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        from benchmarks.in_process_requests import InProcessPeers
        from headrace.service import DispatcherConfig

        peers = InProcessPeers.of_config(stack, DispatcherConfig(), count, count)

        def measured() -> Iterator[Any]:
            while True:
                before = time.thread_time()
                peers.idle_second()
                yield 1, time.thread_time() - before

        return measured

    return build


def _check_splits(found: Elements) -> None:
    expect(all(count == 1 for count in islice(found, 1000)), "an assignment is not one split")


def _check_measured(measured: Elements) -> None:
    for items, seconds in islice(measured, 1):
        expect(items > 0 and seconds > 0, "a measurement is empty")


WORKLOADS = (
    Workload(
        name="dispatcher, durable splits",
        unit="splits",
        check=_check_splits,
        reopen=False,
        contenders=(
            Contender(
                name=f"headrace, {_NUM_REQUESTING} workers",
                build=assigned_splits(_NUM_REQUESTING),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name=f"headrace, core only, {_NUM_REQUESTING} requests",
                build=_core_splits(_NUM_REQUESTING),
                needs=("headrace",),
                role="headrace",
            ),
        ),
        targets=(
            Target(by=f"headrace, {_NUM_REQUESTING} workers", of=(), at_least=25_000.0),
            Target(by=f"headrace, core only, {_NUM_REQUESTING} requests", of=(), at_least=25_000.0),
        ),
    ),
    Workload(
        name=f"dispatcher, {_NUM_PEERS:,} + {_NUM_PEERS:,} idle peers, CPU per second",
        unit="seconds",
        check=_check_measured,
        reopen=False,
        self_timed=True,
        contenders=(
            Contender(
                name="headrace",
                build=idle_seconds(_NUM_PEERS),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="headrace, core only",
                build=_core_idle(_NUM_PEERS),
                needs=("headrace",),
                role="headrace",
            ),
        ),
        targets=(Bound(at_most=0.1), Bound(at_most=0.1, by="headrace, core only")),
    ),
)
