"""How the coordinator describes Keras objects to the workers that run scheduled functions.

This module does not import Keras, because a worker sets the back end before it imports Keras.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

__all__ = [
    "OptimizerSpec",
    "VariableRole",
    "VariableSpec",
    "build_object",
    "layer_of",
    "use_backend",
    "variable_of",
]

_VARIABLES = "_headrace_worker_variables"


class VariableRole:
    """How a worker uses the value of a variable."""

    WEIGHT = "weight"
    """Reads it, and sends changes, which are added."""
    STATISTIC = "statistic"
    """The same, but changes of several workers in a synchronous round are averaged."""
    METRIC = "metric"
    """Starts each function call at zero, and adds the result to the value on the servers."""
    SEED = "seed"
    """Counts draws of random numbers separately on each worker."""


class VariableSpec(NamedTuple):
    """A variable of a Keras object.

    Attributes:
        role: One of `VariableRole`.
        placed: The variable on the servers; None for a seed.
        value: The value of a seed.
    """

    role: str
    placed: Any
    value: NDArray[Any] | None = None


class OptimizerSpec(NamedTuple):
    """An optimizer of Keras.

    Attributes:
        applies: The optimizer on the servers.
        rate: The learning rate, a variable on the servers; None if the optimizer has a schedule.
    """

    applies: Any
    rate: Any


def use_backend(backend: str) -> None:
    """Set the back end of Keras, unless Keras is imported already."""
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = backend


def build_object(
    backend: str,
    data: bytes,
    variables: Sequence[VariableSpec],
    optimizers: Sequence[OptimizerSpec],
    statistics: Any,
) -> Any:
    """Return a worker's copy of a Keras object. Each worker calls this once.

    Args:
        backend: The back end of Keras in the coordinator.
        data: The object, its variables and its optimizers, serialized by `dump_objects`.
        variables: One for each of these variables.
        optimizers: One for each of these optimizers.
        statistics: The optimizer for changes of statistics: gradient descent with the rate 1.
    """
    use_backend(backend)
    from headrace.adapters.keras_training.worker_objects import (  # noqa: PLC0415 - after it
        load_object,
    )

    value, found = load_object(data, variables, optimizers, statistics)
    object.__setattr__(value, _VARIABLES, found)
    return value


def layer_of(model: Any, index: int) -> Any:
    """Return a layer of a model that `build_object` made."""
    from headrace.adapters.keras_training.keras_internals import all_layers  # noqa: PLC0415

    return all_layers(model)[index]


def variable_of(value: Any, index: int) -> Any:
    """Return a variable of an object that `build_object` made."""
    return vars(value)[_VARIABLES][index]
