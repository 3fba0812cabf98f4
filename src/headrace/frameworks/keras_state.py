"""Finds Keras objects with state, without importing Keras."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["WHAT_WORKS", "is_keras_3", "keras_state"]

WHAT_WORKS = (
    "Keras models are not trained by strategies yet. What works: model.fit(hr.keras.dataset("
    "dataset)) of a model that is made outside of any scope; hr.Variable with hr.optimizers in "
    "scheduled functions; or a model that each worker builds for itself "
    "(coordinator.create_per_worker_values(build_model)), called with weights that are passed as "
    "arguments: model.stateless_call(weights, [], x)"
)
"""The end of each error about a Keras model under a strategy."""


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
    for what, module, name in _KINDS:
        found = getattr(getattr(keras, module, None) if module else keras, name, None)
        if found is None or not issubclass(kind, found):
            continue
        if name == "Layer" and not value.trainable_variables:
            return None  # without weights, or with constants: it is the same everywhere
        return f"the Keras {what} {getattr(value, 'name', kind.__name__)!r} ({kind.__name__})"
    return None


_KINDS = (
    ("model", "", "Model"),
    ("layer", "layers", "Layer"),
    ("optimizer", "optimizers", "Optimizer"),
    ("metric", "metrics", "Metric"),
    ("variable", "", "Variable"),
)
