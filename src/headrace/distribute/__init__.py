"""Distributed input and training: strategies, replicas, variables and distributed datasets.

* Clusters: `ClusterSpec` and the resolvers (`headrace.cluster`) provide the tasks of a cluster, and
  the task of this process.
* Replicas: a strategy (`strategy`, its input in `replica_inputs`) calls a function once on each
  replica (`replica_threads`), or compiles one program for all of them (`spmd`).
  `execution_context` tells whether code runs on a replica or in the scope of a strategy,
  `current_strategy` returns the current strategy, and `replica_context` has the replica's index and
  differentiable collectives.
* Values: `values` holds one value per replica, and `collectives` reduces or concatenates them. A
  `variable` has a copy on each replica; `row_access` reads and writes its rows by index, and
  `bag_combiner` combines bags of rows. `metrics` are sums in variables.
* Workers: processes of a multi-worker strategy (`multi_worker`) run collectives
  (`collective_server`). With them they agree at each step whether any worker has data, and before
  each compiled program that all workers call it with matching arguments (`agreement`).
* Input: a distributed dataset (`dataset`) is read by an `iterator`, which puts each step's rows on
  devices. `input_streams` assigns parts of the dataset to this worker; `step_inputs` and
  `batch_inputs` give each replica its rows, in numbers computed by `rebatch`. `input_context` has
  the arguments of input functions and the options of distribution.
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
