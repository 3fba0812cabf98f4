"""Iterators over a service that the garbage collector finds, at whatever instant."""

from __future__ import annotations

import gc
import threading
import time

import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute
from headrace.transport.context import shared_context

pytestmark = pytest.mark.system


def leave_an_iterator() -> None:
    """Read from a service, and leave the iterator to the garbage collector."""
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = hr.Dataset.counter().apply(distribute(ShardingPolicy.OFF, cluster.target))
        iterator = iter(dataset)
        assert int(next(iterator)) == 0
        cycle: list[object] = [iterator]
        cycle.append(cycle)


@pytest.mark.timeout(60)
def test_collection_during_a_connection_attempt_does_not_hang() -> None:
    gc.collect()
    gc.disable()
    try:
        leave_an_iterator()
        # As SharedContext.borrow has it. The iterator's thread needs it, too, to say goodbye to a
        # dispatcher that it must connect to again.
        with shared_context._lock:
            gc.collect()
    finally:
        gc.enable()
    until = time.monotonic() + 30
    while any(each.name == "headrace-client" for each in threading.enumerate()):
        assert time.monotonic() < until, "the thread of a collected iterator does not end"
        time.sleep(0.01)
