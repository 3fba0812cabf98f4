"""The coordinator: functions that are scheduled here, run on workers, and survive their loss.

Decisions, without threads, sockets and clocks:

    closure        a function with its arguments: its state, its inputs, its result or error
    closure_queue  assigns closures to workers, and handles lost workers
    load           the connected workers, and the closures of each
    contact        one worker as the coordinator sees it; slow calls
    coordination   messages to workers
    messages       messages between coordinator and workers
    status         what `headrace status` shows, and what the log says of long waits
    agenda         what a worker runs next

Threads and sockets:

    shell            the lock, the thread, the waits of users, and messages to parameter servers
    coordinator      `ClusterCoordinator`
    cluster          the workers and servers of a strategy
    keeping          makes closures of calls, and keeps what workers hold
    packing          functions, values and errors as they are sent
    remote_value     `RemoteValue`
    per_worker       `PerWorkerValues`, per-worker datasets, variables and iterators
    shared_dataset   a dataset whose elements are shared by all workers, and what was used of it
    reception        the port at which workers announce themselves
    worker           `ClosureWorker`
    life             a worker's threads, for one coordinator
    current          what a function sees on its worker
    worker_iterator  datasets and their iterators on a worker
    gauges           metrics for Prometheus
"""

from typing import TYPE_CHECKING

from headrace.lazy import lazily

if TYPE_CHECKING:
    from headrace.coordinator.closure import RemoteValueStatus
    from headrace.coordinator.coordinator import ClusterCoordinator
    from headrace.coordinator.current import get_current_worker_index
    from headrace.coordinator.per_worker import PerWorkerValues
    from headrace.coordinator.remote_value import RemoteValue
    from headrace.coordinator.worker import ClosureWorker
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ClosureWorker": "headrace.coordinator.worker",
            "ClusterCoordinator": "headrace.coordinator.coordinator",
            "PerWorkerValues": "headrace.coordinator.per_worker",
            "RemoteValue": "headrace.coordinator.remote_value",
            "RemoteValueStatus": "headrace.coordinator.closure",
            "get_current_worker_index": "headrace.coordinator.current",
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
