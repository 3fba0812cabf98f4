"""The data service: pipelines run by workers, read by clients, coordinated by a dispatcher.

    config         frozen records and addresses
    messages       the words that the parts exchange
    ranges         sets of units
    rows           sets of elements of units, by their ordinals
    stub           typed calls to the dispatcher
    dispatcher/    knows datasets, workers, jobs and tasks; never sees an element
    worker/        runs tasks, hands out their elements
    client/        reads tasks; a Source again
    modes/         how workers share a dataset: one package for each reading mode
    passes         how a pass is called in messages
    by_value       modules that travel with a dataset
    dataset        `distribute`, `from_dataset_id`
    registering    `register_dataset`: what is said of a dataset, and its plan
    saving         `distributed_save`: workers write a dataset into a directory
    local_cluster  all of it on this machine
    local_worker   one worker of that, in a process of its own or in this one

The dispatcher sees plans and splits, workers and clients see elements.
"""

from typing import TYPE_CHECKING

from headrace.lazy import lazily

if TYPE_CHECKING:
    from headrace.plan.ordering import SHARD_HINT
    from headrace.service.config import (
        CrossTrainerCache,
        DispatcherConfig,
        ShardingPolicy,
        WorkerConfig,
    )
    from headrace.service.dataset import (
        delivery_report,
        distribute,
        from_dataset_id,
    )
    from headrace.service.dispatcher.server import DispatchServer
    from headrace.service.local_cluster import LocalCluster
    from headrace.service.registering import register_dataset
    from headrace.service.saving import DistributedSave, distributed_save
    from headrace.service.worker.server import WorkerServer
    from headrace.transport.security import Security
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "SHARD_HINT": "headrace.plan.ordering",
            "CrossTrainerCache": "headrace.service.config",
            "DispatchServer": "headrace.service.dispatcher.server",
            "DispatcherConfig": "headrace.service.config",
            "DistributedSave": "headrace.service.saving",
            "LocalCluster": "headrace.service.local_cluster",
            "Security": "headrace.transport.security",
            "ShardingPolicy": "headrace.service.config",
            "WorkerConfig": "headrace.service.config",
            "WorkerServer": "headrace.service.worker.server",
            "delivery_report": "headrace.service.dataset",
            "distribute": "headrace.service.dataset",
            "distributed_save": "headrace.service.saving",
            "from_dataset_id": "headrace.service.dataset",
            "register_dataset": "headrace.service.registering",
        },
        absent="headrace.data.absent:no_such_name",
    )

__all__ = [
    "SHARD_HINT",
    "CrossTrainerCache",
    "DispatchServer",
    "DispatcherConfig",
    "DistributedSave",
    "LocalCluster",
    "Security",
    "ShardingPolicy",
    "WorkerConfig",
    "WorkerServer",
    "delivery_report",
    "distribute",
    "distributed_save",
    "from_dataset_id",
    "register_dataset",
]
