"""Finds Keras objects with state, without importing Keras."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = [
    "LINKED_ATTRIBUTE",
    "SUPPORTED_KERAS_USE",
    "is_keras_3",
    "is_linked",
    "keras_state",
    "reduce_keras_object",
    "set_keras_reducer",
]

SUPPORTED_KERAS_USE = (
    "Supported: model.fit, evaluate and predict, and functions that a coordinator schedules, with "
    "a model that is made in the scope of this ParameterServerStrategy or passed to "
    "hr.keras.distribute(model, strategy); and model.fit(hr.keras.dataset(dataset)) of a model "
    "that is made outside of any scope"
)
"""Last part of each error about a Keras model under a strategy."""


def is_keras_3() -> bool:
    """Return whether this program has imported Keras 3."""
    return str(getattr(sys.modules.get("keras"), "__version__", "")).startswith("3.")


def keras_state(value: Any) -> str | None:
    """Return a description of a Keras object whose state is trained; None for other values.

    These are models, layers with trainable weights, optimizers, metrics and variables.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return None
    kind = type(value)
    # Keras sets its version at the end of its import, which another thread may be executing.
    kinds = _kinds(keras, hasattr(keras, "__version__"))
    if not issubclass(kind, tuple(kinds)):
        return None
    what = next(name for base, name in kinds.items() if issubclass(kind, base))
    if what == "layer" and not value.trainable_variables:
        return None  # it has no weights, or only constants, which are the same everywhere
    return f"the Keras {what} {getattr(value, 'name', kind.__name__)!r} ({kind.__name__})"


def is_linked(value: Any) -> bool:
    """Return whether this is a Keras variable whose value is on parameter servers."""
    return hasattr(type(value), LINKED_ATTRIBUTE)


LINKED_ATTRIBUTE = "headrace_local_class"
"""Attribute of classes of such variables: the class that Keras gave them."""

_reduce: Callable[[Any], Any] | None = None


def set_keras_reducer(reduce: Callable[[Any], Any]) -> None:
    """Set the function that pickles Keras objects with state for workers."""
    global _reduce
    _reduce = reduce


def reduce_keras_object(value: Any) -> Any:
    """Return how to pickle a Keras object with state for workers, or None if not possible.

    Args:
        value: An object that `keras_state` describes.
    """
    return None if _reduce is None else _reduce(value)


@functools.cache
def _kinds(keras: Any, is_imported: bool) -> dict[type, str]:
    found = {}
    for what, module, name in _KINDS:
        base = getattr(getattr(keras, module, None) if module else keras, name, None)
        if base is not None:
            found[base] = what
    return found


_KINDS = (
    ("model", "", "Model"),
    ("layer", "layers", "Layer"),
    ("optimizer", "optimizers", "Optimizer"),
    ("metric", "metrics", "Metric"),
    ("variable", "", "Variable"),
)
