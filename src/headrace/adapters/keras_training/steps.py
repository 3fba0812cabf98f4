"""The interface of a model's steps on any back end: functions of arrays without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_training.embedding_rows import EmbeddingRows, embedding_rows

__all__ = ["Arrays", "ModelSteps", "TrainOutputs"]

Arrays: TypeAlias = Sequence[Any]


class TrainOutputs(NamedTuple):
    """The result of a training step.

    Attributes:
        gradients: By trainable variable; None where there is none, and `Rows` where rows are looked
            up.
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

    Each method may raise `MissingRows`: then call it again with these rows as well. Or it raises
    `WholeWeightNeeded`: then call it again after `look_up_no_more`.

    Args:
        model: Built and compiled; its optimizer records gradients (`gradient_recorder`).

    Attributes:
        rows: Layers whose rows are looked up, by index of the matrix among the trainable variables.
    """

    rows_kind: type[EmbeddingRows]

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rows = embedding_rows(model, self.rows_kind)

    def ids(
        self, step: str, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> dict[int, NDArray[np.int64]]:
        """Return sorted unique ids of the rows that a step is likely to look up.

        Args:
            step: "train", "test" or "predict".
            weights: Values of trainable variables that need not be recent; None for those in
                `rows`.
            state: Such values of the non-trainable variables.
            metrics: Values of the variables of metrics.
            batch: The batch of the step.

        Returns:
            By index, as in `rows`.
        """
        raise NotImplementedError

    def look_up_no_more(self, indices: Sequence[int]) -> None:
        """Take these variables out of `rows`: from now on steps take all of them.

        Raises:
            FailedPreconditionError: One is in a table.
        """
        for index in indices:
            self.rows[index].restore()
            del self.rows[index]

    def seed(self, seed: int, step: int) -> None:
        """Seed random numbers without a variable, so that they depend on seed and step only."""

    def train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        """Run `train_step` on a batch.

        Args:
            weights: Values of the trainable variables; `Rows` of those in `rows`.
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
