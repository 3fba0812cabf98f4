"""Rows of an `Embedding` layer, looked up in steps that JAX compiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from headrace.adapters.keras_training.embedding_rows import EmbeddingRows
from headrace.adapters.keras_training.keras_internals import row_values
from headrace.adapters.keras_training.rows import Rows

__all__ = ["JaxRows"]


class JaxRows(EmbeddingRows):
    """One layer whose rows are looked up.

    Attributes:
        looked_up: Ids of each call of the layer in the step that is traced.
    """

    def __init__(self, index: int, layer: Any) -> None:
        super().__init__(index, layer)
        self.looked_up: list[Any] = []
        self._ids: Any = None
        self._here: list[Any] = []
        #: Rows that steps are compiled for.
        self._size = 0

    def begin(self, ids: Any) -> None:
        """Begin a step, with rows of these ids; None: one that only finds ids, with none."""
        self._ids, self.looked_up, self._here = ids, [], []

    @property
    def are_all_here(self) -> Any:
        """Whether the step had all rows that it looked up."""
        return jnp.all(jnp.stack(self._here)) if self._here else True

    def look_up(self, ids: Any) -> Any:
        """Return the rows of ids, or zeros where the step only finds ids."""
        ids = self.from_start(ids)
        self.looked_up.append(ids)
        if self._ids is None:
            return jnp.zeros((*ids.shape, self.dim), self.variable.dtype)
        positions = jnp.searchsorted(self._ids, ids.astype(self._ids.dtype))
        self._here.append(jnp.all(jnp.take(self._ids, positions, mode="clip") == ids))
        return jnp.take(row_values(self.variable), positions, axis=0, mode="clip")

    def from_start(self, ids: Any) -> Any:
        """Return ids without negative ones, which count from the end."""
        return ids if self.count is None else jnp.where(ids < 0, ids + self.count, ids)

    def padded(self, rows: Rows) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ids and values of rows, padded to the compiled size."""
        count = len(rows.ids)
        if count > self._size:
            # With some room: it is compiled again when the size grows.
            self._size = 1 << (count + count // 4).bit_length()
            if self.count is not None:
                self._size = min(self.count, self._size)
        dtype = jax.dtypes.canonicalize_dtype(np.int64)
        ids = np.full(max(self._size, 1), np.iinfo(dtype).max, dtype)
        ids[:count] = rows.ids
        values = np.zeros((len(ids), self.dim), rows.values.dtype)
        values[:count] = rows.values
        return ids, values
