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

ONE_EACH = {"worker": ["a:1"], "ps": ["b:1"]}


def resolver(cluster, task_type=None, task_id=None):
    return hr.distribute.SimpleClusterResolver(
        hr.distribute.ClusterSpec(cluster), task_type=task_type, task_id=task_id
    )


@pytest.mark.catalogue("1.6.1", "3.7.22-26")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (resolver({}), "Cluster spec must be non-empty"),
        (resolver({**ONE_EACH, "some_arbitrary_name": ["c:1"]}), "Disallowed task type found in"),
        (resolver(ONE_EACH, "foobar"), "Unrecognized task_type: foobar, valid task types are"),
        (resolver(ONE_EACH, "chief"), "task_type 'chief' not found in cluster_spec"),
        (resolver({**ONE_EACH, "chief": ["c:1", "d:1"]}), "There must be at most one 'chief' job."),
        (
            resolver({**ONE_EACH, "evaluator": ["c:1", "d:1"]}),
            "There must be at most one 'evaluator' job.",
        ),
        (resolver(ONE_EACH, "worker", 3), "The task_id 3 exceeds the maximum id of worker"),
        (resolver({"worker": ["a:1"]}), "There must be at least one ps."),
        (resolver({"ps": ["a:1"]}), "There must be at least one worker."),
        (resolver({"worker": ["a:1"], "ps": {2: "b:1"}}), "without gaps"),
    ],
)
def test_invalid_clusters_are_rejected(given, message):
    with pytest.raises(ValueError, match=message.rstrip(".")):
        ParameterServerStrategy(given)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"mode": "slow"}, ValueError, "mode"),
        ({"staleness": -1}, ValueError, "staleness"),
        ({"staleness": 1.5}, TypeError, "staleness"),
        ({"mode": "sync", "staleness": 1}, ValueError, "no write is stale"),
        ({"round_size": 2}, ValueError, "round_size"),
        ({"mode": "sync", "round_size": 0}, ValueError, "round_size"),
        ({"replication": 0}, ValueError, "replication"),
        ({"replication": 2}, ValueError, "number of parameter servers, 1"),
        ({"replication": 3}, ValueError, "must be 1 or 2"),
        ({"placement": "alphabetical"}, ValueError, "placement"),
        ({"variable_partitioner": 3}, TypeError, "variable_partitioner"),
        ({"security": "keys/"}, TypeError, "security"),
        ({"server_timeout": 0}, ValueError, "server_timeout"),
        ({"replicas": 0}, ValueError, "replicas"),
        ({"cluster_resolver": ONE_EACH}, TypeError, "cluster_resolver"),
        (
            {"cluster_resolver": hr.distribute.ClusterSpec(ONE_EACH)},
            TypeError,
            r"use hr.distribute.SimpleClusterResolver\(spec\)",
        ),
        ({"variable_partitioner": FixedShardsPartitioner}, TypeError, "pass an instance"),
    ],
)
def test_invalid_arguments_are_rejected(wrong, kind, message):
    with pytest.raises(kind, match=message):
        ParameterServerStrategy(**{"cluster_resolver": resolver(ONE_EACH), **wrong})


@pytest.mark.catalogue("2.14.1")
def test_the_cluster_defaults_to_tf_config(monkeypatch):
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
def test_an_unreachable_server_is_named():
    with servers(1) as (server,):
        address = server.address
    with pytest.raises(UnavailableError, match=f"parameter server 0 at {address}"):
        ParameterServerStrategy(resolver_of(address), server_timeout=0.2)


@pytest.mark.catalogue("1.6.4", "3.1.42", "3.7.4-6")
def test_run_without_a_coordinator_warns_once():
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
def test_run_in_a_closure_does_not_warn():
    with cluster(1) as strategy, write_as(ClosureRun(1, 1, 0)):
        assert strategy.run(lambda: 3) == 3


@pytest.mark.catalogue("2.9.8", "3.1.48-50", "3.1.53", "3.7.7")
def test_distributed_datasets_cannot_be_read_by_the_coordinator():
    with cluster(1, replicas=2) as strategy:
        dataset = hr.Dataset.range(6).batch(4)
        whole = strategy.experimental_distribute_dataset(dataset)
        message = "To use this dataset, you need to pass this dataset to ClusterCoordinator"
        for use in (iter, len, list):
            with pytest.raises(ValueError, match=message):
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


def test_a_strategy_handle_resolves_locally_and_on_workers():
    with cluster(1, staleness=2) as strategy:
        data = pickle.dumps(strategy)
        assert pickle.loads(data) is strategy
        worker = ServerCluster(strategy.cluster_id, strategy.cluster.servers)
        register_cluster(worker)
        assert pickle.loads(data) is strategy, "the first registered cluster is used"
        unregister_cluster(strategy.cluster)
        on_worker = pickle.loads(data)
        assert on_worker is not strategy
        assert on_worker.staleness == 2
        assert pickle.loads(data) is on_worker
        with write_as(ClosureRun(1, 1, 0)):
            assert on_worker.run(lambda: 1) == 1
        assert on_worker.worker_addresses == []
        unregister_cluster(worker)


def test_extended_lists_the_servers():
    with cluster(2) as strategy:
        assert strategy.extended.parameter_devices == ("ps:0", "ps:1")
        assert strategy.extended.worker_devices == ("cpu:0",)
        with pytest.raises(AttributeError, match=r"strategy\.run"):
            _ = strategy.extended.call_for_each_replica


def test_mixing_two_strategies_is_rejected():
    with cluster(1) as strategy, cluster(1) as other, strategy.scope():
        with pytest.raises(FailedPreconditionError, match="Mixing"):
            other.run(lambda: 1)
        v = hr.Variable(np.zeros(2))
        with pytest.raises(ValueError, match="colocate"):
            other.extended.colocate_vars_with(v).__enter__()


def test_names_of_shards_are_rejected_for_variables():
    with cluster(2, FixedShardsPartitioner(2)) as strategy, strategy.scope():
        hr.Variable(np.zeros(4), name="a")
        with pytest.raises(
            ValueError, match=r"'a/part_0' is reserved for a shard of the variable 'a'"
        ):
            hr.Variable(1.0, name="a/part_0")
        assert hr.Variable(1.0, name="a/part_of").name == "a/part_of"


def test_existing_variables_with_other_shards_are_rejected():
    with servers(3) as started:
        with strategy_at(started) as first, first.scope():
            hr.Variable(np.ones((4, 2)), name="v")
        with strategy_at(started) as same, same.scope():
            assert hr.Variable(np.zeros((4, 2)), name="v").read().sum() == 8
        found = r"'v' of shape \(4, 2\) and dtype float64 in 1 shard, .* cannot be created with "
        with strategy_at(started, FixedShardsPartitioner(2)) as other, other.scope():
            with pytest.raises(AlreadyExistsError, match=found + r"shape \(4, 2\).* in 2 shards"):
                hr.Variable(np.zeros((4, 2)), name="v")
            with pytest.raises(AlreadyExistsError, match=found + r"shape \(3,\) and dtype int64"):
                hr.Variable(np.zeros(3, int), name="v")
        with strategy_at(started) as later, later.scope():
            hr.Variable(0.0, name="u")
            with pytest.raises(AlreadyExistsError, match=r"'v' on server 0, but .* on server 1"):
                hr.Variable(np.zeros((4, 2)), name="v")


def test_an_existing_table_with_other_settings_is_rejected():
    with servers(1) as (server,):
        with strategy_at([server]) as first, first.scope():
            hr.EmbeddingTable(2, name="t")
        differs = pytest.raises(
            AlreadyExistsError, match=r"table t with other settings: dim=2 instead of 3"
        )
        with strategy_at([server]) as second, second.scope(), differs:
            hr.EmbeddingTable(3, name="t")


def test_per_worker_variables_need_a_coordinator():
    with (
        cluster(1) as strategy,
        strategy.scope(),
        pytest.raises(FailedPreconditionError, match="ClusterCoordinator"),
    ):
        hr.Variable(0.0, per_worker_variable=True)


def test_creating_a_coordinator_in_a_worker_task_warns(caplog):
    with servers(1) as (server,):
        spec = {"worker": ["localhost:1"], "ps": [server.address]}
        strategy = ParameterServerStrategy(resolver(spec, "worker", 0))
        with hr.coordinator.ClusterCoordinator(strategy):
            pass
        strategy.close()
    assert "this process is a worker task of its cluster" in caplog.text
    assert "hr.distribute.Server" in caplog.text


def test_values_too_large_for_the_dtype_are_rejected():
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
