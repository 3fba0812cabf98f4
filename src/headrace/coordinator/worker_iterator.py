"""Per-worker datasets and iterators on the worker, and iterators over leased elements."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self

import msgspec

from headrace.coordinator.closure import Payload
from headrace.coordinator.closure_context import current_closure
from headrace.coordinator.packing import unpack
from headrace.data.dataset import Dataset
from headrace.data.optional import Optional
from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
from headrace.distribute.execution_context import variable_refusal
from headrace.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from headrace.parameter_server.pickling import PerWorkerInput

__all__ = ["DATASET_TYPES", "LeasedElementIterator", "WorkerIterator", "build_dataset"]


DATASET_TYPES = (Dataset, DistributedDataset, DistributedDatasetsFromFunction)
"""Types of per-worker datasets."""


def build_dataset(dataset_or_fn: Any) -> Any:
    """Return the dataset of this worker.

    Args:
        dataset_or_fn: A dataset, or a function without arguments that returns one.

    Raises:
        InvalidArgumentError: If the function returns something else.
    """
    if isinstance(dataset_or_fn, DATASET_TYPES):
        return dataset_or_fn
    token = variable_refusal.set(_refuse_variable)
    try:
        dataset = dataset_or_fn()
        if isinstance(dataset, PerWorkerInput):
            dataset = dataset.build()
    finally:
        variable_refusal.reset(token)
    if not isinstance(dataset, DATASET_TYPES):
        raise InvalidArgumentError(
            "the function given to create_per_worker_dataset must return a Dataset or a "
            f"distributed dataset, but returned {dataset!r:.80} of type {type(dataset).__name__}"
        )
    return dataset


def _refuse_variable(name: str) -> Exception:
    return InvalidArgumentError(
        f"Creating variables in dataset_fn is not allowed, but Variable {name!r} is created "
        "there: each worker would create it again. Create it outside, in strategy.scope()"
    )


class WorkerIterator:
    """Iterator that scheduled functions read on this worker; thread-safe.

    Args:
        dataset: Dataset to read.
        resource: Number of the iterator as a resource.
        state: State at which to start; empty starts at the beginning.
    """

    def __init__(self, dataset: Any, resource: int, state: bytes = b"") -> None:
        self._iterator = iter(dataset)
        self._resource = resource
        self._lock = threading.Lock()
        #: State before the first read of each running closure.
        self._states_before: dict[object, bytes] = {}
        self._has_states = True
        if state:
            self._iterator.set_state(msgspec.json.decode(state))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: At the end; also a StopIteration.
        """
        closure = current_closure.get()
        with self._lock:
            if closure is not None and self._resource not in closure.used_iterators:
                closure.used_iterators[self._resource] = self
                if not closure.is_only_thread:
                    self._states_before[closure] = self._state()
            return self._iterator.get_next()

    get_next = __next__

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an `Optional` without a value at the end."""
        try:
            return Optional(self.get_next())
        except OutOfRangeError:
            return Optional()

    @property
    def element_spec(self) -> Any:
        """Spec of the elements."""
        return self._iterator.element_spec

    def state_after(self, closure: object) -> bytes:
        """Return the state that covers all ended closures; empty without state support."""
        with self._lock:
            self._states_before.pop(closure, None)
            return next(iter(self._states_before.values()), None) or self._state()

    def _state(self) -> bytes:
        if not self._has_states:
            return b""
        try:
            return msgspec.json.encode(self._iterator.get_state())
        except FailedPreconditionError:
            self._has_states = False
            return b""

    def close_for_worker(self) -> None:
        """Release threads and files, once no function reads."""
        with contextlib.suppress(Exception), self._lock:
            self._iterator.close()


# --------------------------------------------------------------------------------------------------
# Elements of a shared dataset in a function that `run_epoch` calls on a worker


class LeasedElementIterator:
    """Iterator over the elements leased to a closure, including those supplied while it reads.

    Args:
        elements: Elements sent with the closure.
        end_of_data: Whether the dataset ends after these.

    Attributes:
        request_more: Called when no element is left; returns once there is one, or the end is
            known.
        reached_end: Whether `next` has reported the end.
    """

    def __init__(self, elements: Iterable[Payload], *, end_of_data: bool) -> None:
        self._elements = deque(elements)
        self.num_given: int = len(self._elements)
        self.end_of_data = end_of_data
        self.reached_end: bool = False
        self.request_more: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    @property
    def num_unread(self) -> int:
        """Number of elements that were not read."""
        return len(self._elements)

    def feed(self, elements: list[Payload]) -> None:
        """Append elements."""
        self._elements += elements
        self.num_given += len(elements)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: At the end; also a StopIteration.
        """
        with self._lock:
            if not self._elements and not self.end_of_data:
                self.request_more()
            if not self._elements:
                self.reached_end = True
                raise OutOfRangeError("end of the shared dataset in this epoch")
            payload = self._elements.popleft()
        return unpack(payload)

    get_next = __next__

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an `Optional` without a value at the end."""
        try:
            return Optional(self.get_next())
        except OutOfRangeError:
            return Optional()
