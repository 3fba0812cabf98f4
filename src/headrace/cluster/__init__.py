"""Cluster resolvers: tasks of a cluster, their addresses, and the task of this process.

* `spec`: a `ClusterSpec`, the addresses of all tasks by type, and the roles of tasks: the chief, a
  worker of some rank, an evaluator.
* `resolver`: the interface of resolvers, `SimpleClusterResolver`, `UnionResolver`; waiting for
  tasks that start later, and loading optional packages.
* `environment`: `TFConfigClusterResolver`, from `TF_CONFIG`; reading variables that a launcher
  sets.
* `slurm`: `SlurmClusterResolver`, from the variables of a Slurm step.
* `kubernetes`: `KubernetesClusterResolver`, of the pods that have a label.
* `torchrun`: `TorchrunClusterResolver`, of the processes that torchrun started.
* `ray`: `RayClusterResolver`, of named actors, and the actor in which they register addresses.
"""
