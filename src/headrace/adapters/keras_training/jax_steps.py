"""Steps of a Keras model on the back end JAX, as functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from headrace.adapters.keras_training.steps import Arrays, ModelSteps, TrainOutputs
from headrace.errors import FailedPreconditionError

__all__ = ["JaxSteps"]


class JaxSteps(ModelSteps):
    """Compiles `train_step`, `test_step` and `predict_step` of a model, as `jit_compile` says.

    Args:
        model: Built and compiled; its optimizer records gradients.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        #: Indices of the non-trainable variables that `train_step` changes; found by tracing it.
        self._changing: list[int] = []
        is_compiled = model.jit_compile and not model.run_eagerly
        jit: Callable[[Any], Any] = jax.jit if is_compiled else lambda function: function
        self._train = jit(self._train_step)
        self._test = jit(self._test_step)
        self._predict = jit(model.predict_step)

    def train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        """Run `train_step`; see `ModelSteps.train`."""
        gradients, changed, totals, logs = self._train(weights, state, metrics, scale, batch)
        return TrainOutputs(
            list(gradients), dict(zip(self._changing, changed, strict=True)), totals, logs
        )

    def _train_step(
        self,
        weights: Sequence[Any],
        state: Sequence[Any],
        metrics: Sequence[Any],
        scale: Any,
        batch: Any,
    ) -> tuple[Any, ...]:
        self._model.optimizer.scale = scale
        optimizer_state = [each.value for each in self._model.optimizer.variables]
        logs, after = self._model.train_step(
            (list(weights), list(state), optimizer_state, list(metrics)), batch
        )
        new_weights, new_state, gradients, totals = after
        if any(new is not old for new, old in zip(new_weights, weights, strict=True)):
            raise FailedPreconditionError(
                f"train_step of the model {self._model.name!r} changes weights by other means than "
                "self.optimizer.stateless_apply: on parameter servers only the optimizer does"
            )
        if len(gradients) != len(weights):
            raise FailedPreconditionError(
                f"train_step of the model {self._model.name!r} returned no gradients: it must end "
                "with self.optimizer.stateless_apply(optimizer_variables, gradients, "
                "trainable_variables), and return what that returned"
            )
        # Known once the function is traced, which is before it returns for the first time.
        self._changing = [
            index
            for index, (new, old) in enumerate(zip(new_state, state, strict=True))
            if new is not old
        ]
        return gradients, [new_state[index] for index in self._changing], totals, logs

    def test(
        self, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> tuple[Arrays, dict[str, Any]]:
        """Run `test_step`; see `ModelSteps.test`."""
        totals, logs = self._test(weights, state, metrics, batch)
        return totals, logs

    def _test_step(
        self, weights: Sequence[Any], state: Sequence[Any], metrics: Sequence[Any], batch: Any
    ) -> tuple[Any, Any]:
        logs, (_, _, totals) = self._model.test_step(
            (list(weights), list(state), list(metrics)), batch
        )
        return totals, logs

    def predict(self, weights: Arrays, state: Arrays, batch: Any) -> Any:
        """Run `predict_step`; see `ModelSteps.predict`."""
        outputs, _ = self._predict((list(weights), list(state)), batch)
        return outputs
