"""A Keras model on the servers and workers of a `ParameterServerStrategy`.

Its variables and its optimizer are on the servers; each worker has a copy of the model, which is
sent again when the model has changed. Calls of workers get the numbers that depend on the step:
seeds, the learning rate, and the scale of the loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from headrace.adapters.keras_training.embedding_tables import check_trains_tables
from headrace.adapters.keras_training.keras_internals import (
    build_model,
    draw_keras_seed,
    inner_optimizer,
    learning_rate_variable,
)
from headrace.adapters.keras_training.model_pickling import dump_model
from headrace.adapters.keras_training.optimizer_on_servers import (
    OptimizerOnServers,
    move_slots_to_servers,
    optimizer_on_servers,
)
from headrace.adapters.keras_training.server_optimizers import has_weight_decay
from headrace.adapters.keras_training.server_weights import ServerWeights, weights_of
from headrace.adapters.keras_training.table_embedding import use_tables
from headrace.adapters.keras_training.worker_calls import TrainCall, build_model_copy
from headrace.coordinator.coordinator import ClusterCoordinator
from headrace.coordinator.remote_value import RemoteValue
from headrace.parameter_server.optimizers import SGD

__all__ = ["LossScale", "ModelOnServers"]


class ModelOnServers:
    """Keeps servers and workers up to date with a model: built, compiled, frozen or not.

    Args:
        model: Made in the scope of the strategy, or given to `hr.keras.distribute`.
        strategy: A `ParameterServerStrategy`.

    Attributes:
        loss_scale: The factor of the loss of training steps.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        self._model = model
        self._strategy = strategy
        #: A coordinator that no object refers to is closed.
        self._held_coordinator = ClusterCoordinator(strategy)
        self._weights: ServerWeights | None = None
        #: The `WorkerModel` on each worker, and the digest of the model in it.
        self._worker_model: Any = None
        self._digest = b""
        #: The optimizers on the servers: for gradients, and for changes of statistics.
        self._optimizers: tuple[Any, Any] = None, None
        self._on_servers: OptimizerOnServers | None = None
        self.loss_scale: LossScale = LossScale(None)
        #: The number of the next training step.
        self._next_step = 0
        self._seed = draw_keras_seed()
        #: An immutable JAX array, and the number in it.
        self._rate: tuple[Any, float] = (None, 0.0)

    @property
    def coordinator(self) -> ClusterCoordinator:
        """The strategy's coordinator; another one if that was closed."""
        found = ClusterCoordinator(self._strategy)
        if found is not self._held_coordinator:
            self._held_coordinator, self._digest = found, b""
        return found

    @property
    def weights(self) -> ServerWeights:
        """The variables on the servers."""
        assert self._weights is not None
        return self._weights

    # --- bringing it there ------------------------------------------------------------------------

    def place_variables(self, batch: Any, *, with_loss: bool = True) -> None:
        """Build the model for a batch, and place its variables on the servers."""
        use_tables(self._model, self._strategy)
        build_model(self._model, batch, with_loss=with_loss)
        self._weights = weights_of(self._model, self._strategy)

    def send_to_workers(self) -> None:
        """Send the model to the workers if it has changed since it was last sent."""
        weights, optimizers = self.weights, self._place_optimizer()
        packed = dump_model(self._model)
        digest = hashlib.blake2b(packed)
        if optimizers[0] is not None:
            digest.update(optimizers[0].name.encode())
        for seed in weights.seeds.values():
            digest.update(seed.tobytes())
        coordinator = self.coordinator
        if digest.digest() == self._digest:
            return
        self._worker_model = coordinator.create_per_worker_values(
            build_model_copy,
            args=(
                keras.backend.backend(),
                packed,
                weights.trainable,
                weights.state,
                weights.seeds,
                *optimizers,
            ),
        )
        self._digest = digest.digest()

    def _place_optimizer(self) -> tuple[Any, Any]:
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is None:
            self._on_servers, self._optimizers = None, (None, None)
            return self._optimizers
        check_trains_tables(self._model, inner_optimizer(optimizer))
        name = f"{self._model.name}/{optimizer.name}"
        on_servers = optimizer_on_servers(optimizer, self._strategy, name)
        if on_servers is not self._on_servers:
            self._on_servers = on_servers
            applies = on_servers.server_optimizer
            applies.exclude_from_weight_decay(
                placed
                for variable, placed in zip(
                    self._model.trainable_variables, self.weights.trainable, strict=True
                )
                if not has_weight_decay(optimizer, variable)
            )
            counts = SGD(1.0, name=f"{self._model.name}/statistics", non_finite="apply")
            self._optimizers = applies, counts
            self.loss_scale = LossScale(optimizer)
            move_slots_to_servers(self._model, on_servers, self.weights)
        return self._optimizers

    # --- using it ---------------------------------------------------------------------------------

    def schedule(self, function: Callable[..., Any], *args: Any) -> RemoteValue:
        """Schedule a function of `worker_calls`, whose first argument is the worker's copy."""
        return self.coordinator.schedule(function, args=(self._worker_model, *args))

    def next_call(self, steps: int) -> TrainCall:
        """Return what a call of the next training steps gets, and count them."""
        call = TrainCall(
            self._next_step,
            self._seed,
            self._learning_rate,
            self.loss_scale.value,
            self.weights.version,
        )
        self._next_step += steps
        return call

    @property
    def _learning_rate(self) -> float | None:
        """The learning rate that callbacks set; None if the optimizer has a schedule."""
        rate = learning_rate_variable(inner_optimizer(self._model.optimizer))
        if rate is None:
            return None
        value = rate.value
        if keras.backend.backend() != "jax":
            return float(np.asarray(value))
        if value is not self._rate[0]:
            self._rate = value, float(np.asarray(value))
        return self._rate[1]

    def finish_training(self) -> None:
        """Set variables to their averages, where an optimizer keeps those, and read all of them."""
        self.weights.use_averages(self._optimizers[0])
        self.weights.pull()

    # --- backups ----------------------------------------------------------------------------------

    def saved_objects(self) -> dict[str, Any]:
        """Return what a backup saves of the servers."""
        optimizer, statistics = self._place_optimizer()
        return {
            "weights": self.weights.by_name,
            "optimizer": optimizer,
            "statistics": statistics,
        }

    def get_state(self) -> dict[str, Any]:
        """Return what training needs beside these objects: values of JSON and arrays."""
        return {
            "step": self._next_step,
            "seed": self._seed,
            "seeds": {str(index): value for index, value in self.weights.seeds.items()},
            "learning_rate": self._learning_rate,
            "loss_scale": self.loss_scale.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned, after the objects were restored on the servers."""
        self._next_step, self._seed = state["step"], state["seed"]
        self.weights.set_seeds({int(index): value for index, value in state["seeds"].items()})
        if state["learning_rate"] is not None:
            self._model.optimizer.learning_rate = state["learning_rate"]
        self.loss_scale.set_state(state["loss_scale"])
        self.weights.mark_outdated()
        if self._on_servers is not None:
            self._on_servers.step_changes.mark_changed()
        self.weights.bump_version()


class LossScale:
    """The factor of the loss: halved after an overflow, doubled after enough finite steps.

    The rule is that of `keras.optimizers.LossScaleOptimizer`.

    Args:
        optimizer: Of a model; None: there is none.

    Attributes:
        value: The scale; None: the loss is not scaled.
    """

    def __init__(self, optimizer: Any) -> None:
        self.value: float | None = None
        self._growth_steps = 0
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self.value = float(optimizer.initial_scale)
            self._growth_steps = int(optimizer.dynamic_growth_steps)
        elif optimizer is not None and optimizer.loss_scale_factor is not None:
            self.value = float(optimizer.loss_scale_factor)
        self._finite_steps = 0

    def get_state(self) -> tuple[float | None, int]:
        """Return the scale, and how many steps were finite since it changed."""
        return self.value, self._finite_steps

    def set_state(self, state: Sequence[Any]) -> None:
        """Restore a state that `get_state` returned."""
        self.value, self._finite_steps = state

    def update(self, non_finite: Sequence[bool]) -> None:
        """Update the scale after steps.

        Args:
            non_finite: For each step, whether a gradient was not finite.
        """
        if self.value is None or not self._growth_steps:
            return
        for is_bad in non_finite:
            if is_bad:
                self.value, self._finite_steps = max(1.0, self.value / 2), 0
                continue
            self._finite_steps += 1
            if self._finite_steps == self._growth_steps:
                self.value, self._finite_steps = self.value * 2, 0
