"""Steps of a model as functions of arrays; `jax_steps` and `torch_steps` implement them.

A model's `train_step`, Keras' or the user's, ends with a call of the optimizer. Gradients must not
be applied there: on a training worker the parameter servers apply them, and on mirrored replicas
the mean of all replicas is applied once. So the optimizer of a model copy records gradients instead
of applying them.

A step receives the rows of an `Embedding` layer's matrix that its batch looks up, instead of the
matrix, and returns a gradient for each of these rows. Only the layer's own `call` may use the
matrix. If anything else reads it, the step is run again with the whole matrix.

Servers apply such a gradient to its rows only: momentum and weight decay change a row in the steps
that look it up, while Keras changes all rows in each step. Without momentum and weight decay the
result is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_training.embedding_internals import (
    has_table,
    replace_embedding_call,
    restore_embedding_call,
    sparse_embeddings,
)
from headrace.errors import FailedPreconditionError, InvalidArgumentError

__all__ = [
    "Arrays",
    "EmbeddingRows",
    "MissingRows",
    "ModelSteps",
    "SparseRows",
    "TrainOutputs",
    "WholeWeightNeeded",
    "embedding_rows",
    "merge_rows",
    "record_gradients",
    "recording_gradients",
]


class SparseRows(NamedTuple):
    """Rows of a matrix, or gradients of them.

    Attributes:
        ids: Sorted, without duplicates.
        values: One row for each id.
    """

    ids: NDArray[np.int64]
    values: NDArray[Any]


def merge_rows(first: SparseRows, second: SparseRows) -> SparseRows:
    """Merge two sets of rows without common ids."""
    if not len(second.ids):
        return first
    ids = np.concatenate([first.ids, second.ids])
    order = np.argsort(ids)
    return SparseRows(ids[order], np.concatenate([first.values, second.values])[order])


class MissingRows(Exception):  # noqa: N818 - a signal, which the caller always handles
    """Signal that a step looked up rows that it did not receive.

    Attributes:
        ids: Sorted unique ids, by index among the trainable variables.
    """

    def __init__(self, ids: dict[int, NDArray[np.int64]]) -> None:
        super().__init__(ids)
        self.ids = ids


class WholeWeightNeeded(Exception):  # noqa: N818 - a signal, as above
    """Signal that a step used matrices in another way than by looking up rows.

    Attributes:
        indices: Indices of these matrices among the trainable variables.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(indices)
        self.indices: list[int] = list(indices)


class EmbeddingRows:
    """Embedding layer whose rows are looked up.

    Attributes:
        index: Index of its matrix among the trainable variables of the model.
        layer: The layer; its `call` uses `look_up`.
        variable: Its matrix, which has no value in this process.
        count: Number of rows; None if every id may have a row.
        has_table: Whether the rows are in an embedding table, so that no step can have all of them.
        dim: Number of elements in a row.
        was_read: Whether anything but the layer's `call` read the matrix.
    """

    def __init__(self, index: int, layer: Any) -> None:
        self.index = index
        self.layer = layer
        self.variable: Any = layer.embeddings
        count, self.dim = self.variable.shape
        self.has_table: bool = has_table(self.variable)
        self.count: int | None = count or None
        self.was_read: bool = False
        replace_embedding_call(layer, self)

    def look_up(self, ids: Any) -> Any:
        """Return the rows of a tensor of integer ids; implemented for each back end."""
        raise NotImplementedError

    def note_read(self) -> None:
        """Reject a read of the matrix outside of the layer's `call`.

        Raises:
            WholeWeightNeeded: Always.
        """
        self.was_read = True
        raise WholeWeightNeeded([self.index])

    def distinct(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return sorted unique ids of rows; negative ones count from the end.

        Raises:
            InvalidArgumentError: If an id is out of range.
        """
        found = np.unique(ids).astype(np.int64)
        if self.count is None:
            return found
        if len(found) and found[0] < 0:
            found = np.unique(np.where(found < 0, found + self.count, found))
        if len(found) and not (found[0] >= 0 and found[-1] < self.count):
            wrong = found[0] if found[0] < 0 else found[-1]
            raise InvalidArgumentError(
                f"ids of the layer {self.layer.name!r} must be less than input_dim={self.count}, "
                f"but one is {wrong}"
            )
        return found

    def restore(self) -> None:
        """Restore the layer's own `call` and its matrix, with zeros.

        Raises:
            FailedPreconditionError: If its rows are in a table.
        """
        if self.has_table or self.count is None:
            raise FailedPreconditionError(
                f"the rows of the layer {self.layer.name!r} are in a table on parameter servers, "
                "and the model uses all of them, or calls the layer in a loop or condition that "
                "JAX traces: use rows only by calling the layer, outside of these"
            )
        restore_embedding_call(self.layer, (self.count, self.dim))


def embedding_rows(model: Any, kind: type[EmbeddingRows]) -> dict[int, EmbeddingRows]:
    """Replace matrices by looked-up rows in all layers of a model that support it.

    Args:
        model: Built Keras model.
        kind: Class for the back end.

    Returns:
        The layers, by index of the matrix among the trainable variables.
    """
    return {index: kind(index, layer) for index, layer in sparse_embeddings(model).items()}


Arrays: TypeAlias = Sequence[Any]


class TrainOutputs(NamedTuple):
    """Result of a training step.

    Attributes:
        gradients: Gradient of each trainable variable, or None; `SparseRows` if rows are looked up.
        state: New values of the non-trainable variables that the step changes, by index.
        metrics: New values of the variables of metrics.
        logs: Result of `train_step`.
    """

    gradients: list[Any]
    state: dict[int, Any]
    metrics: Arrays
    logs: Any


class ModelSteps:
    """Runs steps of a model on one back end.

    Each method may raise `MissingRows`: call it again with these rows, too. Or it may raise
    `WholeWeightNeeded`: call it again after `use_whole_matrices`.

    Args:
        model: Built and compiled Keras model; its optimizer records gradients.

    Attributes:
        rows: Layers whose rows are looked up, by index of the matrix among the trainable variables.
    """

    rows_kind: type[EmbeddingRows]

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rows: dict[int, EmbeddingRows] = embedding_rows(model, self.rows_kind)

    def ids(
        self, step: str, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> dict[int, NDArray[np.int64]]:
        """Return sorted unique ids of the rows that a step is likely to look up.

        Args:
            step: "train", "test" or "predict".
            weights: Values of the trainable variables, possibly outdated; None for those in `rows`.
            state: Values of the non-trainable variables, possibly outdated.
            metrics: Values of the variables of metrics.
            batch: The batch of the step.

        Returns:
            The ids, by index as in `rows`.
        """
        raise NotImplementedError

    def use_whole_matrices(self, indices: Sequence[int]) -> None:
        """Remove variables from `rows`: later steps receive their whole matrices.

        Raises:
            FailedPreconditionError: If a variable is in a table.
        """
        for index in indices:
            self.rows[index].restore()
            del self.rows[index]

    def seed(self, seed: int, step: int) -> None:
        """Seed random numbers that have no Keras variable; they depend only on seed and step."""

    def train(
        self, weights: Arrays, state: Arrays, metrics: Arrays, scale: float | None, batch: Any
    ) -> TrainOutputs:
        """Run `train_step` on a batch.

        Args:
            weights: Values of the trainable variables; `SparseRows` of those in `rows`.
            state: Values of the non-trainable variables.
            metrics: Values of the variables of metrics.
            scale: Factor of the loss, for gradients in half precision; returned gradients are
                unscaled. None disables scaling.
            batch: `x`, `(x, y)` or `(x, y, sample_weight)`.
        """
        raise NotImplementedError

    def test(
        self, weights: Arrays, state: Arrays, metrics: Arrays, batch: Any
    ) -> tuple[Arrays, dict[str, Any]]:
        """Run `test_step` on a batch; return new values of metrics, and the logs."""
        raise NotImplementedError

    def predict(self, weights: Arrays, state: Arrays, batch: Any) -> Any:
        """Run `predict_step` on a batch; return the outputs."""
        raise NotImplementedError


def record_gradients(optimizer: Any) -> None:
    """Make this optimizer record gradients from now on.

    Its class becomes a subclass, so that a `train_step` still finds its attributes.

    Args:
        optimizer: A Keras optimizer without slots. It gets attributes: `recorded`, the pairs of
            gradient and variable passed to `apply`; `scale`, the factor by which `scale_loss`
            multiplies and recorded gradients are divided (None disables it); and
            `before_backward`, a function that `scale_loss` calls if it is set.
    """
    optimizer.scale = None
    optimizer.before_backward = None
    _replace_class(optimizer, _ScalingMixin)


@contextlib.contextmanager
def recording_gradients(optimizer: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Make this optimizer record gradients within the context.

    Its slots do not change. If it scales the loss, recorded gradients are scaled, too.

    Args:
        optimizer: A Keras optimizer.

    Yields:
        The pairs of gradient and variable passed to `apply`.
    """
    kind = type(optimizer)
    _replace_class(optimizer, _RecordingMixin)
    try:
        yield optimizer.recorded
    finally:
        optimizer.__class__ = kind


def _replace_class(optimizer: Any, mixin: type) -> None:
    kind = type(optimizer)
    # A class attribute, since Keras would track a list in an instance attribute.
    optimizer.__class__ = type(f"Recording{kind.__name__}", (mixin, kind), {"recorded": []})


class _RecordingMixin:
    recorded: list[tuple[Any, Any]]

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[Any, list[Any]]:
        """Return the variables as they are, and the gradients as the optimizer's variables."""
        return trainable_variables, [self._unscaled(each) for each in grads]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is None:
            raise ValueError(
                "optimizer.apply(gradients) in train_step: pass the variables too, as in "
                "optimizer.apply(gradients, model.trainable_variables)"
            )
        self.recorded.extend(
            (self._unscaled(each), variable)
            for each, variable in zip(grads, trainable_variables, strict=True)
        )

    def apply_gradients(self, grads_and_vars: Any) -> None:
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    def _unscaled(self, gradient: Any) -> Any:
        return gradient


class _ScalingMixin(_RecordingMixin):
    scale: Any
    before_backward: Callable[[], None] | None

    def scale_loss(self, loss: Any) -> Any:
        if self.before_backward is not None:
            self.before_backward()
        return loss if self.scale is None else loss * self.scale

    def _unscaled(self, gradient: Any) -> Any:
        return gradient if self.scale is None or gradient is None else gradient / self.scale
