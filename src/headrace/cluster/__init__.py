"""Which tasks a cluster has, where they listen, and which of them this process is.

* `spec`: a `ClusterSpec`, the addresses of all tasks by their type; what a task is for the others:
  the chief, a worker of some rank, an evaluator.
* `resolver`: what every resolver answers; `SimpleClusterResolver`, `UnionResolver`; waiting for
  tasks that start later, and loading what is not always installed.
* `environment`: `TFConfigClusterResolver`, from `TF_CONFIG`; reading what a launcher says in the
  environment.
* `slurm`: `SlurmClusterResolver`, from the variables of a Slurm step.
* `kubernetes`: `KubernetesClusterResolver`, of the pods that have a label.
* `torchrun`: `TorchrunClusterResolver`, of the processes that torchrun started.
* `ray`: `RayClusterResolver`, of named actors, and the one at which they meet.
"""
