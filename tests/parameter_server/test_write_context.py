from __future__ import annotations

import contextvars
import threading

from headrace.distribute.execution_context import current_context
from headrace.distribute.strategy import MirroredStrategy
from headrace.parameter_server.specs import WriteKey
from headrace.parameter_server.write_context import (
    ClosureRun,
    current_closure_run,
    next_key,
    write_as,
)
from tests.parameter_server.small_cluster import in_threads


def test_each_write_of_a_closure_to_one_target_has_the_next_number():
    with write_as(ClosureRun(coordinator_term=3, closure=7, worker_session=1)):
        keys = [next_key("w"), next_key("b"), next_key("w")]
    assert keys == [
        WriteKey(coordinator_term=3, closure=7, worker_session=1, number=0),
        WriteKey(coordinator_term=3, closure=7, worker_session=1, number=0),
        WriteKey(coordinator_term=3, closure=7, worker_session=1, number=1),
    ]


def test_write_contexts_can_be_nested():
    with write_as(ClosureRun(1, 1, 0)):
        with write_as(ClosureRun(1, 2, 0)):
            assert current_closure_run().closure == 2
            next_key("w")
        assert current_closure_run().closure == 1
        assert next_key("w").number == 0
    assert current_closure_run() is None
    assert next_key("w") is None


def test_threads_with_the_same_context_share_write_numbers():
    with write_as(ClosureRun(1, 1, 0)):
        context = contextvars.copy_context()
        found = in_threads(8, lambda number: context.copy().run(next_key, "w"))
    assert sorted(key.number for key in found) == list(range(8))


def test_each_replica_has_its_own_write_numbers():
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])

    def run_replicas(first):
        has_written = threading.Event()

        def write():
            replica = current_context.get().replica_id_in_sync_group
            assert replica == first or has_written.wait(10)
            keys = [next_key("w"), next_key("w")]
            has_written.set()
            return keys

        with write_as(ClosureRun(1, 9, 0)):
            shared = next_key("w")
            one, other = strategy.local_results(strategy.run(write))
            return [shared, *one, *other]

    assert run_replicas(first=0) == run_replicas(first=1)
    assert len({key.number for key in run_replicas(first=0)}) == 5
