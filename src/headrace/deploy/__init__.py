"""Tasks of a training cluster as processes: a server of any role, and a local cluster.

* `server`: `Server`, a worker or a parameter server at the address that a `ClusterSpec` gives it.
* `task`: such a server in a child process.
* `local_cluster`: `LocalCluster`, workers and parameter servers on this machine.
* `slurm_step`: roles, hosts and ports of the ranks of a Slurm step.
* `step_directory`: the shared directory in which these ranks find each other.
"""
