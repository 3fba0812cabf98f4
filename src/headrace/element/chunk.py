"""Chunks: n elements in one object, stored as rows, as columns, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element import stack as stacking
from headrace.element.compact_columns import MetadataColumn, concatenate_columns
from headrace.element.stack import StackedElement
from headrace.element.structure import Element
from headrace.errors import InvalidElementError

__all__ = ["Chunk", "DeferredMetadata", "States", "concatenate"]

States: TypeAlias = Callable[[int], Any]
"""Returns the state of a stream before element i of a chunk; i == size is after the last element.
It is called on demand, possibly much later and on another thread, so it holds the data it needs and
reads nothing that may change."""
DeferredMetadata: TypeAlias = Callable[[], MetadataColumn]
"""Returns the metadata of a chunk's elements on demand, the same each time. Several threads may
call it, several times."""


class Chunk:
    """A sequence of elements. A chunk and its contents must not be changed in place.

    Holds rows (a list of elements), columns (one stacked element), or both after a conversion. A
    chunk from an iterator also has the iterator state before each of its elements (`state_at`).

    >>> chunk = hr.Chunk.of_columns({"x": np.array([1, 2, 3])}, 3)
    >>> chunk.size, chunk.rows()[0]
    (3, {'x': np.int64(1)})
    >>> chunk.slice(1, 3).columns()
    {'x': array([2, 3])}

    Attributes:
        metadata: Element number of each element, if tracked, and optionally its element id
            (`element.metadata`). Metadata stays with the elements through all steps, including
            those that buffer elements, while `state_at` refers to the stream.
    """

    __slots__ = ("_columns", "_metadata", "_rows", "_states", "size")

    size: int
    """Number of elements."""

    def __init__(
        self,
        rows: list[Element] | None,
        columns: StackedElement,
        size: int,
        states: States | None = None,
        metadata: MetadataColumn | DeferredMetadata | None = None,
    ) -> None:
        self._rows = rows
        self._columns = columns
        self._states = states
        self._metadata = metadata
        self.size = size

    @classmethod
    def of_rows(
        cls,
        rows: list[Element],
        states: States | None = None,
        metadata: MetadataColumn | None = None,
    ) -> Chunk:
        """Return a chunk of these elements; it takes ownership of the list."""
        return cls(rows, _NOT_COMPUTED, len(rows), states, metadata)

    @classmethod
    def of_columns(
        cls,
        columns: StackedElement,
        size: int,
        states: States | None = None,
        metadata: MetadataColumn | None = None,
    ) -> Chunk:
        """Return a chunk of the `size` rows of a stacked element."""
        return cls(None, columns, size, states, metadata)

    def with_states(self, states: States) -> Chunk:
        """Return the same elements with these states of the stream."""
        return Chunk(self._rows, self._columns, self.size, states, self._metadata)

    @property
    def metadata(self) -> NDArray[Any] | None:
        """Metadata of the elements, or None if it is not tracked."""
        metadata = self._metadata
        if callable(metadata):
            metadata = self._metadata = metadata()
        if not (metadata is None or isinstance(metadata, np.ndarray)):
            metadata = self._metadata = metadata.to_array()
        return metadata

    @property
    def compact_metadata(self) -> MetadataColumn | None:
        """Metadata in compact form if it is available that way, to be passed on."""
        metadata = self._metadata
        if callable(metadata):
            metadata = self._metadata = metadata()
        return metadata

    @property
    def deferred_metadata(self) -> DeferredMetadata | None:
        """Function that returns the metadata, which can be kept without the elements."""
        metadata = self._metadata
        return metadata if metadata is None or callable(metadata) else lambda: metadata

    def with_metadata(self, metadata: MetadataColumn | DeferredMetadata | None) -> Chunk:
        """Return the same elements with this metadata, or a function that returns it."""
        return Chunk(self._rows, self._columns, self.size, self._states, metadata)

    def state_at(self, index: int) -> Any:
        """Return the state of the stream before element `index`; `size` means after the last."""
        if self._states is None:
            raise ValueError("these elements have no states: no iterator has set them")
        return self._states(index)

    @property
    def has_states(self) -> bool:
        """Whether the chunk has the stream's state before each element."""
        return self._states is not None

    @property
    def states(self) -> States:
        """Function that `state_at` calls, which can be kept without the elements."""
        return self.state_at if self._states is None else self._states

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Chunk({self.size} {'columnar' if self.is_columnar else 'rows'})"

    @property
    def is_columnar(self) -> bool:
        """Whether columns are available, so that `columns` costs nothing."""
        return self._columns is not _NOT_COMPUTED

    def rows(self) -> list[Element]:
        """Return the elements; their arrays may be views of the columns. The result is cached."""
        if self._rows is None:
            self._rows = stacking.unstack(self._columns, self.size)
        return self._rows

    def columns(self) -> StackedElement:
        """Return the elements as one stacked element. The result is cached.

        Raises:
            InvalidElementError: If the chunk is empty, or its elements differ in structure, shape
                or dtype.
        """
        if self._columns is _NOT_COMPUTED:
            if not self._rows:
                raise InvalidElementError("an empty chunk has no columns; use its rows instead")
            self._columns = stacking.stack(self._rows)
        return self._columns

    def slice(self, start: int, stop: int) -> Chunk:
        """Return elements `start` to `stop` - 1, as views; both are clipped to the chunk."""
        start = max(start, 0)
        stop = max(min(stop, self.size), start)
        if start == 0 and stop == self.size:
            return self
        rows = None if self._rows is None else self._rows[start:stop]
        states = self._states
        if states is not None and start:
            whole = states
            states = lambda index: whole(start + index)  # noqa: E731
        metadata = self._metadata
        if callable(metadata):
            deferred = metadata
            metadata = lambda: deferred()[start:stop]  # noqa: E731
        elif metadata is not None:
            metadata = metadata[start:stop]
        if self._columns is _NOT_COMPUTED:
            return Chunk(rows, _NOT_COMPUTED, stop - start, states, metadata)
        columns = stacking.slice_rows(self._columns, start, stop)
        return Chunk(rows, columns, stop - start, states, metadata)

    def take(self, indices: Any) -> Chunk:
        """Return the elements at `indices` (a sequence of int, or a one-dimensional array).

        The result has no states: a caller that drops elements must track the positions itself.
        """
        metadata = self.take_metadata(indices)
        if self._columns is not _NOT_COMPUTED:
            columns = stacking.take(self._columns, indices)
            return Chunk(None, columns, len(indices), None, metadata)
        rows = self.rows()
        chosen = indices.tolist() if isinstance(indices, np.ndarray) else indices
        return Chunk.of_rows([rows[index] for index in chosen], None, metadata)

    def take_metadata(self, indices: Any) -> NDArray[Any] | None:
        """Return the metadata of the elements at `indices`, as for `take`, or of a slice."""
        return None if self.metadata is None else self.metadata[indices]

    def slice_compact_metadata(self, start: int, stop: int) -> MetadataColumn | None:
        """Return the metadata of elements `start` to `stop` - 1, in compact form if available."""
        column = self.compact_metadata
        return None if column is None else column[start:stop]

    def take_compact_metadata(self, indices: list[int]) -> MetadataColumn | None:
        """Return the metadata of the elements at `indices`, a non-empty ascending list."""
        start, stop = indices[0], indices[-1] + 1
        are_all = stop - start == len(indices)
        return self.slice_compact_metadata(start, stop) if are_all else self.take_metadata(indices)


def concatenate(chunks: Sequence[Chunk]) -> Chunk:
    """Return the elements of all chunks in order; a single chunk is returned unchanged.

    The result has columns if all chunks do and their rows have the same structure and shapes.

    Raises:
        ValueError: If there are no chunks.
    """
    if not len(chunks):
        raise ValueError("chunks is empty; at least one chunk is needed")
    if len(chunks) == 1:
        return chunks[0]
    metadata = _concatenate_metadata(chunks)
    if all(chunk.is_columnar for chunk in chunks):
        try:
            joined = stacking.concatenate([chunk.columns() for chunk in chunks])
        except InvalidElementError:
            # Elements may differ in shape from chunk to chunk: store them as rows.
            pass
        else:
            return Chunk.of_columns(joined, sum(map(len, chunks)), None, metadata)
    rows: list[Element] = []
    for chunk in chunks:
        rows.extend(chunk.rows())
    return Chunk.of_rows(rows, None, metadata)


def _concatenate_metadata(chunks: Sequence[Chunk]) -> MetadataColumn | None:
    metadata = [column for chunk in chunks if (column := chunk.compact_metadata) is not None]
    return concatenate_columns(metadata) if len(metadata) == len(chunks) else None


class _NotComputed:
    """Marker for columns that are not computed yet, since None is a valid element."""


_NOT_COMPUTED = _NotComputed()
