"""Clusters of Ray actors.

* `nodes`: import of Ray, addresses of nodes, names of actors, keys.
* `data_cluster`: `DataCluster`, a data service, and `connect`.
* `controller`: its actor with the dispatcher, which supervises the workers.
* `worker_actor`: the actor of one worker.
* `service_addresses`: addresses of dispatchers that stay the same when they move.
* `actor_launcher`: starts and drains these.
* `training_cluster`: `TrainingCluster`, coordinator workers and parameter servers.
* `training_task`: the actor of one of these, and its state as the owner sees it.

Ray is imported when the first cluster is created.
"""

from typing import TYPE_CHECKING

from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.ray.data_cluster import DataCluster, connect
    from headrace.ray.training_cluster import TrainingCluster
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "DataCluster": "headrace.ray.data_cluster",
            "TrainingCluster": "headrace.ray.training_cluster",
            "connect": "headrace.ray.data_cluster",
        },
        missing="headrace.data.missing_names:missing_name_message",
    )

__all__ = ["DataCluster", "TrainingCluster", "connect"]
