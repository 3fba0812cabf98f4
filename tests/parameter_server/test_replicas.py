"""Stores on two servers: acknowledged writes survive the loss of one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.parameter_server.messages import (
    ExecuteOperations,
    LeadEmptyStore,
    NotLeader,
    OperationResults,
    ServerReply,
)
from headrace.parameter_server.operations import DescribeStore
from headrace.parameter_server.replica_state import ReplicaRole, ReplicaState, RequestDecision
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.transport import zeromq
from headrace.transport.security import Security, new_keys
from tests.parameter_server.small_cluster import is_replicated, resolver_of, restarted, until

SECONDS = 30.0


# --- states of replicas ---------------------------------------------------------------------------


def _complete(state: ReplicaState) -> ReplicaState:
    state.is_complete = True
    return state


def test_a_follower_leads_only_after_the_leader_is_unavailable() -> None:
    first, second = ReplicaState(), ReplicaState()
    assert first.decide("", peer_unavailable=True) is RequestDecision.NO_STATE
    assert second.become_follower(1, "state")
    first.become_leader("state")
    assert second.decide("state", peer_unavailable=True) is RequestDecision.NO_STATE, (
        "its contents are incomplete"
    )
    _complete(second)
    assert first.decide("state", peer_unavailable=False) is RequestDecision.EXECUTE
    assert first.decide("earlier", peer_unavailable=False) is RequestDecision.STATE_LOST
    assert second.decide("state", peer_unavailable=False) is RequestDecision.NOT_LEADER
    assert second.decide("earlier", peer_unavailable=True) is RequestDecision.STATE_LOST
    assert second.decide("state", peer_unavailable=True) is RequestDecision.TAKE_OVER
    assert (second.role, second.term) == (ReplicaRole.LEADER, 2)
    assert not second.is_following(1, "state"), "messages of the former leader are rejected"


def test_a_replica_discards_its_contents_only_for_a_later_term() -> None:
    replica = ReplicaState()
    replica.become_leader("state")
    assert not replica.become_follower(1, "state")
    assert not replica.become_follower(5, "other")
    assert replica.become_follower(2, "state")
    _complete(replica)
    assert not replica.become_follower(1, "state")
    assert not replica.become_follower(9, "other"), "a new store must not replace existing contents"
    assert replica.become_follower(2, "state"), "the same leader may sync it again"
    assert replica.become_follower(1, "other"), "incomplete contents may be replaced"


# --- servers of this process ---------------------------------------------------------------------


class Servers:
    """Parameter servers that keep their addresses."""

    def __init__(self, stack: ExitStack, count: int, security: Security | None) -> None:
        self.security = security
        self.running = [ParameterServer(index, security=security) for index in range(count)]
        self.addresses = [each.address for each in self.running]
        stack.callback(lambda: [each.stop() for each in self.running])

    def stop(self, index: int) -> None:
        self.running[index].stop()

    def start(self, index: int) -> None:
        self.running[index] = restarted(self.running[index], security=self.security)

    def restart_all(self) -> None:
        """Restart all servers empty."""
        for each in self.running:
            each.stop()
        for index in range(len(self.running)):
            self.start(index)

    def wait_until_replicated(self) -> None:
        """Wait until each store is on two servers."""
        until(lambda: is_replicated([each.status().replicas for each in self.running]), SECONDS)


@contextmanager
def _cluster(
    count: int = 2, keys: Path | None = None, **options: Any
) -> Iterator[tuple[Servers, Any]]:
    with ExitStack() as stack:
        servers = Servers(stack, count, keys and Security.load(keys, "server"))
        if keys is not None:
            options["security"] = Security.load(keys, "client")
        strategy = ParameterServerStrategy(
            resolver_of(*servers.addresses), replication=2, server_timeout=SECONDS, **options
        )
        stack.callback(strategy.close)
        yield servers, strategy


def _write_all(v: Any, w: Any, table: Any, optimizer: Any) -> list[Any]:
    """Write to all objects, and return their contents."""
    v.assign_add(np.ones((6, 2)))
    slices = hr.IndexedSlices(np.ones((20, 2)), np.arange(20))
    optimizer.apply_gradients([(np.ones(3, np.float32), w), (slices, table)])
    return _read_all(v, w, table, optimizer)


def _read_all(v: Any, w: Any, table: Any, optimizer: Any) -> list[Any]:
    return [v.read(), w.read(), table.gather(np.arange(20)), optimizer.iterations]


def _assert_equal(one: list[Any], other: list[Any]) -> None:
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def _create_all(strategy: Any) -> tuple[Any, Any, Any, Any]:
    with strategy.scope():
        v = hr.Variable(np.zeros((6, 2)), name="v")
        w = hr.Variable(np.zeros(3, np.float32), name="w")
        table = hr.EmbeddingTable(2, name="table", dtype="float64")
        optimizer = hr.optimizers.Adam(0.1)
    table.lookup(np.arange(20))
    return v, w, table, optimizer


def test_another_server_takes_over_and_a_restarted_one_is_synced() -> None:
    with _cluster(3, variable_partitioner=hr.distribute.partitioners.FixedShardsPartitioner(2)) as (
        servers,
        strategy,
    ):
        objects = _create_all(strategy)
        for lost in (0, 1, 2, 0):
            expected = _write_all(*objects)
            servers.wait_until_replicated()
            servers.stop(lost)
            started_at = time.monotonic()
            _assert_equal(_read_all(*objects), expected)
            assert time.monotonic() - started_at < 5.0
            expected = _write_all(*objects)
            servers.start(lost)
            _assert_equal(_read_all(*objects), expected)
        assert objects[0].read().tolist() == [[8.0, 8.0]] * 6
        assert objects[3].iterations == 8


def test_all_shapes_and_dtypes_are_replicated() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    ones = np.ones((2, 1, 2), bfloat16)
    firsts = [np.float64(3.0), np.bool_(True), np.zeros((0, 3)), np.arange(3), ones]
    with _cluster() as (servers, strategy):
        with strategy.scope():
            objects = [hr.Variable(first, name=f"v{n}") for n, first in enumerate(firsts)]
            table = hr.EmbeddingTable(2, name="waiting", admission=3)
            optimizer = hr.optimizers.Adam(name="adam")
            untrained = hr.optimizers.SGD(momentum=0.9, name="sgd")
        for lost in (0, 1, 0):
            objects[0].assign_add(np.float64(1.0))
            objects[1].assign(np.bool_(False))
            gradient = np.full((2, 1, 2), 0.5, np.float32)
            optimizer.apply_gradients([(gradient, objects[4]), (np.array(2.0), objects[0])])
            table.lookup(np.arange(5))
            objects[4].set_slot(untrained, "momentum", gradient + lost)
            expected = [each.read() for each in objects]
            servers.wait_until_replicated()
            servers.stop(lost)
            _assert_equal([each.read() for each in objects], expected)
            assert np.array_equal(objects[4].read_slot(untrained, "momentum"), gradient + lost)
            servers.start(lost)
        assert sum(len(ids) for ids, _ in table.export()) == 5, (
            "counts of waiting ids are replicated"
        )


def test_replication_works_between_servers_with_security(tmp_path: Path) -> None:
    new_keys(tmp_path)
    with _cluster(keys=tmp_path) as (servers, strategy):
        objects = _create_all(strategy)
        expected = _write_all(*objects)
        servers.wait_until_replicated()
        servers.stop(0)
        _assert_equal(_read_all(*objects), expected)


def test_a_lost_replica_is_replaced_without_writes() -> None:
    with _cluster() as (servers, strategy):
        objects = _create_all(strategy)
        expected = _write_all(*objects)
        for lost in (1, 0):
            servers.wait_until_replicated()
            servers.stop(lost)
            servers.start(lost)
            _assert_equal(_read_all(*objects), expected)


def _call(address: str, message: Any) -> Any:
    channel = zeromq.connect(address, reply_type=ServerReply)
    try:
        return channel.call(message, timeout=SECONDS)[0]
    finally:
        channel.close()


def test_a_paused_leader_discards_its_contents_and_no_write_is_lost() -> None:
    with _cluster() as (servers, strategy):
        objects = _create_all(strategy)
        expected = _write_all(*objects)
        servers.wait_until_replicated()
        # A client that cannot reach server 0 sends a request for its store to server 1.
        answer = _call(
            servers.addresses[1],
            ExecuteOperations((DescribeStore(),), ((),), store=0, peer_unavailable=True),
        )
        assert isinstance(answer, OperationResults)
        # The next write must be executed by server 1, wherever it is sent.
        expected = [expected[0] + 1.0, *expected[1:]]
        objects[0].assign_add(np.ones((6, 2)))
        _assert_equal(_read_all(*objects), expected)
        servers.wait_until_replicated()
        assert servers.running[1].status().replicas == {0: "leader", 1: "leader"}
        servers.stop(1)
        _assert_equal(_read_all(*objects), expected)


def test_a_store_starts_empty_only_if_both_replicas_are_empty() -> None:
    with _cluster() as (servers, strategy):
        objects = _create_all(strategy)
        expected = _write_all(*objects)
        servers.wait_until_replicated()
        addresses = (servers.addresses[0], servers.addresses[1])
        servers.stop(0)
        servers.start(0)
        _call(servers.addresses[0], LeadEmptyStore(store=0, replica_addresses=addresses))
        answer = _call(
            servers.addresses[0],
            ExecuteOperations((DescribeStore(),), ((),), store=0, peer_unavailable=True),
        )
        assert answer == NotLeader(is_empty=True)
        _assert_equal(_read_all(*objects), expected)
        servers.wait_until_replicated()
        assert servers.running[1].status().replicas[0] == "leader"


def test_contents_lost_on_both_servers_are_restored_from_a_checkpoint(tmp_path: Path) -> None:
    with _cluster() as (servers, strategy):
        v, w, table, optimizer = objects = _create_all(strategy)
        expected = _write_all(*objects)
        checkpoint = hr.Checkpoint(v=v, w=w, table=table, optimizer=optimizer)
        with hr.CheckpointManager(checkpoint, tmp_path, incremental_seconds=None) as manager:
            manager.save()
            _write_all(*objects)
            servers.restart_all()
            _assert_equal(_read_all(*objects), expected)
            # Both replicas have the restored contents.
            servers.wait_until_replicated()
            servers.stop(0)
            _assert_equal(_read_all(*objects), expected)
            # A worker that has seen later steps, now lost, may continue to count.
            strategy.cluster.counters[f"{optimizer.name}/iterations"] = 9
            assert _write_all(*objects)[-1] == expected[-1] + 1


def test_an_increment_after_a_takeover_contains_earlier_writes(tmp_path: Path) -> None:
    with _cluster() as (servers, strategy):
        v, w, table, optimizer = objects = _create_all(strategy)
        checkpoint = hr.Checkpoint(v=v, w=w, table=table, optimizer=optimizer)
        with hr.CheckpointManager(checkpoint, tmp_path, incremental_seconds=3600) as manager:
            manager.save()
            _write_all(*objects)
            servers.wait_until_replicated()
            servers.stop(0)
            # An unkeyed write during the loss of its server would be an error; a read is retried.
            _read_all(*objects)
            expected = _write_all(*objects)
            servers.start(0)
            manager.save_increment()
            _write_all(*objects)
            servers.restart_all()
            _assert_equal(_read_all(*objects), expected)
