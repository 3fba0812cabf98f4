"""Distributed input and training: who takes part, and what each gets.

* `ClusterSpec` and the resolvers say which tasks a cluster has, and which this process is.
* A strategy (`strategy`, `mirrored`, `extended`, `scope`; what it reads: `feeding`) has replicas.
  `run` calls a function on each (`crew`: the threads); code asks where it runs (`context`,
  `current`, `replica_context`); values of several replicas (`values`) become one (`collectives`);
  a `variable`, `made_once`, has a copy on each (`aggregation`: how they become one; `operators`:
  what arrays can do; `scattering`: `row_numbers` of one, `pooling` of bags). `gradients` go
  through collectives; `casting` checks that values fit a dtype.
  `spmd` compiles a step once for all. `metrics` are sums in variables.
* Workers in several processes (`multi_worker`) meet (`meeting`), and agree at each step of a
  dataset whether there is another (`agreement`). Large sums go straight between them (`direct`),
  and `calls` of a program over all of them begin together.
* A distributed dataset (`dataset`, `sharing`) gives each replica its rows (`rebatch`: arithmetic;
  `auto_shard`: what of it this worker reads), through `iterator`, `feeds` and `batch_feeds`;
  `streams` are what several workers read of it, and `delivery` puts rows on their devices.
  `input_context` has the records that say among whom, and how.
"""

from typing import TYPE_CHECKING

from headrace.lazy import lazily

if TYPE_CHECKING:
    from headrace.cluster.environment import TFConfigClusterResolver
    from headrace.cluster.kubernetes import KubernetesClusterResolver
    from headrace.cluster.ray import RayClusterResolver
    from headrace.cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
    from headrace.cluster.slurm import SlurmClusterResolver
    from headrace.cluster.spec import ClusterSpec
    from headrace.cluster.torchrun import TorchrunClusterResolver
    from headrace.deploy.local_cluster import LocalCluster
    from headrace.deploy.server import Server
    from headrace.distribute.aggregation import VariableAggregation, VariableSynchronization
    from headrace.distribute.collectives import ReduceOp
    from headrace.distribute.current import (
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
    from headrace.distribute.input_context import (
        InputContext,
        InputOptions,
        InputReplicationMode,
        ValueContext,
    )
    from headrace.distribute.iterator import DistributedIterator
    from headrace.distribute.mirrored import MirroredStrategy, OneDeviceStrategy
    from headrace.distribute.multi_worker import MultiWorkerMirroredStrategy
    from headrace.distribute.replica_context import ReplicaContext
    from headrace.distribute.strategy import Strategy
    from headrace.distribute.values import PerReplica, PerReplicaSpec
    from headrace.parameter_server import partitioners, v1
    from headrace.parameter_server.read_cache import cache_variable_reads
    from headrace.parameter_server.strategy import ParameterServerStrategy
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
            "KubernetesClusterResolver": "headrace.cluster.kubernetes",
            "LocalCluster": "headrace.deploy.local_cluster",
            "MirroredStrategy": "headrace.distribute.mirrored",
            "MultiWorkerMirroredStrategy": "headrace.distribute.multi_worker",
            "OneDeviceStrategy": "headrace.distribute.mirrored",
            "ParameterServerStrategy": "headrace.parameter_server.strategy",
            "PerReplica": "headrace.distribute.values",
            "PerReplicaSpec": "headrace.distribute.values",
            "RayClusterResolver": "headrace.cluster.ray",
            "ReduceOp": "headrace.distribute.collectives",
            "ReplicaContext": "headrace.distribute.replica_context",
            "Server": "headrace.deploy.server",
            "SimpleClusterResolver": "headrace.cluster.resolver",
            "SlurmClusterResolver": "headrace.cluster.slurm",
            "Strategy": "headrace.distribute.strategy",
            "TFConfigClusterResolver": "headrace.cluster.environment",
            "TorchrunClusterResolver": "headrace.cluster.torchrun",
            "UnionResolver": "headrace.cluster.resolver",
            "ValueContext": "headrace.distribute.input_context",
            "VariableAggregation": "headrace.distribute.aggregation",
            "VariableSynchronization": "headrace.distribute.aggregation",
            "cache_variable_reads": "headrace.parameter_server.read_cache",
            "get_replica_context": "headrace.distribute.current",
            "get_strategy": "headrace.distribute.current",
            "has_strategy": "headrace.distribute.current",
            "in_cross_replica_context": "headrace.distribute.current",
            "partitioners": "headrace.parameter_server.partitioners:",
            "v1": "headrace.parameter_server.v1:",
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
    "KubernetesClusterResolver",
    "LocalCluster",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "RayClusterResolver",
    "ReduceOp",
    "ReplicaContext",
    "Server",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "Strategy",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
    "ValueContext",
    "VariableAggregation",
    "VariableSynchronization",
    "cache_variable_reads",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "partitioners",
    "v1",
]
