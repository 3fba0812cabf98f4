"""Iterator of `ragged_batch`: differs from `batch` only in how elements are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.element.chunk import Chunk
from headrace.element.ragged import stack_ragged
from headrace.element.stack import StackedElement
from headrace.execution.batching import BatchIterator
from headrace.execution.context import Context
from headrace.execution.iterator import make_iterator
from headrace.plan.ragged import RaggedBatch

__all__ = ["RaggedBatchIterator"]


@make_iterator.register(RaggedBatch)
class RaggedBatchIterator(BatchIterator):
    """Joins consecutive elements, whose arrays may have different lengths."""

    _verb = "join"

    def __init__(self, node: RaggedBatch, context: Context) -> None:
        super().__init__(node, context)
        self._fixed_lengths = frozenset(node.fixed_lengths)

    def _join(self, parts: Sequence[Chunk]) -> StackedElement:
        rows: list[Any] = []
        for part in parts:
            rows.extend(part.rows())
        return stack_ragged(rows, self._fixed_lengths)

    def _can_reshape(self, columns: StackedElement) -> bool:
        return False
