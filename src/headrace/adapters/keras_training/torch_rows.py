"""Rows of an `Embedding` layer, looked up in steps that PyTorch runs.

The parameter that is the layer's matrix holds the rows of a step, so that their gradient goes where
`train_step` looks for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.adapters.keras_training.embedding_rows import EmbeddingRows
from headrace.adapters.keras_training.keras_internals import row_values
from headrace.adapters.keras_training.rows import Rows

__all__ = ["TorchRows", "note_reads"]

_NONE = np.zeros(0, np.int64)
# Functions that read or set an attribute, such as `grad`.
_OF_ATTRIBUTES = frozenset({"__get__", "__set__", "__delete__"})


class TorchRows(EmbeddingRows):
    """One layer whose rows are looked up.

    Attributes:
        missing: Ids that the step looked up and was not given rows for.
    """

    def __init__(self, index: int, layer: Any) -> None:
        super().__init__(index, layer)
        parameter = row_values(self.variable)
        parameter.data = parameter.data.new_zeros((0, self.dim))
        note_reads(parameter, self)
        self.missing = _NONE
        self._parameter = parameter
        self._ids = _NONE
        self._calls: list[NDArray[Any]] = []

    def restore(self) -> None:
        """Restore the layer's own `call` and its matrix, with zeros."""
        super().restore()
        parameter = self._parameter
        del parameter.lookup
        parameter.__class__ = torch.nn.Parameter
        parameter.grad = None
        parameter.data = parameter.data.new_zeros((self.count or 0, self.dim))

    def give(self, rows: Rows) -> None:
        """Set the rows of the next step."""
        parameter, self._ids = self._parameter, rows.ids
        parameter.grad = None
        # The graph of an earlier step may still exist, and its node for gradients of the parameter
        # expects as many rows as there were: it is dropped where the dtype changes in between.
        parameter.data = parameter.data.new_zeros(0, dtype=torch.complex64)
        parameter.data = torch.from_numpy(rows.values).to(parameter.device)

    def begin(self) -> None:
        """Begin a step."""
        self.missing, self._calls = _NONE, []

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids; zeros if any of them is missing."""
        called = ids.detach().cpu().numpy()
        self._calls.append(called)
        lacking = np.setdiff1d(self.distinct(called), self._ids, assume_unique=True)
        if len(lacking):
            self.missing = np.union1d(self.missing, lacking)
            return self._parameter.data.new_zeros((*ids.shape, self.dim))
        wanted = called
        if self.count is not None:
            wanted = np.where(called < 0, called + self.count, called)
        positions = torch.from_numpy(np.searchsorted(self._ids, wanted)).to(ids.device)
        rows: torch.Tensor = torch.nn.Parameter.__torch_function__(
            torch.nn.functional.embedding, (), (positions, self._parameter), {}
        )
        return rows

    def of_used(self, gradients: NDArray[Any]) -> Rows:
        """Return the gradients of the rows that the step looked up, without unused rows."""
        used = self.distinct(np.concatenate([_NONE, *(each.ravel() for each in self._calls)]))
        if len(used) < len(self._ids):
            gradients = gradients[np.searchsorted(self._ids, used)]
        return Rows(used, gradients)

    def sources(self, leaves: Sequence[NDArray[Any]]) -> set[int]:
        """Return the numbers of the leaves of a batch that the layer was called with."""
        return {
            number
            for number, leaf in enumerate(leaves)
            for called in self._calls
            if leaf.shape == called.shape
            and leaf.dtype.kind in "iuf"
            and np.array_equal(leaf, called)
        }

    def expected(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return the likely ids that are in range, sorted and without duplicates."""
        if self.count is not None:
            ids = ids[(ids >= -self.count) & (ids < self.count)]
        return self.distinct(ids)


def note_reads(parameter: torch.nn.Parameter, owner: Any) -> None:
    """Call `owner.note_read()` whenever something computes with a parameter."""
    parameter.__class__ = _RowsParameter
    parameter.lookup = owner


class _RowsParameter(torch.nn.Parameter):  # type: ignore[misc]
    """Tells `lookup.note_read()` when anything computes with it outside of the layer's call."""

    lookup: Any
    plain_class = torch.nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _OF_ATTRIBUTES:
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, _RowsParameter):
                    each.lookup.note_read()
        return torch.nn.Parameter.__torch_function__(func, types, args, kwargs or {})
