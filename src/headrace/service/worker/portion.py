"""A portion: what answers one request of a client."""

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

__all__ = ["Answer", "Portion"]


class Portion(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive elements of a task, encoded, or the error that stands in an element's place."""

    first: int
    """The task's own number of the first element."""
    count: int = 0
    buffers: Sequence[Buffer] = ()
    size: int = 0
    """Bytes."""
    done_from: int = 0
    done_to: int = 0
    """Units, in dealt order, that are whole with this portion."""
    touched: int = 0
    """Of units from this one on, in dealt order, nothing is in this portion or an earlier one."""
    error: Exception | None = None
    files: tuple[SavedFile, ...] = ()
    """Not for clients: files that are whole, with all elements since the portion before."""
    mode: ElementIds | RoundProgress | SkippedElements | None = None
    """What the task's reading mode adds."""
    begun: int = 0
    """Of units from this one on, in dealt order, nothing was in an earlier portion."""
    index: int = 0
    """Its place among the task's portions."""
    done: int = 0
    """Of units before this one the dispatcher knew that they are done, when it was given."""
    rows: tuple[int, int] | None = None
    """Which of the elements in `buffers` it is: (start, stop); None: all."""
    is_shared: bool = False
    """Others get the same memory: nobody may write into it."""
    dealt: tuple[tuple[int, int, int, int], ...] = ()
    """What the task was dealt until it was given (`messages.ElementIds.assigned`)."""

    @property
    def origins(self) -> ElementIds:
        """Where its elements come from; nothing where the reading mode does not say it."""
        return self.mode if isinstance(self.mode, ElementIds) else NO_ELEMENT_IDS

    @property
    def units(self) -> int:
        """Number of units that are whole with this portion."""
        return self.done_to - self.done_from

    def __eq__(self, other: object) -> bool:
        """Whether it is the same, whoever gets it and when."""
        if not isinstance(other, Portion):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED)

    __hash__ = None  # type: ignore[assignment]


_COMPARED = tuple(
    name
    for name in Portion.__struct_fields__
    if name not in ("begun", "index", "done", "is_shared", "dealt")
)


Answer = Portion | GetElementsReply | Exception
"""What a request may be answered with: `GetElementsReply` by itself carries none, an error refuses
it."""
