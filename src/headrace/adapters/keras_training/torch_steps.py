"""Steps of a Keras model on the back end PyTorch, as functions of arrays."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import torch

from headrace.adapters.keras_training.steps import Arrays, ModelSteps, TrainOutputs
from headrace.element.transpose import map_leaves

__all__ = ["TorchSteps"]

_generator = threading.Lock()
"""Workers in one process, as tests have them, share PyTorch's generator."""


class TorchSteps(ModelSteps):
    """Runs `train_step`, `test_step` and `predict_step` of a model, whose variables it sets.

    Args:
        model: Built and compiled; its optimizer records gradients.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._seed = 0

    def seed(self, seed: int, step: int) -> None:
        """Seed the generator of PyTorch for the next step; see `ModelSteps.seed`."""
        self._seed = (seed * 1_000_003 + step) % (1 << 63)

    def train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        """Run `train_step`; see `ModelSteps.train`."""
        with _generator:
            # Dropout of Keras draws from the generator of the process.
            torch.manual_seed(self._seed)
            return self._train(weights, state, metrics, scale, batch)

    def _train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        model = self._model
        self._set(weights, state, metrics)
        model.optimizer.scale = scale
        model.optimizer.recorded.clear()
        model.train()
        logs = model.train_step(_tensors(batch))
        recorded = {
            id(variable): gradient
            for gradient, variable in model.optimizer.recorded
            if gradient is not None
        }
        gradients = [
            None if (found := recorded.get(id(each))) is None else _array(found)
            for each in model.trainable_variables
        ]
        model.optimizer.recorded.clear()
        after = [_array(each.value) for each in model.non_trainable_variables]
        changed = {
            index: new
            for index, (new, old) in enumerate(zip(after, state, strict=True))
            if not np.array_equal(new, old)
        }
        return TrainOutputs(gradients, changed, self._metrics(), map_leaves(_plain, logs))

    def test(
        self, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> tuple[Arrays, dict[str, Any]]:
        """Run `test_step`; see `ModelSteps.test`."""
        self._set(weights, state, metrics)
        self._model.eval()
        with torch.no_grad():
            logs = self._model.test_step(_tensors(batch))
        return self._metrics(), map_leaves(_plain, logs)

    def predict(self, weights: Arrays, state: Arrays, batch: Any) -> Any:
        """Run `predict_step`; see `ModelSteps.predict`."""
        self._set(weights, state, None)
        self._model.eval()
        with torch.no_grad():
            return map_leaves(_plain, self._model.predict_step(_tensors(batch)))

    def _set(self, weights: Arrays, state: Arrays, metrics: Arrays | None) -> None:
        model = self._model
        with torch.no_grad():
            for variable, value in zip(model.trainable_variables, weights, strict=True):
                variable.value.copy_(_tensor(value))
            for variable, value in zip(model.non_trainable_variables, state, strict=True):
                variable.value.copy_(_tensor(value))
            for variable, value in zip(model.metrics_variables, metrics or (), strict=False):
                variable.value.copy_(_tensor(value))

    def _metrics(self) -> Arrays:
        return [_array(each.value) for each in self._model.metrics_variables]


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.array(value))


def _tensors(batch: Any) -> Any:
    # In memory of PyTorch's own: sums of some kernels depend on how memory is aligned, and a step
    # that runs again elsewhere must give the same bits.
    return map_leaves(lambda array: keras.ops.convert_to_tensor(array).clone(), batch)


def _array(tensor: Any) -> Any:
    return keras.ops.convert_to_numpy(tensor).copy()


def _plain(value: Any) -> Any:
    return _array(value) if isinstance(value, torch.Tensor) else value
