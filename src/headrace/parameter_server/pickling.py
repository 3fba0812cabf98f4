"""Pickling of functions for workers: handles are sent, variables of this process are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from headrace.distribute.metrics import Metric
from headrace.distribute.variable import Variable
from headrace.errors import FailedPreconditionError
from headrace.frameworks.keras_state import (
    SUPPORTED_KERAS_USE,
    is_linked,
    keras_state,
    reduce_keras_object,
)
from headrace.plan.serialize import Pickler

__all__ = ["PerWorkerInput", "ReplyPickler", "WorkerPickler"]


class WorkerPickler(Pickler):
    """A pickler that rejects objects that would differ on a worker."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; raise for variables of this process and Keras objects."""
        kind = type(value)
        # Checks the exact class: variables on servers are virtual subclasses, and are sent as
        # handles.
        if Variable in kind.__mro__:
            raise FailedPreconditionError(
                f"the function captured Variable {value.name!r}, which was created outside of "
                "strategy.scope() and is local to this process: a worker would get a copy, and "
                "its writes would be lost. Create it in the scope, or pass its value as an "
                "argument: variable.read()"
            )
        if (found := keras_state(value)) is not None:
            return reduce_keras_object(value) or _refuse_keras(found)
        return super().reducer_override(value)


class ReplyPickler(Pickler):
    """A pickler for results of functions: the coordinator gets copies of them."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; raise for variables of the worker's process."""
        if isinstance(value, Metric) and (reduced := value.reduce_by_value()) is not None:
            return reduced
        if Variable in type(value).__mro__:
            raise FailedPreconditionError(
                f"Variable {value.name!r} is local to the worker's process: return its value, "
                "variable.read()"
            )
        if is_linked(value):
            raise FailedPreconditionError(
                f"{keras_state(value)} belongs to a worker, and its value is on parameter servers: "
                "return arrays, such as model.get_weights() or metric.result()"
            )
        return super().reducer_override(value)


def _refuse_keras(description: str) -> NoReturn:
    raise FailedPreconditionError(
        f"{description} cannot be sent to a worker: each worker would train a separate copy, and "
        f"this object would never change. {SUPPORTED_KERAS_USE}"
    )


# --- datasets to be created on workers ------------------------------------------------------------

# `distribute_dataset` of a parameter-server strategy returns one: the coordinator's process reads
# nothing, and `ClusterCoordinator.create_per_worker_dataset` makes each worker `build` it.


class PerWorkerInput:
    """A dataset to be built on each worker.

    Args:
        build: Creates the dataset on the worker that reads it.
        refusal: Error message for reads in this process.
    """

    def __init__(self, build: Callable[[], Any], refusal: str) -> None:
        self._build = build
        self._refusal = refusal

    def build(self) -> Any:
        """Return the dataset, on a worker."""
        return self._build()

    @property
    def element_spec(self) -> Any:
        """Spec of the elements."""
        return self._build().element_spec

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(self._refusal)

    __iter__ = __len__ = __bool__ = _refuse

    def __repr__(self) -> str:
        return "<a dataset that workers read: pass it to create_per_worker_dataset>"
