"""Which strategy a Keras model belongs to."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["models_of", "set_strategy", "strategy_of"]

_STRATEGY = "_headrace_strategy"
_models: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def strategy_of(model: Any) -> Any:
    """Return the strategy of a model; None for a model that plain Keras trains."""
    return vars(model).get(_STRATEGY)


def set_strategy(model: Any, strategy: Any) -> None:
    """Assign a model to a strategy."""
    object.__setattr__(model, _STRATEGY, strategy)
    models = _models.setdefault(strategy, [])
    models.append(weakref.ref(model, models.remove))


def models_of(strategy: Any) -> list[Any]:
    """Return the models that belong to a strategy."""
    found = (each() for each in _models.get(strategy, ()))
    return [each for each in found if each is not None]
