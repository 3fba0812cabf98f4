"""Handles of per-worker values, variables, datasets and iterators in the coordinator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from headrace.arguments import check_instance
from headrace.coordinator.closure import Payload, RemoteValueStatus
from headrace.coordinator.closure_context import get_resource, select_worker_value
from headrace.coordinator.closure_factory import ClosureFactory
from headrace.coordinator.messages import WorkerResource
from headrace.coordinator.packing import pack, record_handle
from headrace.coordinator.worker_iterator import DATASET_TYPES, WorkerIterator
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
    """One value per worker; a scheduled function receives the value of its worker.

    >>> import headrace as hr
    >>> hr.coordinator.PerWorkerValues(["a", "b"])
    <PerWorkerValues of 2 workers>

    Args:
        values: Values in worker order.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise TypeError(f"`values` must be a list with a value for each worker, got {values!r}")
        self._values = tuple(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return select_worker_value, (self._values,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._values)} workers>"


class PerWorkerResource:
    """Resource that each worker creates once; a scheduled function receives its worker's one.

    New workers, and lost ones that return, create it, too. Workers release it when neither this
    object nor a function that uses it is referenced.
    """

    def __init__(
        self,
        closure_factory: ClosureFactory,
        name: str,
        fn: Callable[..., Any],
        arguments: Callable[[int, bytes], tuple[Any, ...]],
    ) -> None:
        number = closure_factory.next_resource_number()
        self._closure_factory = closure_factory
        # Packed once, except for the state: the objects it references live as long as this one.
        self._packing = packing = closure_factory.start_packing()
        first = pack((arguments(number, b""), {}), packing)

        def packed(state: bytes) -> Payload:
            return pack((arguments(number, state), {}), closure_factory.start_packing())

        self._resource = WorkerResource(
            number,
            name,
            closure_factory.pack_function(fn),
            lambda state: packed(state) if state else first,
        )
        closure_factory.define_resource(self._resource)
        self._finalizer = weakref.finalize(self, closure_factory.release_resource, number)
        self._finalizer.atexit = False

    @property
    def statuses(self) -> tuple[RemoteValueStatus, ...]:
        """Status on each worker that was connected, in worker order."""
        return tuple(result.status for _, result in sorted(self._resource.results.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        record_handle(self)
        return get_resource, (self._resource.number,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._resource.name}>"


class PerWorkerVariable(PerWorkerResource):
    """Variable with an independent copy on each worker.

    Created by `hr.Variable(..., per_worker_variable=True)` in the scope of a
    `ParameterServerStrategy` that has a coordinator. A scheduled function receives its worker's
    copy, an array. A worker that was lost starts with the initial value again; writes of a
    function to a copy are not undone if the function is lost and rerun.

    Args:
        closure_factory: Creates the copies on the workers.
        initial_value: Initial value of each copy: an array or number, or a function that returns
            one.
        name: Name for messages.
        dtype: Dtype; None uses that of the initial value.
        trainable: Ignored; the variable is never trainable.
        aggregation: Accepted for compatibility with other variables; copies are never aggregated.
        synchronization: Likewise.
        shape: None, or the shape of the initial value.
    """

    trainable = False

    def __init__(
        self,
        closure_factory: ClosureFactory,
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
            closure_factory,
            f"Variable {self.name!r}",
            Variable,
            lambda number, state: (value, self.name),
        )

    def read_all(self) -> list[Any]:
        """Return the copies of all connected workers, in worker order.

        Raises:
            CancelledError: If a worker was lost in the meantime.
        """
        return self._closure_factory.run_on_each_worker(_read_variable, self)

    def __getattr__(self, name: str) -> Any:
        if hasattr(Variable, name):
            raise FailedPreconditionError(
                f"each worker has a separate copy of Variable {self.name!r}: `{name}` is "
                "available only in scheduled functions; read_all() returns all copies"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _read_variable(variable: Any) -> Any:
    return variable.read()


class PerWorkerDataset(PerWorkerResource):
    """Dataset that each worker reads independently, from the beginning to the end.

    Created by `coordinator.create_per_worker_dataset`. Pass `iter` of it to scheduled functions;
    there, `next` returns the next element of the worker's own dataset.
    """

    def __init__(
        self, closure_factory: ClosureFactory, source: Any, build: Callable[[Any], Any]
    ) -> None:
        self._source = source
        super().__init__(
            closure_factory, "a per-worker dataset", build, lambda number, state: (source,)
        )

    @property
    def element_spec(self) -> Any:
        """Spec of the elements, as reported by a worker."""
        if isinstance(self._source, DATASET_TYPES):
            return self._source.element_spec
        return self._closure_factory.run_on_any_worker(_element_spec, self)

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._closure_factory, self)

    def build(self) -> PerWorkerDataset:
        """Return the handle of the workers' datasets in scheduled functions: this object."""
        return self


class PerWorkerIterator(PerWorkerResource):
    """Iterator on each worker, created by `iter(per_worker_dataset)`.

    On a lost worker that returns, the iterator resumes after the last element of a function that
    ended.
    """

    def __init__(self, closure_factory: ClosureFactory, dataset: PerWorkerDataset) -> None:
        check_instance("dataset", dataset, PerWorkerDataset)
        self._dataset = dataset
        super().__init__(
            closure_factory,
            "an iterator over a per-worker dataset",
            WorkerIterator,
            lambda number, state: (dataset, number, state),
        )

    @property
    def element_spec(self) -> Any:
        """Spec of the elements, as reported by a worker."""
        return self._dataset.element_spec

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "Iterating over an AsyncDistributedIterator is not supported right now: each worker "
            "has a separate iterator. Pass this one to a scheduled function, and call next() "
            "there"
        )

    get_next = __next__


def _element_spec(dataset: Any) -> Any:
    return dataset.element_spec
