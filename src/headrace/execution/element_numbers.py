"""Element numbers, which identify elements of a plan independently of reader and earlier elements.

An element is identified by (epoch, position, ordinal within the position). Its 64-bit number is
computed from these by arithmetic on whole columns. Chunks carry element numbers if a step above
opens datasets for elements (`Context.wants_element_numbers`): nested datasets draw from the
numbers, so they are the same however the work is divided, and in any order of the elements.

Rule 1. The numbers are a stable format: random draws after a restore depend on them.
Rule 2. Steps that join streams (`repeat`, `concatenate`, `zip`, an interleave) mix the number of
        the stream into the elements' numbers. Steps that select, hold or reorder elements leave
        numbers unchanged. No number depends on how the work is divided.
Rule 3. If element ids are tracked too, a column has records (`element.metadata`). Elements of a
        nested dataset belong to the outer element's split. Above a partition boundary no nested
        datasets are opened, and the numbers from the boundary are kept by steps that join streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.compact_columns import InterleavedSplits, MetadataColumn
from headrace.element.metadata import element_numbers, has_element_ids, split_column
from headrace.element.structure import Structure, flatten, unflatten
from headrace.plan.random_words import mix_bits

__all__ = [
    "BufferedChunk",
    "IdColumn",
    "InterleavedParts",
    "interleave_chunks",
    "nest_ids",
    "number_positions",
    "round_robin_column",
]

IdColumn: TypeAlias = NDArray[Any]
"""Metadata column: one number per element, or a record of the number and an element id."""


def number_positions(first: int, count: int) -> IdColumn:
    """Return the element numbers of positions `first` and following of an index plan."""
    return mix_bits(np.arange(first, first + count, dtype=np.uint64))


def nest_ids(outer: IdColumn, inner: IdColumn | int) -> IdColumn:
    """Return the numbers of elements `inner` nested within elements `outer`.

    Each has one number per element, or one for all elements. `inner` may also be ordinals.
    """
    if isinstance(inner, int):
        inner = np.array([inner], np.uint64)
    if outer.dtype.names is None and inner.dtype.names is None:
        return mix_bits(mix_bits(outer) + inner)
    numbers, inner_numbers = element_numbers(outer), element_numbers(inner)
    if inner.dtype.names is not None:
        if has_element_ids(inner) or inner_numbers is None:
            return inner  # from a partition boundary, or splits alone
        splits = inner["split"]
    else:
        splits = np.broadcast_to(outer["split"], np.broadcast_shapes(outer.shape, inner.shape))
    if numbers is None:
        return split_column(splits, None)
    assert inner_numbers is not None
    return split_column(splits, mix_bits(mix_bits(numbers) + inner_numbers))


def round_robin_column(
    splits: Sequence[int], per_turn: int, start: int, count: int
) -> MetadataColumn:
    """Return the split column of elements of splits in round-robin order, without element numbers.

    Args:
        splits: Splits in the order of their turns.
        per_turn: Elements per turn.
        start: Number of elements, of all splits, skipped at the start.
        count: Number of elements.
    """
    column = InterleavedSplits(tuple(splits), per_turn, start, count)
    # If two datasets belong to one split, its elements must be counted one by one.
    return column if len(set(splits)) == len(splits) else column.to_array()


# --- Merging parts of several chunks, by column if possible ---------------------------------------

_MIN_ELEMENTS_PER_PART = 4
"""Minimum average number of elements per part that makes moving columns faster than rows."""


class BufferedChunk:
    """A chunk and the layout of its columns.

    Args:
        chunk: The elements.
        split: Split of all elements, if splits are tracked and the chunk has no metadata.
    """

    __slots__ = ("_layout", "chunk", "leaves", "split", "structure")

    def __init__(self, chunk: Chunk, split: int | None = None) -> None:
        self.chunk: Chunk = chunk
        self.split: int | None = split
        self.leaves: list[NDArray[Any]] = []  # set when the layout is first requested
        self.structure: Structure | None = None
        self._layout: tuple[Any, ...] | None = None

    @property
    def layout(self) -> tuple[Any, ...] | None:
        """Layout of the columns, or None without columns; equal layouts can be merged."""
        if self._layout is None and self.chunk.is_columnar:
            self.leaves, self.structure = flatten(self.chunk.columns())
            shapes = [(leaf.dtype, leaf.shape[1:]) for leaf in self.leaves]
            self._layout = (self.structure, shapes)
        return self._layout


class InterleavedParts(NamedTuple):
    """Interleaved elements: `per_part` of every part in turn, `rounds` times."""

    per_part: int
    rounds: int
    parts: list[tuple[BufferedChunk, int]]
    """Chunks, each with the index of its first element to use."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.per_part * self.rounds * len(self.parts)


def interleave_chunks(groups: Sequence[InterleavedParts]) -> Chunk:
    """Return the elements of the groups, one group after the other."""
    size = sum([group.size for group in groups])
    parts = sum([len(group.parts) for group in groups])
    first, start = groups[0].parts[0]
    if parts == 1:
        result = first.chunk.slice(start, start + size)
        return (
            result
            if first.split is None
            else result.with_metadata(round_robin_column([first.split], 1, 0, size))
        )
    result = _interleave_elements(groups, size, parts)
    if first.split is not None:
        return result.with_metadata(_split_column(groups, size))
    if first.chunk.metadata is None:
        return result
    return result.with_metadata(_interleave_column(groups, size, first.chunk.metadata, _ids_of))


def _interleave_elements(groups: Sequence[InterleavedParts], size: int, parts: int) -> Chunk:
    if parts * _MIN_ELEMENTS_PER_PART <= size:
        first = groups[0].parts[0][0]
        if first.layout is not None and all(
            buffered.layout == first.layout for group in groups for buffered, _ in group.parts
        ):
            return _interleave_columns(groups, size, first)
    rows: list[Any] = []
    for per_part, rounds, group_parts in groups:
        group_rows = [(buffered.chunk.rows(), start) for buffered, start in group_parts]
        if per_part == 1 and rounds > 1:
            interleaved: list[Any] = [None] * (rounds * len(group_rows))
            for index, (part, start) in enumerate(group_rows):
                interleaved[index :: len(group_rows)] = part[start : start + rounds]
            rows += interleaved
            continue
        for offset in range(0, rounds * per_part, per_part):
            for part, start in group_rows:
                rows += part[start + offset : start + offset + per_part]
    return Chunk.of_rows(rows)


def _interleave_columns(
    groups: Sequence[InterleavedParts], size: int, first: BufferedChunk
) -> Chunk:
    result: list[NDArray[Any]] = []
    for number, leaf in enumerate(first.leaves):

        def column(buffered: BufferedChunk, number: int = number) -> NDArray[Any]:
            return buffered.leaves[number]

        result.append(_interleave_column(groups, size, leaf, column))
    assert first.structure is not None
    return Chunk.of_columns(unflatten(first.structure, result), size)


def _interleave_column(
    groups: Sequence[InterleavedParts],
    size: int,
    like: NDArray[Any],
    column_of: Callable[[BufferedChunk], NDArray[Any]],
) -> NDArray[Any]:
    """Return one column of the merged chunk; `like` is an example of the parts' columns."""
    row_shape = like.shape[1:]
    # Zeroed if there is padding between fields, which is not written here.
    merged = (np.zeros if like.dtype.kind == "V" else np.empty)((size, *row_shape), like.dtype)
    offset = 0
    for per_part, rounds, parts in groups:
        count = per_part * rounds
        blocks = [
            column_of(buffered)[start : start + count].reshape(rounds, per_part, *row_shape)
            for buffered, start in parts
        ]
        stop = offset + count * len(parts)
        np.concatenate(
            blocks, 1, merged[offset:stop].reshape(rounds, per_part * len(parts), *row_shape)
        )
        offset = stop
    return merged


def _split_column(groups: Sequence[InterleavedParts], size: int) -> IdColumn:
    """Return the split column of the merged chunk; each part belongs to one split."""
    splits = np.empty(size, np.int64)
    offset = 0
    for per_part, rounds, parts in groups:
        stop = offset + per_part * rounds * len(parts)
        shaped = splits[offset:stop].reshape(rounds, len(parts), per_part)
        shaped[:] = np.array([buffered.split for buffered, _ in parts], np.int64)[:, np.newaxis]
        offset = stop
    return split_column(splits, None)


def _ids_of(buffered: BufferedChunk) -> IdColumn:
    assert buffered.chunk.metadata is not None
    return buffered.chunk.metadata
