"""Distributed input and training: who takes part, and what each gets.

* `ClusterSpec` and the resolvers say which tasks a cluster has, and which this process is.
"""

from typing import TYPE_CHECKING

from headrace.lazy import lazily

if TYPE_CHECKING:
    from headrace.cluster.environment import TFConfigClusterResolver
    from headrace.cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
    from headrace.cluster.slurm import SlurmClusterResolver
    from headrace.cluster.spec import ClusterSpec
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ClusterResolver": "headrace.cluster.resolver",
            "ClusterSpec": "headrace.cluster.spec",
            "SimpleClusterResolver": "headrace.cluster.resolver",
            "SlurmClusterResolver": "headrace.cluster.slurm",
            "TFConfigClusterResolver": "headrace.cluster.environment",
            "UnionResolver": "headrace.cluster.resolver",
        },
    )

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
