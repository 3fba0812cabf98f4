"""The Source contract: where elements come from.

A source has `size` indices: rows of an array, files, row groups. Each index holds elements in a
fixed order, one (`elements_per_index == 1`) or any number (None: known only by reading). A *split*
is a range of indices, so whoever deals out work needs to know a number and no code of the user's.
A remote dataset is just another source.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.spec import Spec

__all__ = ["INFINITE", "UNKNOWN", "IndexedSource", "Position", "Reader", "Source"]

INFINITE = -1
"""A size or cardinality without end."""
UNKNOWN = -2
"""A cardinality that only reading can tell."""

Position: TypeAlias = Any
"""A reader's place: a JSON value (int, str, list, dict, None) of bounded size."""


@runtime_checkable
class Reader(Protocol):
    """Reads the elements of one split, in order."""

    def read(self, limit: int) -> Chunk | None:
        """Return the next 1 to `limit` elements, or None at the end of the split.

        Returns early rather than late: what is at hand without waiting (a block that was read)
        may be returned together; a source whose elements each take time returns one at a time.
        An element that cannot be read raises when its turn comes, after the elements before it
        were returned; the next call goes on behind it where that is possible, else ends.
        """

    def get_position(self) -> Position:
        """Return the place before the next element, for `Source.open`; cheap (called per chunk)."""

    def close(self) -> None:
        """Release files, sockets and threads. May be called twice."""


@runtime_checkable
class Source(Protocol):
    """Something with `size` indices whose elements can be read split by split."""

    @property
    def size(self) -> int:
        """Number of indices, or INFINITE."""

    @property
    def element_spec(self) -> Spec | None:
        """Spec of one element, or None when only reading can tell."""

    @property
    def elements_per_index(self) -> int | None:
        """Elements that each index holds, or None when only reading can tell."""

    @property
    def splittable(self) -> bool:
        """Whether parts of it may be read by different workers."""

    def open(self, start: int, stop: int, position: Position = None) -> Reader:
        """Return a reader of indices `start` to `stop` - 1, at `position` if one is given.

        `stop` may be INFINITE for a source without end.
        """


@runtime_checkable
class IndexedSource(Source, Protocol):
    """A source of one element an index, that can be read in any order."""

    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return the elements at `indices`, stacked: each component gets `indices`' axes in front.

        `indices` may have any number of axes; the result is fresh memory that the caller owns.
        """
