"""Tasks of a training cluster as processes: a server of any role, and a local cluster.

* `server`: `Server`, a worker or a parameter server at the address that a `ClusterSpec` gives it.
* `task`: such a server in a child process.
* `local_cluster`: `LocalCluster`, workers and parameter servers on this machine.
"""
