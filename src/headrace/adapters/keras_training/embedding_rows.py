"""`Embedding` layers in a worker's copy of a model whose rows are looked up on parameter servers.

A step gets the rows of its batch in place of the matrix, and returns a gradient for each of them.
Only the layer's own `call` may use the matrix: a step in which anything else reads it is run again
with all of it, as of a layer that was never looked up.

Servers apply such a gradient to its rows alone: momentum and weight decay change a row in the steps
that look it up, where Keras changes all rows in each step. Without them, the result is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_training.keras_internals import (
    has_table,
    replace_embedding_call,
    restore_embedding_call,
    sparse_embeddings,
)
from headrace.adapters.keras_training.rows import WholeWeightNeeded
from headrace.errors import FailedPreconditionError, InvalidArgumentError

__all__ = ["EmbeddingRows", "embedding_rows"]


class EmbeddingRows:
    """One layer whose rows are looked up.

    Attributes:
        index: Index of its matrix among the trainable variables of the model.
        layer: The layer, whose `call` asks `look_up`.
        variable: Its matrix, which has no value here.
        count: Rows in it; None if any id has a row.
        has_table: Whether its rows are in a table, so that no step can have all of them.
        dim: Elements in a row.
        was_read: Whether anything but the layer's own `call` read the matrix.
    """

    def __init__(self, index: int, layer: Any) -> None:
        self.index = index
        self.layer = layer
        self.variable = layer.embeddings
        count, self.dim = self.variable.shape
        self.has_table = has_table(self.variable)
        self.count: int | None = count or None
        self.was_read = False
        replace_embedding_call(layer, self)

    def look_up(self, ids: Any) -> Any:
        """Return the rows of ids, a tensor of integers; steps of a back end define this."""
        raise NotImplementedError

    def note_read(self) -> None:
        """Record that something else reads the matrix, and refuse it.

        Raises:
            WholeWeightNeeded: Always.
        """
        self.was_read = True
        raise WholeWeightNeeded([self.index])

    def distinct(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return sorted unique ids of rows; negative ones count from the end.

        Raises:
            InvalidArgumentError: One is out of range.
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
            FailedPreconditionError: Its rows are in a table.
        """
        if self.has_table or self.count is None:
            raise FailedPreconditionError(
                f"the rows of the layer {self.layer.name!r} are in a table on parameter servers, "
                "and the model uses all of them, or calls the layer in a loop or condition that "
                "JAX traces: use rows only by calling the layer, outside of these"
            )
        restore_embedding_call(self.layer, (self.count, self.dim))


def embedding_rows(model: Any, kind: type[EmbeddingRows]) -> dict[int, EmbeddingRows]:
    """Have rows looked up in every layer of a model where that is possible.

    Args:
        model: Built.
        kind: That of the back end.

    Returns:
        By index among the trainable variables.
    """
    return {index: kind(index, layer) for index, layer in sparse_embeddings(model).items()}
