"""Which tasks a cluster has, where they listen, and which of them this process is.

* `spec`: a `ClusterSpec`, the addresses of all tasks by their type.
* `resolver`: what every resolver answers; `SimpleClusterResolver`, `UnionResolver`.
* `environment`: `TFConfigClusterResolver`, from `TF_CONFIG`.
* `slurm`: `SlurmClusterResolver`, from the variables of a Slurm step.
* `roles`: what a task is for the others: the chief, a worker of some rank, an evaluator.
"""
