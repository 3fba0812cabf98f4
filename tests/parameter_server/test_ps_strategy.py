from __future__ import annotations

import json
import pickle
import warnings

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from headrace.parameter_server.cluster_registry import (
    ServerCluster,
    register_cluster,
    unregister_cluster,
)
from headrace.parameter_server.partitioners import FixedShardsPartitioner
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.parameter_server.write_context import ClosureRun, write_as
from tests.parameter_server.small_cluster import cluster, resolver_of, servers, strategy_at

ONE = {"worker": ["a:1"], "ps": ["b:1"]}


def resolver(cluster, task_type=None, task_id=None):
    return hr.distribute.SimpleClusterResolver(
        hr.distribute.ClusterSpec(cluster), task_type=task_type, task_id=task_id
    )


@pytest.mark.catalogue("1.6.1", "3.7.22-26")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (resolver({}), "Cluster spec must be non-empty"),
        (resolver({**ONE, "some_arbitrary_name": ["c:1"]}), "Disallowed task type found in"),
        (resolver(ONE, "foobar"), "Unrecognized task_type: foobar, valid task types are"),
        (resolver(ONE, "chief"), "task_type 'chief' not found in cluster_spec"),
        (resolver({**ONE, "chief": ["c:1", "d:1"]}), "There must be at most one 'chief' job."),
        (
            resolver({**ONE, "evaluator": ["c:1", "d:1"]}),
            "There must be at most one 'evaluator' job.",
        ),
        (resolver(ONE, "worker", 3), "The task_id 3 exceeds the maximum id of worker"),
        (resolver({"worker": ["a:1"]}), "There must be at least one ps."),
        (resolver({"ps": ["a:1"]}), "There must be at least one worker."),
        (resolver({"worker": ["a:1"], "ps": {2: "b:1"}}), "without gaps"),
    ],
)
def test_a_cluster_that_lacks_something_is_refused(given, words):
    with pytest.raises(ValueError, match=words.rstrip(".")):
        ParameterServerStrategy(given)


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"mode": "slow"}, ValueError, "mode"),
        ({"staleness": -1}, ValueError, "staleness"),
        ({"staleness": 1.5}, TypeError, "staleness"),
        ({"mode": "sync", "staleness": 1}, ValueError, "no write is stale"),
        ({"round_size": 2}, ValueError, "round_size"),
        ({"mode": "sync", "round_size": 0}, ValueError, "round_size"),
        ({"replication": 0}, ValueError, "replication"),
        ({"replication": 2}, ValueError, "there is 1 parameter server"),
        ({"replication": 3}, ValueError, "must be 1 or 2"),
        ({"placement": "alphabetical"}, ValueError, "placement"),
        ({"variable_partitioner": 3}, TypeError, "variable_partitioner"),
        ({"security": "keys/"}, TypeError, "security"),
        ({"server_timeout": 0}, ValueError, "server_timeout"),
        ({"replicas": 0}, ValueError, "replicas"),
        ({"cluster_resolver": ONE}, TypeError, "cluster_resolver"),
        (
            {"cluster_resolver": hr.distribute.ClusterSpec(ONE)},
            TypeError,
            r"SimpleClusterResolver\(spec\) is one",
        ),
        ({"variable_partitioner": FixedShardsPartitioner}, TypeError, "make one of it"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong, kind, words):
    with pytest.raises(kind, match=words):
        ParameterServerStrategy(**{"cluster_resolver": resolver(ONE), **wrong})


@pytest.mark.catalogue("2.14.1")
def test_the_cluster_comes_from_the_environment_where_nobody_says(monkeypatch):
    with servers(1) as (server,):
        monkeypatch.setenv(
            "TF_CONFIG",
            json.dumps(
                {
                    "cluster": {
                        "worker": ["w:1"],
                        "ps": [f"grpc://{server.address}"],
                        "chief": ["c:1"],
                    },
                    "task": {"type": "chief", "index": 0},
                }
            ),
        )
        strategy = ParameterServerStrategy()
        assert strategy.cluster_resolver.task_type == "chief"
        assert len(strategy.cluster.servers) == 1
        strategy.close()


@pytest.mark.catalogue("1.6.3")
def test_a_server_that_is_not_there_is_named():
    with servers(1) as (server,):
        address = server.address
    with pytest.raises(UnavailableError, match=f"parameter server 0 at {address}"):
        ParameterServerStrategy(resolver_of(address), server_timeout=0.2)


@pytest.mark.catalogue("1.6.4", "3.1.42", "3.7.4-6")
def test_what_runs_without_a_coordinator_runs_here_with_one_warning():
    with cluster(1, staleness=3) as strategy:
        assert (strategy.num_replicas_in_sync, strategy.mode, strategy.staleness) == (1, "async", 3)
        with strategy.scope():
            v = hr.Variable(1.0)
            assert hr.distribute.get_strategy() is strategy
        with pytest.warns(UserWarning, match="is invoked without using `ClusterCoordinator.sch"):
            assert strategy.run(lambda x: v.read() + x, args=(1.0,)) == 2.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert strategy.reduce("SUM", 5.0, axis=None) == 5.0
            strategy.run(lambda: v.assign(7.0))
        assert v.read() == 7.0


@pytest.mark.catalogue("1.6.4", "2.8.14")
def test_what_a_closure_runs_is_not_warned_about():
    with cluster(1) as strategy, write_as(ClosureRun(1, 1, 0)):
        assert strategy.run(lambda: 3) == 3


@pytest.mark.catalogue("2.9.8", "3.1.48-50", "3.1.53", "3.7.7")
def test_a_dataset_is_for_workers_to_read():
    with cluster(1, replicas=2) as strategy:
        dataset = hr.Dataset.range(6).batch(4)
        whole = strategy.experimental_distribute_dataset(dataset)
        words = "To use this dataset, you need to pass this dataset to ClusterCoordinator"
        for use in (iter, len, list):
            with pytest.raises(ValueError, match=words):
                use(whole)
        steps = pickle.loads(pickle.dumps(whole)).build()
        assert [[v.tolist() for v in step.values] for step in steps] == [
            [[0, 1], [2, 3]],
            [[4], [5]],
        ]
        assert "create_per_worker_dataset" in repr(whole)

        def make(context):
            assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
            return hr.Dataset.range(4).batch(context.get_per_replica_batch_size(4))

        own = strategy.distribute_datasets_from_function(make)
        with pytest.raises(ValueError, match="You need to use this dataset in ClusterCoordinator"):
            iter(own)
        (step,) = own.build()
        assert [value.tolist() for value in step.values] == [[0, 1], [2, 3]]
        assert own.element_spec is not None
        with pytest.raises(TypeError, match="Dataset"):
            strategy.distribute_dataset([1, 2])
        with pytest.raises(TypeError, match="dataset_fn"):
            strategy.distribute_datasets_from_function(dataset)


def test_a_handle_resolves_to_the_strategy_here_and_to_one_of_its_own_on_a_worker():
    with cluster(1, staleness=2) as strategy:
        data = pickle.dumps(strategy)
        assert pickle.loads(data) is strategy
        worker = ServerCluster(strategy.cluster_id, strategy.cluster.servers)
        register_cluster(worker)
        assert pickle.loads(data) is strategy, "who was here first"
        unregister_cluster(strategy.cluster)
        there = pickle.loads(data)
        assert there is not strategy
        assert there.staleness == 2
        assert pickle.loads(data) is there
        with write_as(ClosureRun(1, 1, 0)):
            assert there.run(lambda: 1) == 1
        assert there.worker_addresses == []
        unregister_cluster(worker)


def test_extended_knows_the_servers():
    with cluster(2) as strategy:
        assert strategy.extended.parameter_devices == ("ps:0", "ps:1")
        assert strategy.extended.worker_devices == ("cpu:0",)
        with pytest.raises(AttributeError, match=r"strategy\.run"):
            _ = strategy.extended.call_for_each_replica


def test_two_strategies_do_not_mix():
    with cluster(1) as strategy, cluster(1) as other, strategy.scope():
        with pytest.raises(FailedPreconditionError, match="Mixing"):
            other.run(lambda: 1)
        v = hr.Variable(np.zeros(2))
        with pytest.raises(ValueError, match="colocate"):
            other.extended.colocate_vars_with(v).__enter__()


def test_a_name_that_a_part_of_another_variable_has_is_refused():
    with cluster(2, FixedShardsPartitioner(2)) as strategy, strategy.scope():
        hr.Variable(np.zeros(4), name="a")
        with pytest.raises(ValueError, match=r"'a/part_0', which is what a part of .*'a' is call"):
            hr.Variable(1.0, name="a/part_0")
        assert hr.Variable(1.0, name="a/part_of").name == "a/part_of"


def test_a_name_that_is_taken_by_another_variable_is_refused_wherever_its_parts_are():
    with servers(3) as started:
        with strategy_at(started) as first, first.scope():
            hr.Variable(np.ones((4, 2)), name="v")
        with strategy_at(started) as same, same.scope():
            assert hr.Variable(np.zeros((4, 2)), name="v").read().sum() == 8
        found = r"'v' of shape \(4, 2\) and dtype float64 in 1 shard, .* cannot be made of "
        with strategy_at(started, FixedShardsPartitioner(2)) as other, other.scope():
            with pytest.raises(AlreadyExistsError, match=found + r"shape \(4, 2\).* in 2 shards"):
                hr.Variable(np.zeros((4, 2)), name="v")
            with pytest.raises(AlreadyExistsError, match=found + r"shape \(3,\) and dtype int64"):
                hr.Variable(np.zeros(3, int), name="v")
        with strategy_at(started) as later, later.scope():
            hr.Variable(0.0, name="u")
            with pytest.raises(AlreadyExistsError, match=r"'v' on server 0, and .* on server 1"):
                hr.Variable(np.zeros((4, 2)), name="v")


def test_a_table_that_is_there_in_another_form_is_said_to_differ_in_what():
    with servers(1) as (server,):
        with strategy_at([server]) as first, first.scope():
            hr.EmbeddingTable(2, name="t")
        differs = pytest.raises(AlreadyExistsError, match=r"table t that .*: with dim=2, and not 3")
        with strategy_at([server]) as second, second.scope(), differs:
            hr.EmbeddingTable(3, name="t")


def test_a_variable_of_each_workers_own_needs_a_coordinator():
    with (
        cluster(1) as strategy,
        strategy.scope(),
        pytest.raises(FailedPreconditionError, match="ClusterCoordinator"),
    ):
        hr.Variable(0.0, per_worker_variable=True)


def test_a_task_that_should_listen_is_named_where_it_makes_a_coordinator(caplog):
    with servers(1) as (server,):
        spec = {"worker": ["localhost:1"], "ps": [server.address]}
        strategy = ParameterServerStrategy(resolver(spec, "worker", 0))
        with hr.coordinator.ClusterCoordinator(strategy):
            pass
        strategy.close()
    assert "this process is a worker task of its cluster" in caplog.text
    assert "hr.distribute.Server" in caplog.text


def test_numbers_that_are_too_large_for_a_dtype_are_refused_by_their_value():
    with cluster(1) as strategy, strategy.scope():
        whole = hr.Variable(np.zeros(2, np.int32), name="whole")
        real = hr.Variable(np.zeros(2, np.float32), name="real")
        table = hr.EmbeddingTable(2, name="table")
        for write in (whole.assign, whole.assign_add):
            with pytest.raises(
                InvalidArgumentError, match=r"'whole' has dtype int32, .* value 10995"
            ):
                write(np.array([1, 2**40]))
        with pytest.raises(InvalidArgumentError, match=r"'whole' has dtype int32"):
            whole.scatter_update([0], np.array([2**40]))
        for write in (real.assign, real.assign_sub):
            with pytest.raises(InvalidArgumentError, match=r"'real' .* the value 1e\+300 of dtype"):
                write(np.array([1.0, 1e300]))
        with pytest.raises(InvalidArgumentError, match=r"EmbeddingTable 'table' has dtype float32"):
            table.assign([1], np.full((1, 2), 1e300))
        with pytest.raises(
            InvalidArgumentError, match=r"the variable has dtype int8, .* value 300"
        ):
            hr.Variable([1, 300], dtype="int8")
        real.assign(np.array([0.1, np.inf]))
        whole.assign(np.array([-(2**31), 2**31 - 1]))
        assert real.read().tolist() == [np.float32(0.1), np.inf]
        assert whole.read().tolist() == [-(2**31), 2**31 - 1]
