"""Requests made in a scope of cached reads."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

import headrace as hr
from headrace.errors import UnavailableError
from headrace.parameter_server.operations import GatherRows, ReadShard
from headrace.parameter_server.read_cache import current_read_cache, execute_with_prefetch
from headrace.parameter_server.server_requests import OperationRequest
from headrace.serving.rpc import Done
from tests.parameter_server.small_cluster import cluster


def _requests(strategy) -> int:
    servers = strategy.cluster.servers
    return sum(servers.status(server).requests for server in range(len(servers)))


def test_named_variables_are_prefetched_with_the_first_read():
    with cluster(2, hr.distribute.partitioners.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            rows = hr.Variable(np.arange(80_000.0).reshape(20_000, 4), name="rows")
            small = hr.Variable(np.arange(4.0), name="small")
            one = hr.Variable(7.0, name="one")
            table = hr.EmbeddingTable(4, name="table", initializer=1.0)
        ids = np.array([[19_999, 3], [3, 0]])
        for _ in range(3):
            before = _requests(strategy)
            with hr.distribute.cache_variable_reads(small, one, small):
                assert rows.gather(ids)[..., 0].tolist() == [[79_996, 12], [12, 0]]
                small.assign(np.full(4, 5.0))
                assert small.read().tolist() == [0, 1, 2, 3]
                assert small.gather([3]).tolist() == [3]
                assert float(one) == 7
            assert (
                _requests(strategy) - before == 4
            )  # one per server to read, and one per server to assign
            small.assign(np.arange(4.0))
        before = _requests(strategy)
        with hr.distribute.cache_variable_reads(one, small):
            assert small[1] == 1  # a part of a prefetched variable
            assert float(one) == 7
        with hr.distribute.cache_variable_reads(small):
            assert table.lookup([5, 6, 7, 8]).tolist() == [[1] * 4] * 4
            assert small.read().tolist() == [0, 1, 2, 3]
        assert _requests(strategy) - before == 4
        with hr.distribute.cache_variable_reads(small):
            pass  # a named variable is not read without another read
        assert _requests(strategy) - before == 4
        for wrong in ([small, one], table, 3):
            with pytest.raises(TypeError, match=r"as separate arguments, but got a value of type"):
                hr.distribute.cache_variable_reads(wrong).__enter__()


class _Shards:
    """A variable with one shard that records whether the scope has it during the request."""

    def __init__(self, *, fails: bool) -> None:
        self.servers = self
        self.fails = fails
        self.had_variable: list[bool] = []

    def read_requests(self):
        return [OperationRequest(0, ReadShard("v"))]

    def join_value(self, answers):
        return answers[0][1][0]

    def execute_all(self, requests):
        self.had_variable.append(current_read_cache().has(self))
        if self.fails:
            raise UnavailableError("unreachable")
        return [(Done(), [np.ones(1)]) for _ in requests]


@pytest.mark.parametrize("fails", [False, True])
def test_named_variables_are_read_whole_while_their_read_is_pending(fails: bool):
    shards = _Shards(fails=fails)
    variable = SimpleNamespace(sharded=shards)
    with hr.distribute.cache_variable_reads(variable):
        # The state that another replica sees while the read is pending.
        with pytest.raises(UnavailableError) if fails else contextlib.nullcontext():
            execute_with_prefetch(shards, [OperationRequest(0, GatherRows("w"))])
        assert current_read_cache().has(shards)
    assert shards.had_variable == [True]
