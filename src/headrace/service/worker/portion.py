"""A portion: what answers one request of a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.service.dispatcher.rows import OriginRun
from headrace.service.messages import Elements, SavedFile
from headrace.transport.channel import Buffer

__all__ = ["Answer", "Portion"]


@dataclass(frozen=True, kw_only=True)
class Portion:
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
    failed: int = -1
    """The unit, in dealt order, whose element failed, where units come one after the other."""
    origins: tuple[OriginRun, ...] = ()
    """Whence its elements are, in dealt order, where the task's elements have origins; with the
    ordinals after the last of units that ended (`rows`)."""
    files: tuple[SavedFile, ...] = ()
    """Not for clients: files that are whole, with all elements since the portion before."""
    is_mixed: bool = False
    """The origins are not in the order of the elements."""
    begun: int = field(default=0, compare=False)
    """Of units from this one on, in dealt order, nothing was in an earlier portion."""
    index: int = field(default=0, compare=False)
    """Its place among the task's portions."""
    whole: int = 0
    """Rounds that arrived at every consumer, where the task is read in rounds."""
    done: int = field(default=0, compare=False)
    """Of units before this one the dispatcher knew that they are done, when it was given."""
    rows: tuple[int, int] | None = None
    """Which of the elements in `buffers` it is: (start, stop); None: all."""
    is_shared: bool = field(default=False, compare=False)
    """Others get the same memory: nobody may write into it."""
    skipped: int = 0
    """Elements before the first that whoever gets it did not get, because they had gone."""
    dealt: tuple[tuple[int, int, int, int], ...] = field(default=(), compare=False)
    """What the task was dealt until then (`messages.Elements.dealt`), where that is said."""

    @property
    def units(self) -> int:
        """Number of units that are whole with this portion."""
        return self.done_to - self.done_from


Answer = Portion | Elements | Exception
"""What a request may be answered with: `Elements` by itself carries none, an error refuses it."""
