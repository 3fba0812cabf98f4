"""The iterator of `padded_batch`: a batch like any other, but for how its elements are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.element.chunk import Chunk
from headrace.element.stack import Stacked
from headrace.errors import InvalidElementError
from headrace.execution.batching import BatchIterator
from headrace.execution.context import Context
from headrace.execution.iterator import make_iterator
from headrace.plan.batching import PaddedBatch

__all__ = ["PaddedBatchIterator"]


@make_iterator.register(PaddedBatch)
class PaddedBatchIterator(BatchIterator):
    """Stacks consecutive elements, each component padded to one shape."""

    _verb = "pad"

    def __init__(self, node: PaddedBatch, context: Context) -> None:
        super().__init__(node, context)
        self._padding = node.padding

    def _joined(self, parts: Sequence[Chunk]) -> Stacked:
        if all(part.is_columnar for part in parts):
            return self._padding.join([part.columns() for part in parts])
        rows: list[Any] = []
        for part in parts:
            rows.extend(part.rows())
        return self._padding.stack(rows)

    def _takes_columns(self, columns: Stacked) -> bool:
        try:
            return self._padding.leaves_as_it_is(columns)
        except InvalidElementError:
            return False  # raised, with its step, when the batch is made
