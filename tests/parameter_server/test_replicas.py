"""Two servers have each store: given losses, nothing that was answered is lost."""

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
from tests.parameter_server.small_cluster import is_whole, resolver_of, restarted, until

SECONDS = 30.0


# --- seats ---------------------------------------------------------------------------------------


def _whole(seat: ReplicaState) -> ReplicaState:
    seat.is_complete = True
    return seat


def test_a_seat_that_follows_leads_only_when_the_other_is_found_gone() -> None:
    first, second = ReplicaState(), ReplicaState()
    assert first.decide("", peer_unavailable=True) is RequestDecision.NO_STATE
    assert second.become_follower(1, "life")
    first.become_leader("life")
    assert second.decide("life", peer_unavailable=True) is RequestDecision.NO_STATE, (
        "it has not all yet"
    )
    _whole(second)
    assert first.decide("life", peer_unavailable=False) is RequestDecision.EXECUTE
    assert first.decide("before", peer_unavailable=False) is RequestDecision.STATE_LOST
    assert second.decide("life", peer_unavailable=False) is RequestDecision.NOT_LEADER
    assert second.decide("before", peer_unavailable=True) is RequestDecision.STATE_LOST
    assert second.decide("life", peer_unavailable=True) is RequestDecision.TAKE_OVER
    assert (second.role, second.term) == (ReplicaRole.LEADER, 2)
    assert not second.is_following(1, "life"), "what the first one still says is refused"


def test_a_seat_with_contents_gives_them_up_for_a_later_epoch_of_them_alone() -> None:
    leading = ReplicaState()
    leading.become_leader("life")
    assert not leading.become_follower(1, "life")
    assert not leading.become_follower(5, "other")
    assert leading.become_follower(2, "life")
    _whole(leading)
    assert not leading.become_follower(1, "life")
    assert not leading.become_follower(9, "other"), (
        "contents do not begin again where there are some"
    )
    assert leading.become_follower(2, "life"), "the connection was lost for a while"
    assert leading.become_follower(1, "other"), "it had not all of them"


# --- servers of this process ---------------------------------------------------------------------


class Servers:
    """Parameter servers at lasting addresses."""

    def __init__(self, stack: ExitStack, count: int, security: Security | None) -> None:
        self.security = security
        self.running = [ParameterServer(index, security=security) for index in range(count)]
        self.addresses = [each.address for each in self.running]
        stack.callback(lambda: [each.stop() for each in self.running])

    def stop(self, index: int) -> None:
        self.running[index].stop()

    def start(self, index: int) -> None:
        self.running[index] = restarted(self.running[index], security=self.security)

    def lose_all(self) -> None:
        """Stop them all, and start them again, empty."""
        for each in self.running:
            each.stop()
        for index in range(len(self.running)):
            self.start(index)

    def wait_until_whole(self) -> None:
        """Wait until each store is on two servers."""
        until(lambda: is_whole([each.status().replicas for each in self.running]), SECONDS)


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


def _written(v: Any, w: Any, table: Any, optimizer: Any) -> list[Any]:
    """Write something, and return all that there is."""
    v.assign_add(np.ones((6, 2)))
    of_rows = hr.IndexedSlices(np.ones((20, 2)), np.arange(20))
    optimizer.apply_gradients([(np.ones(3, np.float32), w), (of_rows, table)])
    return _read(v, w, table, optimizer)


def _read(v: Any, w: Any, table: Any, optimizer: Any) -> list[Any]:
    return [v.read(), w.read(), table.gather(np.arange(20)), optimizer.iterations]


def _same(one: list[Any], other: list[Any]) -> None:
    for mine, yours in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, yours)


def _made(strategy: Any) -> tuple[Any, Any, Any, Any]:
    with strategy.scope():
        v = hr.Variable(np.zeros((6, 2)), name="v")
        w = hr.Variable(np.zeros(3, np.float32), name="w")
        table = hr.EmbeddingTable(2, name="table", dtype="float64")
        optimizer = hr.optimizers.Adam(0.1)
    table.lookup(np.arange(20))
    return v, w, table, optimizer


def test_what_a_server_had_is_on_another_one_and_one_that_is_back_is_filled() -> None:
    with _cluster(3, variable_partitioner=hr.distribute.partitioners.FixedShardsPartitioner(2)) as (
        servers,
        strategy,
    ):
        made = _made(strategy)
        for lost in (0, 1, 2, 0):
            there = _written(*made)
            servers.wait_until_whole()
            servers.stop(lost)
            began = time.monotonic()
            _same(_read(*made), there)
            assert time.monotonic() - began < 5.0
            there = _written(*made)
            servers.start(lost)
            _same(_read(*made), there)
        assert made[0].read().tolist() == [[8.0, 8.0]] * 6
        assert made[3].iterations == 8


def test_values_of_all_shapes_and_dtypes_are_on_both_servers() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    ones = np.ones((2, 1, 2), bfloat16)
    firsts = [np.float64(3.0), np.bool_(True), np.zeros((0, 3)), np.arange(3), ones]
    with _cluster() as (servers, strategy):
        with strategy.scope():
            made = [hr.Variable(first, name=f"v{n}") for n, first in enumerate(firsts)]
            table = hr.EmbeddingTable(2, name="waiting", admission=3)
            optimizer = hr.optimizers.Adam(name="adam")
            untrained = hr.optimizers.SGD(momentum=0.9, name="sgd")
        for lost in (0, 1, 0):
            made[0].assign_add(np.float64(1.0))
            made[1].assign(np.bool_(False))
            gradient = np.full((2, 1, 2), 0.5, np.float32)
            optimizer.apply_gradients([(gradient, made[4]), (np.array(2.0), made[0])])
            table.lookup(np.arange(5))
            made[4].set_slot(untrained, "momentum", gradient + lost)
            there = [each.read() for each in made]
            servers.wait_until_whole()
            servers.stop(lost)
            _same([each.read() for each in made], there)
            assert np.array_equal(made[4].read_slot(untrained, "momentum"), gradient + lost)
            servers.start(lost)
        assert sum(len(ids) for ids, _ in table.export()) == 5, "ids that wait are counted on both"


def test_servers_that_check_keys_let_each_other_in(tmp_path: Path) -> None:
    new_keys(tmp_path)
    with _cluster(keys=tmp_path) as (servers, strategy):
        made = _made(strategy)
        there = _written(*made)
        servers.wait_until_whole()
        servers.stop(0)
        _same(_read(*made), there)


def test_a_loss_is_noticed_and_mended_also_where_nobody_writes() -> None:
    with _cluster() as (servers, strategy):
        made = _made(strategy)
        there = _written(*made)
        for lost in (1, 0):
            servers.wait_until_whole()
            servers.stop(lost)
            servers.start(lost)
            _same(_read(*made), there)


def _ask(address: str, message: Any) -> Any:
    channel = zeromq.connect(address, reply_type=ServerReply)
    try:
        return channel.call(message, timeout=SECONDS)[0]
    finally:
        channel.close()


def test_a_server_that_was_taken_for_gone_gives_up_what_it_had_and_loses_no_write() -> None:
    with _cluster() as (servers, strategy):
        made = _made(strategy)
        there = _written(*made)
        servers.wait_until_whole()
        # Somebody who cannot reach server 0 asks server 1 for its store.
        answer = _ask(
            servers.addresses[1],
            ExecuteOperations((DescribeStore(),), ((),), store=0, peer_unavailable=True),
        )
        assert isinstance(answer, OperationResults)
        # Its next write is one for server 1 to carry out, whoever is asked.
        there = [there[0] + 1.0, *there[1:]]
        made[0].assign_add(np.ones((6, 2)))
        _same(_read(*made), there)
        servers.wait_until_whole()
        assert servers.running[1].status().replicas == {0: "leader", 1: "leader"}
        servers.stop(1)
        _same(_read(*made), there)


def test_new_contents_begin_only_where_both_servers_have_none() -> None:
    with _cluster() as (servers, strategy):
        made = _made(strategy)
        there = _written(*made)
        servers.wait_until_whole()
        seats = (servers.addresses[0], servers.addresses[1])
        servers.stop(0)
        servers.start(0)
        _ask(servers.addresses[0], LeadEmptyStore(store=0, replica_addresses=seats))
        answer = _ask(
            servers.addresses[0],
            ExecuteOperations((DescribeStore(),), ((),), store=0, peer_unavailable=True),
        )
        assert answer == NotLeader(is_empty=True)
        _same(_read(*made), there)
        servers.wait_until_whole()
        assert servers.running[1].status().replicas[0] == "leader"


def test_what_both_servers_had_comes_from_a_checkpoint(tmp_path: Path) -> None:
    with _cluster() as (servers, strategy):
        v, w, table, optimizer = made = _made(strategy)
        there = _written(*made)
        checkpoint = hr.Checkpoint(v=v, w=w, table=table, optimizer=optimizer)
        with hr.CheckpointManager(checkpoint, tmp_path, incremental_seconds=None) as manager:
            manager.save()
            _written(*made)
            servers.lose_all()
            _same(_read(*made), there)
            # It was restored into both.
            servers.wait_until_whole()
            servers.stop(0)
            _same(_read(*made), there)
            # A worker that has seen later steps, which are lost, may count on all the same.
            strategy.cluster.counters[f"{optimizer.name}/iterations"] = 9
            assert _written(*made)[-1] == there[-1] + 1


def test_an_increment_after_a_loss_has_what_was_written_before_it(tmp_path: Path) -> None:
    with _cluster() as (servers, strategy):
        v, w, table, optimizer = made = _made(strategy)
        checkpoint = hr.Checkpoint(v=v, w=w, table=table, optimizer=optimizer)
        with hr.CheckpointManager(checkpoint, tmp_path, incremental_seconds=3600) as manager:
            manager.save()
            _written(*made)
            servers.wait_until_whole()
            servers.stop(0)
            # A write without a key that meets the end of its server is an error, and rightly so.
            _read(*made)
            there = _written(*made)
            servers.start(0)
            manager.save_increment()
            _written(*made)
            servers.lose_all()
            _same(_read(*made), there)
