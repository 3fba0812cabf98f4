"""Which tasks a cluster has, where they listen, and which of them this process is.

* `spec`: a `ClusterSpec`, the addresses of all tasks by their type.
* `resolver`: what every resolver answers; `SimpleClusterResolver`, `UnionResolver`.
* `environment`: `TFConfigClusterResolver`, from `TF_CONFIG`.
* `slurm`: `SlurmClusterResolver`, from the variables of a Slurm step.
* `kubernetes`: `KubernetesClusterResolver`, of the pods that have a label; `kubernetes_api` asks
  for these.
* `torchrun`: `TorchrunClusterResolver`, of the processes that torchrun started.
* `ray`: `RayClusterResolver`, of named actors; `ray_actors` has the one at which they meet.
* `variables`: what a launcher says in the environment; `packages`: what is not always installed;
  `waiting`: for tasks that start later.
* `roles`: what a task is for the others: the chief, a worker of some rank, an evaluator.
"""
