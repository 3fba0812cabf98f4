"""Distributed input and training: strategies, replicas, variables and distributed datasets.

* `ClusterSpec` and the resolvers provide the tasks of a cluster, and the task of this process.
* A strategy (`strategy`; its input: `replica_inputs`) has replicas. `run` calls a function on each
  (`replica_threads`). Code finds its context with `execution_context` (and scopes),
  `current_strategy` and `replica_context` (with differentiable collectives). Values of several
  replicas (`values`) are combined (`collectives`). A `variable` has a copy on each; `row_access`
  reads and changes rows of it by index, with casts to its dtype; `bag_combiner` checks row indices
  and combines bags of rows. `spmd` compiles a step once for all replicas. `metrics` are sums in
  variables.
* Workers in several processes (`multi_worker`) run collectives (`collective_server`), and agree at
  each step of a dataset whether there is another, and at each call of a program over all of them
  (`agreement`).
* A distributed dataset (`dataset`) gives each replica its rows (`rebatch`: arithmetic;
  `input_streams`: this worker's part) through `iterator`, which puts them on devices,
  `step_inputs` and `batch_inputs`. `input_context` has the arguments of input functions and the
  options of distribution.
"""

from typing import TYPE_CHECKING

from headrace.lazy_imports import lazy_attributes

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
    from headrace.distribute.collectives import (
        ReduceOp,
        VariableAggregation,
        VariableSynchronization,
    )
    from headrace.distribute.current_strategy import (
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
    from headrace.distribute.multi_worker import MultiWorkerMirroredStrategy
    from headrace.distribute.replica_context import ReplicaContext
    from headrace.distribute.strategy import MirroredStrategy, OneDeviceStrategy, Strategy
    from headrace.distribute.values import PerReplica, PerReplicaSpec
    from headrace.parameter_server import partitioners, v1
    from headrace.parameter_server.read_cache import cache_variable_reads
    from headrace.parameter_server.strategy import ParameterServerStrategy
    from headrace.plan.options import AutoShardPolicy
else:
    __getattr__, __dir__ = lazy_attributes(
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
            "MirroredStrategy": "headrace.distribute.strategy",
            "MultiWorkerMirroredStrategy": "headrace.distribute.multi_worker",
            "OneDeviceStrategy": "headrace.distribute.strategy",
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
            "VariableAggregation": "headrace.distribute.collectives",
            "VariableSynchronization": "headrace.distribute.collectives",
            "cache_variable_reads": "headrace.parameter_server.read_cache",
            "get_replica_context": "headrace.distribute.current_strategy",
            "get_strategy": "headrace.distribute.current_strategy",
            "has_strategy": "headrace.distribute.current_strategy",
            "in_cross_replica_context": "headrace.distribute.current_strategy",
            "partitioners": "headrace.parameter_server.partitioners:",
            "v1": "headrace.parameter_server.v1:",
        },
        missing="headrace.data.missing_names:missing_name_message",
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
