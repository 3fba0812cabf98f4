"""Result batch: the elements in one reply to a client."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.service.messages import (
    NO_ELEMENT_IDS,
    ElementIds,
    GetElementsReply,
    RoundProgress,
    SavedFile,
    SkippedElements,
)
from headrace.transport.channel import Buffer

__all__ = ["BatchReply", "ResultBatch"]


class ResultBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive encoded elements of a task, or the error in place of one."""

    first_element: int
    """Number of the first element within the task."""
    num_elements: int = 0
    buffers: Sequence[Buffer] = ()
    size: int = 0
    """Size in bytes."""
    done_from: int = 0
    done_to: int = 0
    """Range `done_from` to `done_to` - 1 of splits, in assignment order, completed by this
    batch.
    """
    delivered_end: int = 0
    """End of the splits, in assignment order, with elements in this batch or an earlier one."""
    error: Exception | None = None
    files: tuple[SavedFile, ...] = ()
    """Complete files with all elements since the batch before; not for clients."""
    mode_data: ElementIds | RoundProgress | SkippedElements | None = None
    """Fields of the task's reading mode."""
    earlier_delivered_end: int = 0
    """End of the splits, in assignment order, with elements in earlier batches."""
    index: int = 0
    """Index of the batch within the task."""
    num_done: int = 0
    """Number of splits that the dispatcher knew to be done when the batch was sent."""
    row_range: tuple[int, int] | None = None
    """Range (start, stop) of rows in `buffers` that belong to the batch; None for all."""
    is_shared: bool = False
    """Whether several receivers share the memory, so that it must be read-only."""
    assigned: tuple[tuple[int, int, int, int], ...] = ()
    """Assignments of the task when the batch was sent (`messages.ElementIds.assigned`)."""

    @property
    def element_ids(self) -> ElementIds:
        """Ids of its elements; empty if the reading mode does not track them."""
        return self.mode_data if isinstance(self.mode_data, ElementIds) else NO_ELEMENT_IDS

    @property
    def num_splits(self) -> int:
        """Number of splits completed by this batch."""
        return self.done_to - self.done_from

    def __eq__(self, other: object) -> bool:
        """Compare the contents, independent of receiver and time."""
        if not isinstance(other, ResultBatch):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED)

    __hash__ = None  # type: ignore[assignment]


_COMPARED = tuple(
    name
    for name in ResultBatch.__struct_fields__
    if name not in ("earlier_delivered_end", "index", "num_done", "is_shared", "assigned")
)


BatchReply = ResultBatch | GetElementsReply | Exception
"""Reply to a request. A `GetElementsReply` has no elements, and an error rejects the request."""
