"""Data service: workers run pipelines, clients read them, a dispatcher coordinates.

    config                frozen configuration records and addresses
    messages              messages between dispatcher, workers and clients
    ranges                sets of splits as ranges
    element_sets          sets of elements by split and ordinal
    stub                  typed calls to the dispatcher
    dispatcher/           knows datasets, workers, jobs and tasks; never handles elements
    worker/               runs tasks and sends their elements
    client/               reads tasks and presents them as a Source
    modes/                processing and reading modes, one package each
    epochs                names of epochs in messages
    by_value              modules that are sent with a dataset
    dataset               `distribute`, `from_dataset_id`
    dataset_registration  `register_dataset`: sends a plan and its properties to the dispatcher
    saving                `distributed_save`: workers write a dataset into a directory
    local_cluster         a complete service on this machine
    worker_scaler         adds and removes workers as the dispatcher asks
    local_launcher        starts and drains the workers of a local cluster for it
    process_pool          `Dataset.in_processes`: such services, shared by datasets
    local_worker          one of its workers, in a separate process or in this one

The dispatcher handles plans and splits; workers and clients handle elements.
"""

from typing import TYPE_CHECKING

from headrace.lazy_imports import lazy_attributes

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
    from headrace.service.dataset_registration import register_dataset
    from headrace.service.dispatcher.server import DispatchServer
    from headrace.service.local_cluster import LocalCluster
    from headrace.service.saving import DistributedSave, distributed_save
    from headrace.service.worker.server import WorkerServer
    from headrace.transport.security import Security
else:
    __getattr__, __dir__ = lazy_attributes(
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
            "register_dataset": "headrace.service.dataset_registration",
        },
        missing="headrace.data.missing_names:missing_name_message",
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
