"""Records and functions that the coordinator sends to training workers.

Nothing here imports Keras before a function is called: a worker sets the back end of Keras first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

__all__ = [
    "OptimizerSpec",
    "StepResult",
    "TrainCall",
    "VariableRole",
    "VariableSpec",
    "build_model_copy",
    "build_object",
    "layer_of",
    "predict_steps",
    "test_steps",
    "train_steps",
    "variable_of",
]


def _use_backend(backend: str) -> None:
    """Set the back end of Keras, unless Keras is imported already."""
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = backend


# --- steps of `fit`, `evaluate` and `predict` -----------------------------------------------------


class TrainCall(NamedTuple):
    """Arguments of a training call, except the batches.

    Attributes:
        first_step: Optimizer step number of the first batch.
        seed: Seed of random numbers without a Keras variable, as on PyTorch.
        learning_rate: Learning rate; None uses the optimizer's schedule.
        scale: Factor of the loss in half precision; None disables scaling.
        version: Number that changes when the coordinator writes variables. Variables that no step
            changes are read once per version.
    """

    first_step: int
    seed: int
    learning_rate: float | None
    scale: float | None
    version: int


class StepResult(NamedTuple):
    """Result of a training or evaluation call.

    Attributes:
        steps: Number of batches.
        metrics: Sums of metrics over these batches.
        logs: Logs of the last step: metrics of these batches, and additional values of a user's
            `train_step`.
        non_finite: For each batch whether a gradient was not finite; empty without `scale`.
    """

    steps: int
    metrics: list[NDArray[Any]]
    logs: dict[str, Any]
    non_finite: list[bool]


def build_model_copy(backend: str, *args: Any) -> Any:
    """Return a worker's copy of a model. Each worker calls this once.

    Args:
        backend: The back end of Keras in the coordinator.
        *args: Arguments of `WorkerModel`.
    """
    _use_backend(backend)
    from headrace.adapters.keras_training.worker_model import (  # noqa: PLC0415 - after it
        WorkerModel,
    )

    return WorkerModel(*args)


def train_steps(model: Any, call: TrainCall, batches: Sequence[Any]) -> StepResult:
    """Run training steps on a worker; the coordinator schedules this."""
    result: StepResult = model.train(call, batches)
    return result


def test_steps(model: Any, version: int, batches: Sequence[Any]) -> StepResult:
    """Run evaluation steps on a worker; the coordinator schedules this."""
    result: StepResult = model.test(version, batches)
    return result


def predict_steps(model: Any, version: int, batches: Sequence[Any]) -> list[Any]:
    """Run predictions on a worker; the coordinator schedules this."""
    outputs: list[Any] = model.predict(version, batches)
    return outputs


# --- objects in scheduled functions ---------------------------------------------------------------

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
        rate: Learning rate, a variable on the servers; None if the optimizer has a schedule.
    """

    applies: Any
    rate: Any


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
        variables: Specs of the variables, in the same order.
        optimizers: Specs of the optimizers, in the same order.
        statistics: Optimizer that applies changes of statistics: gradient descent with learning
            rate 1.
    """
    _use_backend(backend)
    from headrace.adapters.keras_training.worker_objects import (  # noqa: PLC0415 - after it
        load_object,
    )

    value, found = load_object(data, variables, optimizers, statistics)
    object.__setattr__(value, _VARIABLES, found)
    return value


def layer_of(model: Any, index: int) -> Any:
    """Return a layer of a model that `build_object` created."""
    from headrace.adapters.keras_training.keras_internals import all_layers  # noqa: PLC0415

    return all_layers(model)[index]


def variable_of(value: Any, index: int) -> Any:
    """Return a variable of an object that `build_object` created."""
    return vars(value)[_VARIABLES][index]
