"""Private parts of Keras that training uses, and attributes that this package adds to its objects.

Other private parts: `graph_internals` has those that pickling needs, `embedding_internals` those of
layers whose rows are on servers. After a new release of Keras, run
`tests/adapters/test_keras_model_pickling.py` and add the release to `TRIED_VERSIONS`;
`tests/adapters/test_keras_versions.py` asks for it.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.trainers.data_adapters import get_data_adapter as data_adapter
from keras.src.utils.python_utils import pythonify_logs

from headrace.errors import FailedPreconditionError
from headrace.parameter_server.arrays import as_array

__all__ = [
    "BACK_ENDS",
    "OWN_ATTRIBUTES",
    "TRIED_VERSIONS",
    "all_layers",
    "build_model",
    "check_back_end",
    "check_compiled",
    "check_labels",
    "compiled_losses",
    "data_adapter",
    "draw_keras_seed",
    "excludes_from_decay",
    "extend_class",
    "first_epoch",
    "flat_logs",
    "get_or_attach",
    "in_stateless_scope",
    "inner_optimizer",
    "learning_rate_variable",
    "models_of",
    "produces_mask",
    "pythonify_logs",
    "seed_variables",
    "set_momentum_product",
    "set_strategy",
    "step_variables",
    "strategy_of",
    "value_of",
]

TRIED_VERSIONS: dict[str, tuple[str, ...]] = {
    "3.15.0": ("jax", "torch"),
    "3.15.1": ("jax", "torch"),
}

"""Versions of Keras, and back ends, on which models have been pickled, loaded and trained.

All with JAX 0.10 and PyTorch 2.13. The first one is the oldest that pyproject.toml allows.
"""

BACK_ENDS = ("jax", "torch")

"""Back ends on which models are trained by strategies."""

OWN_ATTRIBUTES = "_headrace_"

"""Prefix of attributes that this package adds to Keras objects; they are not sent."""


def check_back_end() -> str:
    """Return the back end of Keras in this process.

    Raises:
        FailedPreconditionError: If strategies do not support this back end.
    """
    back_end: str = keras.backend.backend()
    if back_end not in BACK_ENDS:
        raise FailedPreconditionError(
            f"Keras runs on the back end {back_end!r}, but strategies train models on jax and "
            'torch only: set the environment variable KERAS_BACKEND to "jax" or "torch" before '
            "Keras is imported"
        )
    return back_end


def build_model(model: Any, batch: Any, *, with_loss: bool) -> None:
    """Build a model, its loss and its metrics for a batch; its optimizer is not built.

    Args:
        model: The model.
        batch: Argument of the model's steps.
        with_loss: Whether to build loss and metrics, which may need labels.
    """
    # Slots of the optimizer are on servers.
    optimizer, model.optimizer = getattr(model, "optimizer", None), None
    state, compiled = vars(model), {}
    if not with_loss:
        compiled = {name: state[name] for name in _COMPILED_ATTRIBUTES if name in state}
    try:
        state.update(dict.fromkeys(compiled))
        with warnings.catch_warnings():
            # Of JAX, for inputs of this dtype, which hold ids of tables: steps keep their 64 bits.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")
            model._symbolic_build(data_batch=batch)
    finally:
        state.update(compiled)
        model.optimizer = optimizer


_COMPILED_ATTRIBUTES = ("_compile_loss", "_compile_metrics")


def check_compiled(model: Any, method: str) -> None:
    """Raise Keras' own error if `compile` was not called."""
    model._assert_compile_called(method)


def check_labels(model: Any, batch: Any, method: str) -> None:
    """Raise ValueError where Keras' own steps would compute a loss of labels that are missing."""
    kind = type(model)
    step = kind.train_step if method == "fit" else kind.test_step
    has_labels = len(batch) > 1 and batch[1] is not None
    is_of_keras = all(each.__module__.startswith("keras.") for each in (step, kind.compute_loss))
    if has_labels or model.loss is None or not is_of_keras:
        return
    raise ValueError(
        f"{method} of the Keras model {model.name!r}: the batches have no labels, and its loss "
        "needs them: batches must be (x, y) or (x, y, sample_weight), or pass `y` beside an array"
    )


def first_epoch(model: Any, initial_epoch: int) -> int:
    """Return the first epoch of `fit`: the one that a callback restored, if any."""
    return getattr(model, "_initial_epoch", None) or initial_epoch


def flat_logs(model: Any, logs: dict[str, Any]) -> Any:
    """Return what `evaluate` returns without `return_dict`."""
    return model._flatten_metrics_in_order(logs)


def learning_rate_variable(optimizer: Any) -> Any:
    """Return the variable that is the learning rate of an optimizer; None: a schedule says it."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def excludes_from_decay(optimizer: Any) -> bool:
    """Return whether `exclude_from_weight_decay` of an optimizer was called."""
    return bool(
        getattr(optimizer, "_exclude_from_weight_decay", None)
        or getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    )


def value_of(variable: Any) -> Any:
    """Return the value of a variable as an array of NumPy that belongs to the caller."""
    # `np.array(variable)` warns, and so does Keras' `convert_to_numpy` with PyTorch.
    return np.array(as_array(variable.value))


def seed_variables(model: Any) -> list[Any]:
    """Return the variables of a model that count draws of random numbers."""
    return [each.state for layer in all_layers(model) for each in layer._seed_generators]


def step_variables(model: Any) -> list[Any]:
    """Return the non-trainable variables that a step may change: no weights of frozen layers."""
    found = [each for layer in all_layers(model) for each in _layer_state(layer)]
    found += seed_variables(model)
    return list({id(each): each for each in found}.values())


def _layer_state(layer: Any) -> list[Any]:
    return list(layer._non_trainable_variables) if layer.trainable else []


def compiled_losses(model: Any) -> list[Any]:
    """Return the losses that `compile` was given, of a model that is built; each once."""
    compiled = getattr(model, "_compile_loss", None)
    found = [each[1] for each in getattr(compiled, "_flat_losses", None) or ()]
    return list({id(each): each for each in found}.values())


def produces_mask(layer: Any) -> bool:
    """Return whether a layer marks time steps that do not count."""
    return isinstance(layer, keras.layers.Masking) or bool(getattr(layer, "mask_zero", False))


def all_layers(model: Any) -> list[Any]:
    """Return a model and all layers in it."""
    return list(model._flatten_layers())


def set_momentum_product(optimizer: Any, product: float) -> None:
    """Set the product of momentum factors that a `Nadam` keeps."""
    optimizer._u_product.assign(product)


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that changes variables, inside of one that scales the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def draw_keras_seed() -> int:
    """Draw a seed that follows from `keras.utils.set_random_seed`, which seeds this generator."""
    return int(np.random.randint(1 << 31))


# --- attributes and classes of this package -------------------------------------------------------


def get_or_attach(
    owner: Any,
    name: str,
    make: Callable[[Any], Any],
    is_current: Callable[[Any], bool] = lambda found: True,
) -> Any:
    """Return an object that is attached to a Keras object; make it if it is missing or outdated.

    Args:
        owner: The Keras object.
        name: Name of the attribute, without its prefix.
        make: Called with the previous object, or None; returns the new one.
        is_current: Returns whether the previous object can still be used.
    """
    found = vars(owner).get(OWN_ATTRIBUTES + name)
    if found is None or not is_current(found):
        found = make(found)
        object.__setattr__(owner, OWN_ATTRIBUTES + name, found)
    return found


def extend_class(kind: Any, mixin: Any, **attributes: Any) -> type:
    """Return a subclass of a Keras class in which the methods of `mixin` override its methods.

    It has the same name, because error messages contain it. The Keras class is its second base.
    """
    return _extend_class(kind, mixin, **attributes)


@functools.cache
def _extend_class(kind: Any, mixin: Any, **attributes: Any) -> type:
    return type(kind.__name__, (mixin, kind), attributes)


_STRATEGY = OWN_ATTRIBUTES + "strategy"
_models: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def strategy_of(value: Any) -> Any:
    """Return the strategy of a model or layer; None for one that plain Keras trains."""
    return vars(value).get(_STRATEGY)


def set_strategy(value: Any, strategy: Any) -> None:
    """Assign a model, or an embedding layer, to a strategy."""
    object.__setattr__(value, _STRATEGY, strategy)
    if isinstance(value, keras.Model):
        models = _models.setdefault(strategy, [])
        models.append(weakref.ref(value, models.remove))


def models_of(strategy: Any) -> list[Any]:
    """Return the models that belong to a strategy."""
    found = (each() for each in _models.get(strategy, ()))
    return [each for each in found if each is not None]
