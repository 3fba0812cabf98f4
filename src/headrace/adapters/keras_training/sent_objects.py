"""What workers are told of Keras objects that scheduled functions use, and what they make of it.

Importing this module does not import Keras: a worker has to be told of its back end before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

__all__ = [
    "SentOptimizer",
    "SentVariable",
    "VariableKind",
    "build_object",
    "use_backend",
    "variable_of",
]

_VARIABLES = "_headrace_worker_variables"


class VariableKind:
    """What a worker does with a variable."""

    WEIGHT = "weight"
    """It is read, and changes are added to it."""
    STATISTIC = "statistic"
    """Likewise; in a round, changes of several workers are averaged."""
    METRIC = "metric"
    """It begins each function call at zero, and is added to the one on the servers."""
    SEED = "seed"
    """It counts draws of random numbers, on each worker by itself."""


class SentVariable(NamedTuple):
    """What a worker is told of a variable.

    Attributes:
        kind: See `VariableKind`.
        placed: The variable on the servers; None for a seed.
        value: Of a seed.
    """

    kind: str
    placed: Any
    value: NDArray[Any] | None = None


class SentOptimizer(NamedTuple):
    """What a worker is told of an optimizer.

    Attributes:
        applies: The optimizer on the servers.
        rate: The variable on the servers that is its learning rate; None: a schedule says it.
    """

    applies: Any
    rate: Any


def use_backend(backend: str) -> None:
    """Have Keras use a back end, if it is not imported in this process yet."""
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = backend


def build_object(
    backend: str,
    data: bytes,
    variables: Sequence[SentVariable],
    optimizers: Sequence[SentOptimizer],
    statistics: Any,
) -> Any:
    """Return a worker's copy of a Keras object; the coordinator has each worker call this once.

    Args:
        backend: Of Keras, as the coordinator has it.
        data: The object, its variables and its optimizers, as `dump_objects` packed them.
        variables: What each variable is.
        optimizers: What each optimizer is.
        statistics: Applies changes of statistics: gradient descent with the rate 1.
    """
    use_backend(backend)
    from headrace.adapters.keras_training.worker_objects import (  # noqa: PLC0415 - after it
        load_object,
    )

    value, found = load_object(data, variables, optimizers, statistics)
    object.__setattr__(value, _VARIABLES, found)
    return value


def variable_of(value: Any, index: int) -> Any:
    """Return a variable of an object that `build_object` made."""
    return vars(value)[_VARIABLES][index]
