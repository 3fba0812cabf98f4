"""The coordinator: closures that are scheduled here, run on workers, and survive their loss.

* `closure_queue` decides which closure goes where, and what becomes of it (`closure`, `inputs`,
  `ready`, `rounds`, `settling`, `roster`, `load`, `deadlines`, `failure`, `decided`);
  `coordination` what that takes in messages to workers (`contact`, `work`, `messages`, `actions`).
  Both are pure.
* `shell` runs them, with one I/O thread, for as long as there is a coordinator (`running_shell`);
  `server_talk` tells parameter servers. A forked child meets a `refusal`.
* `stuck` says what a wait waits for, `watch` counts and says what takes too long; `status` and
  `gauges` are for who looks on, as are a worker's `totals`.
* `coordinator` is what users see, with `remote_value`, `per_worker` and `shared_dataset`; `cluster`
  is who takes part; `keeping` makes closures of calls, `progress` says what was used of a shared
  dataset. At the `reception` workers announce
  themselves (`announcing`), and watchers ask.
* `worker` is the other end: a `life` for each greeting, with an `agenda` that is pure. What a
  function sees there is in `current`, `worker_iterator` and `leased_elements`; `blame` says what
  its error becomes.
* `packing` and `functions` say what travels, and how; `coordinator_stub` is a coordinator that did.
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
