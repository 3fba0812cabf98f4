"""Coordinator: schedules functions on workers, and reruns them if workers are lost.

Pure state machines, without threads, sockets and clocks:

    closure            a scheduled function with its arguments, phase, inputs, and result or error
    closure_queue      assigns closures to workers, and handles lost workers
    worker_pool        the connected workers, and the closures of each
    worker_connection  connection state of one worker; execution statistics and slow functions
    coordinator_core   sessions with workers: requests, replies, resources
    messages           messages between coordinator and workers
    status             status for `headrace status`, and log messages about long waits
    worker_queue       run order of closures on a worker

Threads and sockets:

    coordinator_runner  the lock, the I/O thread, waiting callers, and requests to parameter servers
    coordinator         `ClusterCoordinator`
    cluster             workers and parameter servers of a strategy
    closure_factory     creates closures from calls, and resources on workers
    packing             serialization of functions, values and errors
    remote_value        `RemoteValue`
    per_worker          `PerWorkerValues`, per-worker datasets, variables and iterators
    shared_dataset      a dataset whose elements all workers share, and its progress
    coordinator_server  the port at which workers register themselves
    worker              `ClosureWorker`
    worker_session      a worker's threads, for one coordinator
    closure_context     context of a function on its worker
    worker_iterator     datasets and their iterators on a worker
    metrics             metrics for Prometheus
"""

from typing import TYPE_CHECKING

from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.coordinator.closure import RemoteValueStatus
    from headrace.coordinator.closure_context import get_current_worker_index
    from headrace.coordinator.coordinator import ClusterCoordinator
    from headrace.coordinator.per_worker import PerWorkerValues
    from headrace.coordinator.remote_value import RemoteValue
    from headrace.coordinator.worker import ClosureWorker
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "ClosureWorker": "headrace.coordinator.worker",
            "ClusterCoordinator": "headrace.coordinator.coordinator",
            "PerWorkerValues": "headrace.coordinator.per_worker",
            "RemoteValue": "headrace.coordinator.remote_value",
            "RemoteValueStatus": "headrace.coordinator.closure",
            "get_current_worker_index": "headrace.coordinator.closure_context",
        },
    )

__all__ = [
    "ClosureWorker",
    "ClusterCoordinator",
    "PerWorkerValues",
    "RemoteValue",
    "RemoteValueStatus",
    "get_current_worker_index",
]
