"""Longest wait for an element after the SIGKILL of a worker.

An epoch of 300 elements, 5 ms each, is read through two worker processes; one is killed after 200
elements. The figure is the longest wait for an element from then to the end of the epoch, which
must be complete. In ordered reading, the elements of the lost worker block all later elements;
in unordered reading, they block the end of the epoch only.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.workload import Bound, Contender, Elements, Pipeline, Workload, expect

__all__ = ["WORKLOADS"]

_ELEMENTS, _KILLED_AFTER, _SECONDS_PER_ELEMENT = 300, 200, 0.005


def _slow(element: Any) -> Any:
    time.sleep(_SECONDS_PER_ELEMENT)
    return element


def _killed_worker(*, ordered: bool) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=2, processes=True))
        read = hr.service.distribute(
            hr.service.ShardingPolicy.DYNAMIC, cluster.target, ordered=ordered
        )
        remote = hr.Dataset.range(_ELEMENTS).map(_slow).apply(read)

        def longest_waits() -> Iterator[Any]:
            victim = 0
            while True:
                with iter(remote) as epoch:
                    found = [int(element) for element in islice(epoch, _KILLED_AFTER)]
                    cluster.kill_worker(victim)
                    longest, requested = 0.0, time.perf_counter()
                    for element in epoch:
                        now = time.perf_counter()
                        longest, requested = max(longest, now - requested), now
                        found.append(int(element))
                expect(sorted(found) == list(range(_ELEMENTS)), "an epoch is incomplete")
                expect(not ordered or found == sorted(found), "an epoch is out of order")
                yield 1, longest
                cluster.add_worker()
                victim += 1

        return longest_waits

    return build


def _check(waits: Elements) -> None:
    next(waits)  # the pipeline checks its epoch


WORKLOADS = (
    Workload(
        name="worker killed, longest wait",
        unit="kills",
        check=_check,
        reopen=False,
        self_timed=True,
        element_seconds=3.0,
        contenders=(
            Contender(
                name="headrace, ordered",
                build=_killed_worker(ordered=True),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="headrace, unordered",
                build=_killed_worker(ordered=False),
                needs=("headrace",),
                role="headrace",
            ),
        ),
        targets=(
            Bound(at_most=1.5, by="headrace, ordered"),
            Bound(at_most=1.5, by="headrace, unordered"),
        ),
    ),
)
