"""The coordinator's side of Keras objects in scheduled functions.

A scheduled function may refer to a model, layer, optimizer, metric or variable of Keras. The
coordinator places its variables on the parameter servers and sends the object to each worker once,
with `create_per_worker_values`. `worker_objects` is the worker's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from headrace.adapters.keras_training.embedding_internals import table_of_variable
from headrace.adapters.keras_training.keras_internals import (
    all_layers,
    excludes_from_decay,
    get_or_attach,
    models_of,
    seed_variables,
    strategy_of,
    value_of,
)
from headrace.adapters.keras_training.model_pickling import check_built, dump_objects
from headrace.adapters.keras_training.optimizer_on_servers import (
    OptimizerOnServers,
    move_slots_to_servers,
    optimizer_on_servers,
)
from headrace.adapters.keras_training.server_weights import ServerVariables, owner_of, weights_of
from headrace.adapters.keras_training.step_results import check_additive
from headrace.adapters.keras_training.worker_calls import (
    OptimizerSpec,
    VariableRole,
    VariableSpec,
    build_object,
    layer_of,
    variable_of,
)
from headrace.coordinator.coordinator import ClusterCoordinator
from headrace.coordinator.packing import packing_strategy
from headrace.errors import FailedPreconditionError
from headrace.parameter_server.optimizers import SGD
from headrace.parameter_server.strategy import ParameterServerStrategy

__all__ = ["SharedObject", "reduce_shared"]


def reduce_shared(value: Any) -> Any:
    """Return how a Keras object is pickled for the workers of a strategy.

    Args:
        value: A model, layer, optimizer, metric or variable.

    Returns:
        What `__reduce_ex__` may return; None for a model that does not belong to the strategy.
    """
    strategy = packing_strategy()
    if not isinstance(strategy, ParameterServerStrategy):
        return None
    if isinstance(value, keras.Model) and strategy_of(value) is not strategy:
        return None
    if isinstance(value, keras.Variable) and (root := _root_of(value, strategy)) is not None:
        return variable_of, (root, _place_of(value, _variables_of(root)))
    if isinstance(value, keras.Layer) and (model := _outermost_model(value, strategy)) is not value:
        return layer_of, (model, _place_of(value, all_layers(model)))
    return _shared_object(value, strategy).resource.__reduce__()


def _shared_object(value: Any, strategy: Any) -> SharedObject:
    coordinator = ClusterCoordinator(strategy)
    shared: SharedObject = get_or_attach(
        value,
        "shared",
        lambda _: SharedObject(value, coordinator),
        lambda found: found.is_current(value, coordinator),
    )
    return shared


class SharedObject:
    """One Keras object that workers have.

    Args:
        value: A model, layer, optimizer, metric or variable. Workers get it in its present state;
            later they see changes of the values of its variables only.
        coordinator: Of a `ParameterServerStrategy`.

    Attributes:
        coordinator: The coordinator.
        resource: The per-worker value; each worker's is its copy.
    """

    def __init__(self, value: Any, coordinator: ClusterCoordinator) -> None:
        self.coordinator = coordinator
        self._strategy = strategy = coordinator.strategy
        what = f"the Keras {_kind_of(value)} {value.name!r}"
        if isinstance(value, keras.Model):
            check_built(value)
        self._state = _state_of(value)
        self._placed_optimizers: list[tuple[Any, OptimizerOnServers]] = []
        variables = (
            []
            if isinstance(value, keras.optimizers.Optimizer)
            else self._place_variables(value, what)
        )
        optimizers = self._optimizers(value)
        data = dump_objects(
            (value, _variables_of(value), [each for each, _ in optimizers]),
            what,
            value if isinstance(value, keras.Layer) else None,
        )
        statistics = SGD(
            1.0, name=strategy.unused_name(f"{value.name}/statistics"), non_finite="apply"
        )
        self.resource = coordinator.create_per_worker_values(
            build_object,
            args=(
                keras.backend.backend(),
                data,
                variables,
                [sent for _, sent in optimizers],
                statistics,
            ),
        )

    def is_current(self, value: Any, coordinator: ClusterCoordinator) -> bool:
        """Return whether workers of a coordinator have the object in its present state."""
        return (
            self.coordinator is coordinator
            and self._state == _state_of(value)
            and all(
                placed.is_current and placed is optimizer_on_servers(optimizer, self._strategy)
                for optimizer, placed in self._placed_optimizers
            )
        )

    def _place_variables(self, value: Any, what: str) -> list[VariableSpec]:
        """Place the variables of an object on the servers, and return their specs."""
        if isinstance(value, keras.Model):
            owner: ServerVariables = weights_of(value, self._strategy)
        else:
            owner = ServerVariables(self._strategy, value, what)
        variables = _variables_of(value)
        if isinstance(value, keras.Metric):
            before = [value_of(each) for each in variables]
            value.reset_state()
            check_additive([value], "a scheduled function")
            sent = [VariableSpec(VariableRole.METRIC, owner.place(v, False)) for v in variables]
            for variable, number in zip(variables, before, strict=True):
                variable.assign(number)  # the servers may have a value from an earlier program
            return sent
        layer = value if isinstance(value, keras.Layer) else None
        seeds = {id(each) for each in ([] if layer is None else seed_variables(layer))}
        sent = []
        for each in variables:
            if table_of_variable(each) is not None:
                raise FailedPreconditionError(
                    f"{what} has an embedding in a table ({each.path}), which works with "
                    "model.fit, evaluate and predict. In scheduled functions use an "
                    "hr.EmbeddingTable with hr.torch.Embedding or hr.jax.lookup"
                )
            if id(each) in seeds:
                sent.append(VariableSpec(VariableRole.SEED, None, value_of(each)))
            else:
                role = VariableRole.WEIGHT if each.trainable else VariableRole.STATISTIC
                sent.append(VariableSpec(role, owner.place(each, each.trainable)))
        return sent

    def _optimizers(self, value: Any) -> list[tuple[Any, OptimizerSpec]]:
        """Return the optimizer that `value` is or was compiled with, if there is one."""
        optimizer = getattr(value, "optimizer", None) if isinstance(value, keras.Model) else value
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            return []
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or excludes_from_decay(
            optimizer
        ):
            raise FailedPreconditionError(
                f"the Keras optimizer {optimizer.name!r} scales the loss or excludes variables "
                "from weight decay, which model.fit does and scheduled functions do not: use "
                "another one there"
            )
        placed = optimizer_on_servers(optimizer, self._strategy)
        models = models_of(self._strategy)
        compiled = [each for each in models if getattr(each, "optimizer", None) is optimizer]
        for model in compiled:
            move_slots_to_servers(model, placed, weights_of(model, self._strategy))
        if placed.earlier_steps and not compiled:
            raise FailedPreconditionError(
                f"the Keras optimizer {optimizer.name!r} took {placed.earlier_steps} steps, and in "
                "scheduled functions it would begin without its slots: compile its model "
                "with it before (model.compile(optimizer)), or use another one"
            )
        self._placed_optimizers.append((optimizer, placed))
        return [(optimizer, OptimizerSpec(placed.server_optimizer, placed.rate))]


def _root_of(variable: Any, strategy: Any) -> Any:
    """Return the model, layer or metric that a variable belongs to, or None."""
    models = [
        each
        for each in models_of(strategy)
        if each.built and any(own is variable for own in _variables_of(each))
    ]
    if models:
        return _outermost_model(models[0], strategy)
    owner = owner_of(variable)
    if isinstance(owner, ServerVariables):
        return None if owner.root is variable else owner.root
    return None


def _outermost_model(layer: Any, strategy: Any) -> Any:
    """Return the model of a strategy that contains a layer and is in no other, or the layer.

    A function that uses a model and a layer of it then has one copy of both.
    """
    models = [each for each in models_of(strategy) if each.built]
    around = [each for each in models if any(own is layer for own in all_layers(each))]
    return max(around, key=lambda each: len(all_layers(each)), default=layer)


def _place_of(value: Any, values: Sequence[Any]) -> int:
    return next(place for place, each in enumerate(values) if each is value)


def _variables_of(value: Any) -> Sequence[Any]:
    """Return the variables of an object, in the order of the specs."""
    if isinstance(value, keras.Variable):
        return [value]
    if isinstance(value, keras.Metric):
        return list(value.variables)
    if isinstance(value, keras.Layer):
        return [*value.trainable_variables, *value.non_trainable_variables]
    return []


def _state_of(value: Any) -> Any:
    """Return what workers have to know of an object beside the values of its variables."""
    optimizer = getattr(value, "optimizer", None) if isinstance(value, keras.Model) else None
    trainable = [each.trainable for each in _variables_of(value)]
    layers = all_layers(value) if isinstance(value, keras.Layer) else []
    return id(optimizer), trainable, [each.trainable for each in layers]


def _kind_of(value: Any) -> str:
    kinds = (keras.Model, keras.Layer, keras.Metric, keras.optimizers.Optimizer)
    kind = next((each for each in kinds if isinstance(value, each)), keras.Variable)
    return str(kind.__name__).lower()
