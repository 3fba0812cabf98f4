"""Where a function runs: which worker this is, and what it keeps. A context variable says it."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any, Self

from headrace.errors import CancelledError, FailedPreconditionError

__all__ = [
    "LeasedHere",
    "Resources",
    "Running",
    "get_current_worker_index",
    "kept_here",
    "one_of",
    "running",
]

_STOPPED = "the worker stopped, or has another coordinator"
_SLICE_SECONDS = 1.0


class _Entry:
    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None


class Resources:
    """What one life of a worker keeps for closures: datasets, iterators, values."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._is_closed = False

    def promise(self, resource: int) -> None:
        """Take note that something is about to be made: who needs it waits."""
        self._entries[resource] = _Entry()

    def keep(self, resource: int, value: Any, error: Exception | None = None) -> None:
        """Keep what was made, or why it could not be."""
        entry = self._entries.get(resource)
        if entry is None:
            _close(value)  # it was released meanwhile
            return
        entry.value, entry.error = value, error
        entry.done.set()

    def get(self, resource: int) -> Any:
        """Return something that is kept, once it is made.

        Raises:
            FailedPreconditionError: There is no such thing.
            Exception: It could not be made.
        """
        entry = self._entries.get(resource)
        if entry is None:
            raise FailedPreconditionError(
                f"this worker keeps nothing of the number {resource}: was it released? Hold the "
                "per-worker dataset, iterator or value for as long as functions use it"
            )
        while not entry.done.wait(_SLICE_SECONDS):
            if self._is_closed:
                raise CancelledError(_STOPPED)
        if entry.error is not None:
            raise entry.error
        return entry.value

    def release(self, resources: tuple[int, ...]) -> None:
        """Let go of what nobody uses any more; does not wait for those who still read from it."""
        gone = [self._entries.pop(resource, None) for resource in resources]
        values = [entry.value for entry in gone if entry is not None and _closes(entry.value)]
        if values:
            # An iterator is closed when nobody reads from it, and that is up to users' functions.
            threading.Thread(
                target=_close_all, args=(values,), name="headrace-closing", daemon=True
            ).start()

    def close(self) -> None:
        """Let go of all."""
        self._is_closed = True
        self.release(tuple(self._entries))


class Running:
    """A closure that runs on this thread.

    Attributes:
        worker: The number of this worker.
        resources: What the worker keeps.
        is_alone: Whether no other closure runs here at the same time.
        used: Iterators that it read from (`worker_iterator.WorkerIterator`), by resource.
        lease: Elements of a shared dataset that it was given; None: none.
        steps: How many steps of Keras optimizers it has taken.
    """

    def __init__(
        self, worker: int, resources: Resources, *, is_alone: bool, lease: Any = None
    ) -> None:
        self.worker = worker
        self.resources = resources
        self.is_alone = is_alone
        self.used: dict[int, Any] = {}
        self.lease = lease
        self.steps = 0


running: ContextVar[Running | None] = ContextVar("headrace_closure", default=None)
"""The closure that the code is part of; None: it is part of none."""


def get_current_worker_index() -> int:
    """Return the number of the worker that runs this function.

    For functions that are scheduled, and those that make a worker's dataset:

        def dataset_fn():
            return dataset.shard(num_workers, hr.coordinator.get_current_worker_index())

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         coordinator.schedule(hr.coordinator.get_current_worker_index).fetch()
    ...     strategy.close()
    0

    Raises:
        FailedPreconditionError: No worker runs it.
    """
    here = running.get()
    if here is None:
        raise FailedPreconditionError(
            "Cannot retrieve the worker index: this code does not run on a worker. Call it inside "
            "a function that is scheduled, or one that makes a per-worker dataset"
        )
    return here.worker


def kept_here(resource: int) -> Any:
    """Return what this worker keeps under a number: what its handle becomes on a worker.

    Raises:
        FailedPreconditionError: No worker runs this.
    """
    here = running.get()
    if here is None:
        raise FailedPreconditionError(
            "what workers keep for themselves (per-worker datasets, iterators, values) can be used "
            "inside scheduled functions alone"
        )
    return here.resources.get(resource)


class LeasedHere:
    """The iterator over what the closure that runs was given of a shared dataset.

    A function that holds one is loaded once and called many times, so it looks for it in each call.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._lease)

    get_next = __next__

    def get_next_as_optional(self) -> Any:
        """Return the next element, or an `Optional` without a value at the end."""
        return self._lease.get_next_as_optional()

    @property
    def _lease(self) -> Any:
        here = running.get()
        if here is None or here.lease is None:
            raise FailedPreconditionError(
                "a shared dataset can be read inside functions that run_epoch calls alone"
            )
        return here.lease


def one_of(values: tuple[Any, ...]) -> Any:
    """Return this worker's value of several.

    Raises:
        FailedPreconditionError: There is none for this worker.
    """
    worker = get_current_worker_index()
    if worker >= len(values):
        raise FailedPreconditionError(
            f"PerWorkerValues has {len(values)} values, and none for worker {worker}, which was "
            "added later; use create_per_worker_values, which makes one for each worker"
        )
    return values[worker]


def _closes(value: Any) -> bool:
    return hasattr(type(value), "close_for_worker")


def _close_all(values: list[Any]) -> None:
    for value in values:
        _close(value)


def _close(value: Any) -> None:
    if _closes(value):
        value.close_for_worker()
