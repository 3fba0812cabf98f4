"""A per-worker dataset and its iterator, as they are on the worker."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self

import msgspec

from headrace.coordinator.closure import Payload
from headrace.coordinator.current import running
from headrace.coordinator.packing import unpack
from headrace.data.dataset import Dataset
from headrace.data.optional import Optional
from headrace.distribute.context import refusing_variables
from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
from headrace.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from headrace.parameter_server.pickling import PerWorkerInput

__all__ = ["DATASETS", "LeasedElements", "WorkerIterator", "build_dataset"]


DATASETS = (Dataset, DistributedDataset, DistributedDatasetsFromFunction)
"""What a per-worker dataset may be."""


def build_dataset(dataset_or_fn: Any) -> Any:
    """Return the dataset of this worker.

    Args:
        dataset_or_fn: A dataset, or a function without arguments that returns one.

    Raises:
        InvalidArgumentError: The function returns something else.
    """
    if isinstance(dataset_or_fn, DATASETS):
        return dataset_or_fn
    before = refusing_variables.set(_no_variable)
    try:
        dataset = dataset_or_fn()
        if isinstance(dataset, PerWorkerInput):
            dataset = dataset.build()
    finally:
        refusing_variables.reset(before)
    if not isinstance(dataset, DATASETS):
        raise InvalidArgumentError(
            "the function given to create_per_worker_dataset must return a Dataset or a "
            f"distributed dataset, but returned {dataset!r:.80} of type {type(dataset).__name__}"
        )
    return dataset


def _no_variable(name: str) -> Exception:
    return InvalidArgumentError(
        f"Creating variables in dataset_fn is not allowed, and Variable {name!r} is made there: it "
        "would be made again by each worker. Make it in strategy.scope(), outside"
    )


class WorkerIterator:
    """What `next` is called on in a scheduled function; for several threads at once.

    Args:
        dataset: What it reads.
        resource: Its number.
        state: Where to begin; empty: at the beginning.
    """

    def __init__(self, dataset: Any, resource: int, state: bytes = b"") -> None:
        self._iterator = iter(dataset)
        self._resource = resource
        self._lock = threading.Lock()
        #: Where it stood before each closure that runs read from it first.
        self._before: dict[object, bytes] = {}
        self._has_states = True
        if state:
            self._iterator.set_state(msgspec.json.decode(state))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: There is none; a StopIteration, too.
        """
        closure = running.get()
        with self._lock:
            if closure is not None and self._resource not in closure.used:
                closure.used[self._resource] = self
                if not closure.is_alone:
                    self._before[closure] = self._state()
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
        """Return where it stands for all closures that have ended; empty: it has no states."""
        with self._lock:
            self._before.pop(closure, None)
            return next(iter(self._before.values()), None) or self._state()

    def _state(self) -> bytes:
        if not self._has_states:
            return b""
        try:
            return msgspec.json.encode(self._iterator.get_state())
        except FailedPreconditionError:
            self._has_states = False
            return b""

    def close_for_worker(self) -> None:
        """Release threads and files, once nobody reads."""
        with contextlib.suppress(Exception), self._lock:
            self._iterator.close()


# --------------------------------------------------------------------------------------------------
# Elements of a shared dataset, as a function that `run_epoch` calls sees them on its worker


class LeasedElements:
    """An iterator over what this closure was given, and is given while it reads.

    Args:
        elements: Those that came with it.
        has_ended: There are no more after these.

    Attributes:
        ask: Called where there is none left; returns when there is one, or the end is known.
        met_end: Whether `next` has said that there is none.
    """

    def __init__(self, elements: Iterable[Payload], *, has_ended: bool) -> None:
        self._elements = deque(elements)
        self.num_given = len(self._elements)
        self.has_ended = has_ended
        self.met_end = False
        self.ask: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    @property
    def num_left(self) -> int:
        """Elements that were not asked for."""
        return len(self._elements)

    def feed(self, elements: list[Payload]) -> None:
        """Take more elements."""
        self._elements += elements
        self.num_given += len(elements)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: There is none; a StopIteration, too.
        """
        with self._lock:
            if not self._elements and not self.has_ended:
                self.ask()
            if not self._elements:
                self.met_end = True
                raise OutOfRangeError("the shared dataset has no more elements in this epoch")
            payload = self._elements.popleft()
        return unpack(payload)

    get_next = __next__

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an `Optional` without a value at the end."""
        try:
            return Optional(self.get_next())
        except OutOfRangeError:
            return Optional()
