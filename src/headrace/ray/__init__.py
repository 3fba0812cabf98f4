"""Clusters of Ray actors.

* `nodes`: import of Ray, addresses of nodes, names of actors, keys.
* `data_cluster`: `DataCluster`, a data service, and `connect`.
* `controller`: its actor with the dispatcher, which supervises the workers.
* `worker_actor`: the actor of one worker.
* `service_addresses`: addresses of dispatchers that stay the same when they move.
* `actor_launcher`: starts and drains these.

Ray is imported when the first cluster is created.
"""

from typing import TYPE_CHECKING

from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.ray.data_cluster import DataCluster, connect
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "DataCluster": "headrace.ray.data_cluster",
            "connect": "headrace.ray.data_cluster",
        },
        missing="headrace.data.missing_names:missing_name_message",
    )

__all__ = ["DataCluster", "connect"]
