"""Context of a running closure: its worker and the worker's resources, in a context variable."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any, Self

from headrace.errors import CancelledError, FailedPreconditionError

__all__ = [
    "CurrentLeaseIterator",
    "RunningClosure",
    "SessionResources",
    "current_closure",
    "get_current_worker_index",
    "get_resource",
    "select_worker_value",
]

_STOPPED = "the worker stopped, or has another coordinator"
_POLL_SECONDS = 1.0


class _ResourceEntry:
    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None


class SessionResources:
    """Resources of a worker session: datasets, iterators and values that closures use."""

    def __init__(self) -> None:
        self._entries: dict[int, _ResourceEntry] = {}
        self._is_closed = False

    def reserve(self, resource: int) -> None:
        """Announce a resource that is being created; `get` waits for it."""
        self._entries[resource] = _ResourceEntry()

    def set(self, resource: int, value: Any, error: Exception | None = None) -> None:
        """Store a created resource, or the error of its creation."""
        entry = self._entries.get(resource)
        if entry is None:
            _close(value)  # it was released in the meantime
            return
        entry.value, entry.error = value, error
        entry.done.set()

    def get(self, resource: int) -> Any:
        """Return a resource, after waiting for its creation.

        Raises:
            FailedPreconditionError: If the resource does not exist.
            Exception: The error of its creation.
        """
        entry = self._entries.get(resource)
        if entry is None:
            raise FailedPreconditionError(
                f"this worker has no resource {resource}; it may have been released. Keep a "
                "reference to the per-worker dataset, iterator or value while functions use it"
            )
        while not entry.done.wait(_POLL_SECONDS):
            if self._is_closed:
                raise CancelledError(_STOPPED)
        if entry.error is not None:
            raise entry.error
        return entry.value

    def release(self, resources: tuple[int, ...]) -> None:
        """Release resources; does not wait for functions that still read from them."""
        released = [self._entries.pop(resource, None) for resource in resources]
        values = [
            entry.value for entry in released if entry is not None and _is_closeable(entry.value)
        ]
        if values:
            # Closing an iterator waits for its readers, which are users' functions.
            threading.Thread(
                target=_close_all, args=(values,), name="headrace-closing", daemon=True
            ).start()

    def close(self) -> None:
        """Release all resources."""
        self._is_closed = True
        self.release(tuple(self._entries))


class RunningClosure:
    """Closure that runs on this thread.

    Attributes:
        worker: Number of this worker.
        resources: Resources of the worker.
        is_only_thread: Whether the worker runs one closure at a time.
        used_iterators: Iterators that it has read from (`worker_iterator.WorkerIterator`), by
            resource.
        leased_elements: Elements of a shared dataset that it was given; None if none.
        optimizer_steps: Number of Keras optimizer steps that it has taken.
    """

    def __init__(
        self,
        worker: int,
        resources: SessionResources,
        *,
        is_only_thread: bool,
        leased_elements: Any = None,
    ) -> None:
        self.worker = worker
        self.resources = resources
        self.is_only_thread = is_only_thread
        self.used_iterators: dict[int, Any] = {}
        self.leased_elements = leased_elements
        self.optimizer_steps = 0


current_closure: ContextVar[RunningClosure | None] = ContextVar("headrace_closure", default=None)
"""Closure in which the code runs; None outside of closures."""


def get_current_worker_index() -> int:
    """Return the number of the worker that runs this function.

    For scheduled functions, and functions that create a per-worker dataset:

        def dataset_fn():
            return dataset.shard(num_workers, hr.coordinator.get_current_worker_index())

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         coordinator.schedule(hr.coordinator.get_current_worker_index).fetch()
    ...     strategy.close()
    0

    Raises:
        FailedPreconditionError: If the code does not run on a worker.
    """
    closure = current_closure.get()
    if closure is None:
        raise FailedPreconditionError(
            "Cannot retrieve the worker index: this code does not run on a worker. Call it "
            "inside a scheduled function, or one that creates a per-worker dataset"
        )
    return closure.worker


def get_resource(resource: int) -> Any:
    """Return this worker's resource with a number; handles are unpickled to it.

    Raises:
        FailedPreconditionError: If the code does not run on a worker.
    """
    closure = current_closure.get()
    if closure is None:
        raise FailedPreconditionError(
            "per-worker datasets, iterators and values can be used only inside scheduled functions"
        )
    return closure.resources.get(resource)


class CurrentLeaseIterator:
    """Iterator over the elements of a shared dataset that are leased to the running closure.

    A function that references it is loaded once and called many times, so each access looks up the
    current lease.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._leased_elements)

    get_next = __next__

    def get_next_as_optional(self) -> Any:
        """Return the next element, or an `Optional` without a value at the end."""
        return self._leased_elements.get_next_as_optional()

    @property
    def _leased_elements(self) -> Any:
        closure = current_closure.get()
        if closure is None or closure.leased_elements is None:
            raise FailedPreconditionError(
                "a shared dataset can be read only inside functions that run_epoch calls"
            )
        return closure.leased_elements


def select_worker_value(values: tuple[Any, ...]) -> Any:
    """Return the value at this worker's index.

    Raises:
        FailedPreconditionError: If there is no value for this worker.
    """
    worker = get_current_worker_index()
    if worker >= len(values):
        raise FailedPreconditionError(
            f"PerWorkerValues has {len(values)} values, but none for worker {worker}, which was "
            "added later; use create_per_worker_values, which creates one on each worker"
        )
    return values[worker]


def _is_closeable(value: Any) -> bool:
    return hasattr(type(value), "close_for_worker")


def _close_all(values: list[Any]) -> None:
    for value in values:
        _close(value)


def _close(value: Any) -> None:
    if _is_closeable(value):
        value.close_for_worker()
