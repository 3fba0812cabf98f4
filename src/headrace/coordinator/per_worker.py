"""What each worker has for itself, as it is seen from the coordinator: handles."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from headrace.arguments import check_instance
from headrace.coordinator.closure import Payload, RemoteValueStatus
from headrace.coordinator.current import kept_here, one_of
from headrace.coordinator.keeping import Keeping
from headrace.coordinator.messages import Resource
from headrace.coordinator.packing import keep, pack
from headrace.coordinator.worker_iterator import DATASETS, WorkerIterator
from headrace.distribute.variable import Variable
from headrace.errors import FailedPreconditionError

__all__ = [
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerResource",
    "PerWorkerValues",
    "PerWorkerVariable",
]


class PerWorkerValues:
    """A value for each worker: in a function that is scheduled it is that of the worker.

    >>> import headrace as hr
    >>> hr.coordinator.PerWorkerValues(["a", "b"])
    <PerWorkerValues of 2 workers>

    Args:
        values: In the order of the workers.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise TypeError(f"`values` must be a list with a value for each worker, got {values!r}")
        self._values = tuple(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return one_of, (self._values,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._values)} workers>"


class PerWorkerResource:
    """What each worker makes once and keeps; in a function that is scheduled it is what it made.

    Another worker, and one that was lost and is back, makes it, too. Workers let go of it when
    nobody holds this object, nor a function that uses it.
    """

    def __init__(
        self,
        keeper: Keeping,
        name: str,
        fn: Callable[..., Any],
        arguments: Callable[[int, bytes], tuple[Any, ...]],
    ) -> None:
        number = keeper.next_resource()
        self._keeper = keeper
        # Packed once, but for the state: what it names is held as long as this is.
        self._packing = packing = keeper.packing()
        first = pack((arguments(number, b""), {}), packing)

        def packed(state: bytes) -> Payload:
            return pack((arguments(number, state), {}), keeper.packing())

        self._resource = Resource(
            number, name, keeper.function(fn), lambda state: packed(state) if state else first
        )
        keeper.define(self._resource)
        self._finalizer = weakref.finalize(self, keeper.release, number)
        self._finalizer.atexit = False

    @property
    def statuses(self) -> tuple[RemoteValueStatus, ...]:
        """How far it is on each worker that was there, in the order of their numbers."""
        return tuple(result.status for _, result in sorted(self._resource.results.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        keep(self)
        return kept_here, (self._resource.number,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._resource.name}>"


class PerWorkerVariable(PerWorkerResource):
    """A variable of which each worker has a copy of its own; nobody keeps the copies alike.

    `hr.Variable(..., per_worker_variable=True)` in the scope of a `ParameterServerStrategy` that
    has a coordinator makes it. In a function that is scheduled it is the worker's copy, an array
    there. A worker that was lost begins with the initial value again, and what a function wrote to
    a copy before it was lost stays there.

    Args:
        keeper: Has workers keep it.
        initial_value: Of each copy: an array or number, or a function that returns one.
        name: For people.
        dtype: None: that of the initial value.
        trainable: It is not, whatever this says.
        aggregation: Accepted as of other variables; copies are never made one.
        synchronization: Likewise.
        shape: None, or that of the initial value.
    """

    trainable = False

    def __init__(
        self,
        keeper: Keeping,
        initial_value: Any,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = False,
        aggregation: Any = None,
        synchronization: Any = None,
        *,
        shape: Any = None,
    ) -> None:
        value = np.asarray(initial_value() if callable(initial_value) else initial_value, dtype)
        if value.dtype.kind in "OSU":
            raise ValueError(
                "`initial_value` must be a number or an array of numbers, or a function that "
                f"returns one, but it has dtype {value.dtype}"
            )
        if shape is not None and tuple(shape) != value.shape:
            raise ValueError(f"`shape` is {shape}, but the initial value has shape {value.shape}")
        self.name, self.shape, self.dtype = name or "Variable", value.shape, value.dtype
        super().__init__(
            keeper, f"Variable {self.name!r}", Variable, lambda number, state: (value, self.name)
        )

    def read_all(self) -> list[Any]:
        """Return the copies of all workers that are there, in the order of their numbers.

        Raises:
            CancelledError: A worker was lost meanwhile.
        """
        return self._keeper.on_each(_read, self)

    def __getattr__(self, name: str) -> Any:
        if hasattr(Variable, name):
            raise FailedPreconditionError(
                f"each worker has a copy of Variable {self.name!r}: `{name}` is for functions that "
                "are scheduled; here read_all() returns all copies"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _read(variable: Any) -> Any:
    return variable.read()


class PerWorkerDataset(PerWorkerResource):
    """A dataset that each worker reads for itself, from the beginning to the end.

    `coordinator.create_per_worker_dataset` makes it. `iter` of it is passed to functions that are
    scheduled; there, `next` gives the next element of that worker's own.
    """

    def __init__(self, keeper: Keeping, source: Any, build: Callable[[Any], Any]) -> None:
        self._source = source
        super().__init__(keeper, "a per-worker dataset", build, lambda number, state: (source,))

    @property
    def element_spec(self) -> Any:
        """Spec of the elements, as a worker says."""
        if isinstance(self._source, DATASETS):
            return self._source.element_spec
        return self._keeper.evaluate(_element_spec, self)

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._keeper, self)

    def build(self) -> PerWorkerDataset:
        """Return what stands for each worker's dataset in a function that is scheduled: this."""
        return self


class PerWorkerIterator(PerWorkerResource):
    """An iterator on each worker; `iter(per_worker_dataset)` makes it.

    An iterator of a worker that was lost goes on, when the worker is back, after the last element
    of a function that ended.
    """

    def __init__(self, keeper: Keeping, dataset: PerWorkerDataset) -> None:
        check_instance("dataset", dataset, PerWorkerDataset)
        self._dataset = dataset
        super().__init__(
            keeper,
            "an iterator over a per-worker dataset",
            WorkerIterator,
            lambda number, state: (dataset, number, state),
        )

    @property
    def element_spec(self) -> Any:
        """Spec of the elements, as a worker says."""
        return self._dataset.element_spec

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "Iterating over an AsyncDistributedIterator is not supported right now: each worker "
            "has an iterator of its own. Pass this one to a function that you schedule, and call "
            "next() there"
        )

    get_next = __next__


def _element_spec(dataset: Any) -> Any:
    return dataset.element_spec
