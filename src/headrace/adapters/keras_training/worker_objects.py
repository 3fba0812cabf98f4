"""The worker's copies of Keras objects in scheduled functions.

A copy of a model, layer, metric or variable reads its values from the parameter servers once per
function call, and again after an optimizer has changed them. When the function ends, the copy sends
each assignment as the difference from the value that was read, so changes from several workers add
up. A metric starts each call at zero.

A copy of an optimizer sends gradients to the parameter servers, which take the step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_training.keras_internals import (
    extend_class,
    learning_rate_variable,
    value_of,
)
from headrace.adapters.keras_training.model_pickling import load_objects
from headrace.adapters.keras_training.server_weights import (
    StepCounter,
    VariableOwner,
    link,
    owner_of,
)
from headrace.adapters.keras_training.worker_calls import (
    OptimizerSpec,
    VariableRole,
    VariableSpec,
)
from headrace.coordinator.closure_context import current_closure, get_current_worker_index
from headrace.errors import FailedPreconditionError
from headrace.parameter_server.arrays import raise_if_tracing
from headrace.parameter_server.read_cache import read_together
from headrace.parameter_server.variable_shards import add_to_variables
from headrace.parameter_server.write_context import call_at_closure_end

__all__ = ["WorkerVariables", "load_object", "send_gradients"]


def load_object(
    data: bytes,
    variables: Sequence[VariableSpec],
    optimizers: Sequence[OptimizerSpec],
    statistics: Any,
) -> tuple[Any, list[Any]]:
    """Return a worker's copy of a Keras object, and its variables.

    Args:
        data: As for `build_object`.
        variables: As for `build_object`.
        optimizers: As for `build_object`.
        statistics: As for `build_object`.
    """
    value, found, own_optimizers = load_objects(data)
    if found:
        WorkerVariables(list(zip(found, variables, strict=True)), statistics)
    if isinstance(value, keras.Model):
        for method in ("fit", "train_on_batch"):
            object.__setattr__(value, method, functools.partial(_refuse_training, method))
    for optimizer, sent in zip(own_optimizers, optimizers, strict=True):
        send_gradients(optimizer, sent)
    return value, found


def _refuse_training(method: str, *args: Any, **kwargs: Any) -> None:
    raise FailedPreconditionError(
        f"{method} of a Keras model in a scheduled function: call model.fit in the coordinator, or "
        "compute gradients in the function and call optimizer.apply(gradients, variables)"
    )


class WorkerVariables(VariableOwner):
    """The variables of one Keras object on a worker.

    Args:
        variables: Pairs of a variable and its spec.
        statistics: The optimizer for changes of statistics; None if there are none, and no step
            changes the variables.
    """

    def __init__(self, variables: Sequence[tuple[Any, VariableSpec]], statistics: Any) -> None:
        self._statistics = statistics
        #: Whether steps of optimizers may change the values.
        self._follows_steps = statistics is not None and any(
            sent.role in (VariableRole.WEIGHT, VariableRole.STATISTIC) for _, sent in variables
        )
        self._sent = {id(variable): (variable, sent) for variable, sent in variables}
        #: The function call that read the values, and the one that calls `flush` when it ends.
        self._call: Any = None
        self._flushes: Any = None
        self._is_pulling = False
        #: The values that were read, and the variables assigned since then; keys are ids.
        self._read: dict[int, NDArray[Any]] = {}
        self._changed: set[int] = set()
        for variable, sent in variables:
            if sent.value is not None:
                variable.assign(_worker_seed(sent.value))
            else:
                link(variable, self)

    def placed(self, variable: Any) -> Any:
        """Return the variable on the servers."""
        return self._sent[id(variable)][1].placed

    def pull(self) -> None:
        """Read the values, once per function call."""
        closure = current_closure.get()
        call = (
            None
            if closure is None
            else (closure, closure.optimizer_steps if self._follows_steps else 0)
        )
        if self._is_pulling or (call is not None and call == self._call):
            return
        raise_if_tracing(
            "a variable of Keras",
            "pass the values of its variables to model.stateless_call(weights, state, x)",
        )
        if closure is not None and not closure.is_only_thread:
            raise FailedPreconditionError(
                "Keras objects in scheduled functions need workers that run one function at a "
                "time: ClusterCoordinator(strategy, threads_per_worker=1)"
            )
        if self._changed and self._call is not None and self._call[0] is closure:
            self.flush()
        self._changed = set()
        self._is_pulling = True
        try:
            pairs = [each for each in self._sent.values() if each[1].placed is not None]
            is_metric = [sent.role == VariableRole.METRIC for _, sent in pairs]
            values = iter(
                read_together(
                    [
                        sent.placed
                        for (_, sent), zero in zip(pairs, is_metric, strict=True)
                        if not zero
                    ]
                )
            )
            for (variable, sent), zero in zip(pairs, is_metric, strict=True):
                value = np.zeros(sent.placed.shape, sent.placed.dtype) if zero else next(values)
                self._read[id(variable)] = value
                variable.assign(value)
        finally:
            self._is_pulling = False
        self._call = call

    def before_write(self) -> None:
        """Read the values, to compute the difference later."""
        self.pull()

    def write(self, variable: Any) -> None:
        """Record an assignment, which is sent when the function ends."""
        if self._is_pulling:
            return
        self._changed.add(id(variable))
        closure = current_closure.get()
        if closure is None or closure is not self._flushes:
            self._flushes = closure
            call_at_closure_end(self.flush)

    def flush(self) -> None:
        """Send all assignments. The next read asks the servers again."""
        changed, self._changed = self._changed, set()
        added, statistics = [], []
        self._is_pulling = True  # or reading a value here would fetch it again
        try:
            values = {key: value_of(self._sent[key][0]) for key in self._sent if key in changed}
        finally:
            self._is_pulling = False
        for key, value in values.items():
            sent = self._sent[key][1]
            change = value - self._read[key]
            if sent.role == VariableRole.STATISTIC and sent.placed.dtype.kind == "f":
                statistics.append((-change, sent.placed))
            else:
                added.append((sent.placed, change))
        self._call = None
        add_to_variables(added)
        if statistics:
            self._statistics.apply_gradients(statistics)


def _worker_seed(seed: NDArray[Any]) -> NDArray[Any]:
    """Return a state of a random generator that differs on each worker."""
    own = seed.copy()
    own[0] = (int(seed[0]) + get_current_worker_index() * 0x9E3779B1) % (1 << 31)
    return own


# --- optimizers -----------------------------------------------------------------------------------

_SENT_ATTRIBUTE = "_headrace_sent"


def send_gradients(optimizer: Any, sent: OptimizerSpec) -> None:
    """Make an optimizer send gradients to the servers."""
    rate = learning_rate_variable(optimizer)
    if rate is not None:
        WorkerVariables([(rate, VariableSpec(VariableRole.WEIGHT, sent.rate))], None)
    StepCounter(optimizer.iterations, lambda: sent.applies.iterations, lambda: True)
    object.__setattr__(optimizer, _SENT_ATTRIBUTE, sent)
    optimizer.__class__ = extend_class(type(optimizer), _SendingMixin)


class _SendingMixin:
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is None:
            raise ValueError(
                "optimizer.apply(gradients) in a scheduled function: pass the variables too, as in "
                "optimizer.apply(gradients, model.trainable_variables)"
            )
        owners, pairs = {}, []
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            if not isinstance(variable, keras.Variable):
                raise TypeError(
                    "the variables of optimizer.apply(gradients, variables) must be variables of "
                    f"Keras, but one is of type {type(variable).__name__}; pairs for "
                    "apply_gradients are (gradient, variable), in this order"
                )
            owner = owner_of(variable)
            if not isinstance(owner, WorkerVariables):
                raise FailedPreconditionError(
                    f"the variable {variable.path!r} is not on the parameter servers: create it, "
                    "or its model, in strategy.scope(), outside of the function"
                )
            owners[id(owner)] = owner
            pairs.append((gradient, owner.placed(variable)))
        sent: OptimizerSpec = vars(self)[_SENT_ATTRIBUTE]
        if (rate := learning_rate_variable(self)) is not None:
            sent.applies.learning_rate = float(value_of(rate))
        sent.applies.apply_gradients(pairs)
        for owner in owners.values():
            owner.flush()
        if (closure := current_closure.get()) is not None:
            closure.optimizer_steps += 1  # all copies of these variables read them again

    def apply_gradients(self, grads_and_vars: Any) -> None:
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    def stateless_apply(self, *args: Any, **kwargs: Any) -> Any:
        raise FailedPreconditionError(
            "optimizer.stateless_apply in a scheduled function would change copies of the weights: "
            "return the gradients from the compiled function, and call "
            "optimizer.apply(gradients, model.trainable_variables)"
        )
