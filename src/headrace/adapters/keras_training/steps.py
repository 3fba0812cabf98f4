"""What steps of a model are on any back end: functions of arrays that change no variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Arrays", "ModelSteps", "TrainOutputs"]

Arrays: TypeAlias = Sequence[Any]


class TrainOutputs(NamedTuple):
    """What a training step returns.

    Attributes:
        gradients: By trainable variable; None where there is none.
        state: New values of the non-trainable variables that the step changes, by their index.
        metrics: New values of the variables of metrics.
        logs: What `train_step` returned.
    """

    gradients: list[Any]
    state: dict[int, Any]
    metrics: Arrays
    logs: Any


class ModelSteps:
    """Runs steps of a model on one back end.

    Args:
        model: Built and compiled; its optimizer records gradients (`gradient_recorder`).
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def seed(self, seed: int, step: int) -> None:
        """Have random numbers that no variable counts follow from a seed and the step alone."""

    def train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        """Run `train_step` on a batch.

        Args:
            weights: Values of the trainable variables.
            state: Values of the non-trainable variables.
            metrics: Values of the variables of metrics.
            scale: By which the loss is multiplied, for gradients in half precision; gradients are
                returned unscaled.
            batch: `x`, `(x, y)` or `(x, y, sample_weight)`.
        """
        raise NotImplementedError

    def test(
        self, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> tuple[Arrays, dict[str, Any]]:
        """Run `test_step` on a batch; return new values of metrics, and its logs."""
        raise NotImplementedError

    def predict(self, weights: Arrays, state: Arrays, batch: Any) -> Any:
        """Run `predict_step` on a batch; return the outputs."""
        raise NotImplementedError
