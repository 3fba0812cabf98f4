"""Optimizers of Keras as optimizers on parameter servers, with the same numbers and formulas.

    converted = server_optimizer(model.optimizer, "optimizer")
    converted.exclude_from_weight_decay(
        [server_variables[v.path] for v in variables if not decays(model.optimizer, v)]
    )

A parameter server sees one shard of a variable. Optimizers whose rule needs a whole variable, and
those with a rule of the user, are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from headrace.adapters.keras_training.keras_internals import inner_optimizer
from headrace.errors import FailedPreconditionError
from headrace.parameter_server import optimizers, schedules

__all__ = [
    "SERVER_OPTIMIZERS",
    "WHOLE_VARIABLE_OPTIMIZERS",
    "check_optimizer",
    "has_weight_decay",
    "server_optimizer",
    "settings_of",
]

_ARGUMENTS = {
    "Adadelta": ("rho", "epsilon"),
    "Adagrad": ("initial_accumulator_value", "epsilon"),
    "Adam": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "AdamW": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "Adamax": ("beta_1", "beta_2", "epsilon"),
    "Ftrl": (
        "learning_rate_power",
        "initial_accumulator_value",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "l2_shrinkage_regularization_strength",
        "beta",
    ),
    "Lion": ("beta_1", "beta_2"),
    "Nadam": ("beta_1", "beta_2", "epsilon"),
    "RMSprop": ("rho", "momentum", "epsilon", "centered"),
    "SGD": ("momentum", "nesterov"),
}
"""By class, of Keras and of Headrace alike: the arguments that no other optimizer need have."""

SERVER_OPTIMIZERS = tuple(_ARGUMENTS)
"""Classes of `keras.optimizers` that parameter servers run."""

WHOLE_VARIABLE_OPTIMIZERS = ("Adafactor", "Lamb", "Muon")
"""Classes of `keras.optimizers` whose rule needs a whole variable, not a shard of it."""

_UNSUPPORTED = {
    **dict.fromkeys(
        WHOLE_VARIABLE_OPTIMIZERS,
        "its rule needs a whole variable, but a server may have only a shard of it",
    ),
    "MultiOptimizer": "they train all variables of a model with a single optimizer",
    "ScheduleFreeAdamW": "its slots start as copies of the variables",
}
"""By class: why parameter servers do not run it."""

_RULE_METHODS = (
    "update_step",
    "apply",
    "apply_gradients",
    "stateless_apply",
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
)
"""Methods of Keras' optimizers that decide what a step does."""

_SCHEDULES = (
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
)
"""Schedules that Keras and Headrace both have, with the same arguments."""


def server_optimizer(
    optimizer: keras.optimizers.Optimizer, name: str | None
) -> optimizers.Optimizer:
    """Return the optimizer of `hr.optimizers` with the numbers that an optimizer of Keras has now.

    Schedules are evaluated in NumPy's numbers where Headrace has their formula; others are called.
    A `LossScaleOptimizer` is replaced by its inner optimizer, and steps with gradients that are
    not finite are skipped; the caller scales the loss. `loss_scale_factor` is left to the caller,
    too: it divides the gradients by it.

    Args:
        optimizer: Of Keras; it need not be built, and is not changed.
        name: Name that slots and the count of steps have on the servers; None: one is given to it.

    Raises:
        FailedPreconditionError: If parameter servers do not support it (`check_optimizer`).
        ValueError: If one of its numbers is out of range.
    """
    kind = check_optimizer(optimizer)
    inner = _unwrap_optimizer(optimizer)
    converted: optimizers.Optimizer = getattr(optimizers, kind)(
        learning_rate=_learning_rate(inner),
        name=name,
        non_finite="apply" if inner is optimizer else "skip",
        **_common_arguments(inner, kind),
    )
    return converted


def settings_of(optimizer: keras.optimizers.Optimizer) -> tuple[Any, ...]:
    """Return what `server_optimizer` uses of an optimizer, for comparing; no learning rate.

    Of learning rates, it has schedules and functions only: numbers may change at any time.
    """
    inner = _unwrap_optimizer(optimizer)
    rate = inner._learning_rate
    return _common_arguments(inner, check_optimizer(optimizer)), rate if callable(rate) else None


def _common_arguments(inner: Any, kind: str) -> dict[str, Any]:
    """Return the arguments that an optimizer on servers has in common with one of Keras."""
    # Keras takes a bound of 0 or less for no bound.
    clips = {
        clip: value
        for clip in ("clipnorm", "clipvalue", "global_clipnorm")
        if (value := getattr(inner, clip)) is not None and value > 0
    }
    return {
        **clips,
        **{argument: getattr(inner, argument) for argument in _ARGUMENTS[kind]},
        "weight_decay": inner.weight_decay,
        "use_ema": bool(inner.use_ema),
        "ema_momentum": inner.ema_momentum,
        "ema_overwrite_frequency": inner.ema_overwrite_frequency or None,
    }


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> str:
    """Check that parameter servers run an optimizer; return the name of its class in Keras.

    Raises:
        FailedPreconditionError: If they do not; the message names the supported ones.
    """
    wrapper = type(optimizer)
    inner = _unwrap_optimizer(optimizer)
    kind = next(
        (name for each in type(inner).__mro__ if (name := _name_in_keras(each)) is not None), None
    )
    for each in {wrapper, type(inner)}:
        if method := _find_overridden_method(each):
            raise _unsupported_error(each.__name__, f"it overrides {method}")
    if kind not in _ARGUMENTS:
        reason = _UNSUPPORTED.get(kind or "", "its rule is not implemented there")
        raise _unsupported_error(type(inner).__name__, reason)
    steps = inner.gradient_accumulation_steps
    if steps:
        raise _unsupported_error(
            f"{type(inner).__name__} with gradient_accumulation_steps={steps}",
            "every gradient is applied there; use larger batches, or gradient_accumulation_steps="
            "None",
        )
    return kind


def has_weight_decay(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Return whether an optimizer of Keras decays a variable.

    Args:
        optimizer: Of Keras.
        variable: One that it trains, not a copy: `exclude_from_weight_decay(var_list)` of Keras
            goes by identity.
    """
    inner = _unwrap_optimizer(optimizer)
    return inner.weight_decay is not None and bool(inner._use_weight_decay(variable))


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers that scale the loss."""
    inner = inner_optimizer(optimizer)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            "`optimizer` must be an optimizer of Keras, but got a value of type "
            f"{type(inner).__name__}"
        )
    return inner


def _name_in_keras(kind: type) -> str | None:
    """Return the name that a class has in `keras.optimizers`, if it is one of them."""
    name = kind.__name__
    is_known = name in _ARGUMENTS or name in _UNSUPPORTED
    return name if is_known and getattr(keras.optimizers, name, None) is kind else None


def _find_overridden_method(kind: type) -> str | None:
    """Return a method by which a class of the user decides what a step does."""
    for method in _RULE_METHODS:
        module = getattr(getattr(kind, method, None), "__module__", None) or "keras"
        if module.partition(".")[0] != "keras":
            return method
    return None


def _unsupported_error(what: str, why: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"parameter servers do not run the optimizer {what}: {why}. They run "
        f"{', '.join(SERVER_OPTIMIZERS)} of keras.optimizers, and subclasses that keep their rule"
    )


# --- learning rates ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StepSchedule:
    """A schedule of the user, or one that Headrace has no formula for."""

    schedule: Callable[[Any], Any]

    def __call__(self, step: int) -> float:
        return _to_float(self.schedule(keras.ops.convert_to_tensor(step, dtype="int32")))


@dataclass(frozen=True)
class _RateFunction:
    """A function of the user without arguments, as Keras takes it for a learning rate."""

    function: Callable[[], Any]

    def __call__(self, step: int) -> float:
        return _to_float(self.function())


def _learning_rate(optimizer: Any) -> float | Callable[[int], float]:
    """Return a learning rate as servers' optimizers take it: a number, or a function of a step."""
    # The property has the rate of the current step only.
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        kind = type(rate).__name__
        if kind in _SCHEDULES and type(rate) is getattr(keras.optimizers.schedules, kind, None):
            schedule: Callable[[int], float] = getattr(schedules, kind)(**rate.get_config())
            return schedule
        return _StepSchedule(rate)
    if callable(rate):
        return _RateFunction(rate)
    return _to_float(rate)


def _to_float(value: Any) -> float:
    return float(keras.ops.convert_to_tensor(value))
