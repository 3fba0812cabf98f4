"""Distributed input and training: who takes part, and what each gets.

* `ClusterSpec` and the resolvers say which tasks a cluster has, and which this process is.
* A strategy (`strategy`, `mirrored`, `extended`, `scope`) has replicas. `run` calls a function on
  each (`crew`: the threads); code asks where it runs (`context`, `replica_context`); values of
  several replicas (`values`) become one (`collectives`); a `variable` has a copy on each.
* A distributed dataset (`dataset`, `sharing`) gives each replica its rows (`rebatch`: arithmetic;
  `auto_shard`: what of it this worker reads), through `iterator` and `feeds`. `input_context` has
  the records that say among whom, and how.
"""

from typing import TYPE_CHECKING

from headrace.lazy import lazily

if TYPE_CHECKING:
    from headrace.cluster.environment import TFConfigClusterResolver
    from headrace.cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
    from headrace.cluster.slurm import SlurmClusterResolver
    from headrace.cluster.spec import ClusterSpec
    from headrace.distribute.collectives import ReduceOp
    from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
    from headrace.distribute.input_context import (
        InputContext,
        InputOptions,
        InputReplicationMode,
        ValueContext,
    )
    from headrace.distribute.iterator import DistributedIterator
    from headrace.distribute.mirrored import MirroredStrategy, OneDeviceStrategy
    from headrace.distribute.replica_context import ReplicaContext
    from headrace.distribute.strategy import (
        Strategy,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from headrace.distribute.values import PerReplica, PerReplicaSpec
    from headrace.distribute.variable import VariableAggregation, VariableSynchronization
    from headrace.plan.options import AutoShardPolicy
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "AutoShardPolicy": "headrace.plan.options",
            "ClusterResolver": "headrace.cluster.resolver",
            "ClusterSpec": "headrace.cluster.spec",
            "DistributedDataset": "headrace.distribute.dataset",
            "DistributedDatasetsFromFunction": "headrace.distribute.dataset",
            "DistributedIterator": "headrace.distribute.iterator",
            "InputContext": "headrace.distribute.input_context",
            "InputOptions": "headrace.distribute.input_context",
            "InputReplicationMode": "headrace.distribute.input_context",
            "MirroredStrategy": "headrace.distribute.mirrored",
            "OneDeviceStrategy": "headrace.distribute.mirrored",
            "PerReplica": "headrace.distribute.values",
            "PerReplicaSpec": "headrace.distribute.values",
            "ReduceOp": "headrace.distribute.collectives",
            "ReplicaContext": "headrace.distribute.replica_context",
            "SimpleClusterResolver": "headrace.cluster.resolver",
            "SlurmClusterResolver": "headrace.cluster.slurm",
            "Strategy": "headrace.distribute.strategy",
            "TFConfigClusterResolver": "headrace.cluster.environment",
            "UnionResolver": "headrace.cluster.resolver",
            "ValueContext": "headrace.distribute.input_context",
            "VariableAggregation": "headrace.distribute.variable",
            "VariableSynchronization": "headrace.distribute.variable",
            "get_replica_context": "headrace.distribute.strategy",
            "get_strategy": "headrace.distribute.strategy",
            "has_strategy": "headrace.distribute.strategy",
            "in_cross_replica_context": "headrace.distribute.strategy",
        },
        absent="headrace.data.absent:no_such_name",
    )

__all__ = [
    "AutoShardPolicy",
    "ClusterResolver",
    "ClusterSpec",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReplicaContext",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "Strategy",
    "TFConfigClusterResolver",
    "UnionResolver",
    "ValueContext",
    "VariableAggregation",
    "VariableSynchronization",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
