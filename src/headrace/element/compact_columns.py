"""Compact metadata columns: the metadata of elements as a few numbers (`element.metadata`).

    one element of each of several consecutive splits    ConsecutiveSplits
    splits that take turns, as in an interleave          InterleavedSplits

For small chunks, creating and joining arrays costs more than reading the elements. For interleaved
splits, arithmetic gives the indices of each split's elements without sorting. Compact columns have
no element numbers. They are converted to arrays (`to_array`) to select elements, and to join
columns that have no common compact form, such as after an interleave opened another dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.metadata import (
    ID_DTYPES,
    SPLIT_DTYPES,
    concatenate_metadata,
    id_column,
    split_column,
)

__all__ = [
    "ConsecutiveSplits",
    "InterleavedSplits",
    "MetadataColumn",
    "SplitElements",
    "concatenate_columns",
]


class _CompactColumn:
    """A metadata column without element numbers, in compact form.

    Attributes:
        size: Number of elements.
    """

    __slots__ = ("size",)

    size: int

    def __len__(self) -> int:
        return self.size


class ConsecutiveSplits(_CompactColumn):
    """One element of each of several consecutive splits.

    Attributes:
        first_split: Index of the first split.
        ordinal: Ordinal of each element in its split; None below the partition boundary.
    """

    __slots__ = ("first_split", "ordinal")

    def __init__(self, first_split: int, size: int, ordinal: int | None = None) -> None:
        self.first_split: int = first_split
        self.size = size
        self.ordinal: int | None = ordinal

    def __getitem__(self, part: slice) -> ConsecutiveSplits:
        start, stop, _ = part.indices(self.size)
        return ConsecutiveSplits(self.first_split + start, max(0, stop - start), self.ordinal)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array form."""
        return SPLIT_DTYPES[False] if self.ordinal is None else ID_DTYPES[False]

    def to_array(self) -> NDArray[Any]:
        """Return the column as an array."""
        splits = np.arange(self.first_split, self.first_split + self.size)
        if self.ordinal is None:
            return split_column(splits, None)
        return id_column(splits, np.full(self.size, self.ordinal))

    def max_split(self) -> int:
        """Return the largest split index in the column."""
        return self.first_split + self.size - 1

    def concatenate_with(self, following: MetadataColumn) -> ConsecutiveSplits | None:
        """Return this column and the following one joined, or None if there is no compact form."""
        if (
            not isinstance(following, ConsecutiveSplits)
            or following.first_split != self.first_split + self.size
        ):
            return None
        if following.ordinal != self.ordinal:
            return None
        return ConsecutiveSplits(self.first_split, self.size + following.size, self.ordinal)


class SplitElements(NamedTuple):
    """The elements of one split in an interleaved column."""

    cycle_index: int
    """Index of the split in the cycle."""
    num_before: int
    """Number of elements of the split since the start of the cycle, before this column."""
    size: int


class _Turns(NamedTuple):
    """The turns in a column; the first and the last may be partial."""

    cycle_indices: NDArray[np.int64]
    """Cycle index of the split of each turn."""
    starts: NDArray[np.int64]
    """Number of elements of that split before the turn, since the start of the cycle."""
    sizes: NDArray[np.int64]


class InterleavedSplits(_CompactColumn):
    """Splits that take turns, each with the same number of elements per turn.

    Attributes:
        splits: Distinct split indices in the order of their turns, which repeats.
        turn_size: Number of elements per turn.
        start: Number of elements of all splits before these, since the start of the cycle.
        first_ordinals: Ordinal of each split's first element since then; None below the partition
            boundary.
    """

    __slots__ = ("first_ordinals", "splits", "start", "turn_size")

    def __init__(
        self,
        splits: tuple[int, ...],
        turn_size: int,
        start: int,
        size: int,
        first_ordinals: tuple[int, ...] | None = None,
    ) -> None:
        self.splits: tuple[int, ...] = splits
        self.turn_size: int = turn_size
        self.start: int = start
        self.size = size
        self.first_ordinals: tuple[int, ...] | None = first_ordinals

    def __getitem__(self, part: slice) -> InterleavedSplits:
        start, stop, _ = part.indices(self.size)
        size = max(0, stop - start)
        if size == self.size:
            return self
        return InterleavedSplits(
            self.splits, self.turn_size, self.start + start, size, self.first_ordinals
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array form."""
        return SPLIT_DTYPES[False] if self.first_ordinals is None else ID_DTYPES[False]

    def split_elements(self) -> Iterator[SplitElements]:
        """Yield the elements of each split, in the order of their first turns here."""
        turn_size, cycle_length = self.turn_size, len(self.splits)
        round_size = turn_size * cycle_length
        rounds_before, offset_before = divmod(self.start, round_size)
        rounds_after, offset_after = divmod(self.start + self.size, round_size)
        first_turn = offset_before // turn_size
        for turn in range(first_turn, first_turn + min(self.num_turns, cycle_length)):
            cycle_index = turn % cycle_length
            turn_start = cycle_index * turn_size
            # Complete rounds, plus the part of an incomplete round.
            num_before = rounds_before * turn_size + min(
                max(offset_before - turn_start, 0), turn_size
            )
            num_after = rounds_after * turn_size + min(max(offset_after - turn_start, 0), turn_size)
            yield SplitElements(cycle_index, num_before, num_after - num_before)

    @property
    def num_turns(self) -> int:
        """Number of turns in the column; the first and the last may be partial."""
        if not self.size:
            return 0
        return (self.start + self.size - 1) // self.turn_size - self.start // self.turn_size + 1

    def indices_of(self, elements: SplitElements) -> NDArray[np.int32]:
        """Return the indices of a split's elements in this column, in order."""
        turn_size, round_size = self.turn_size, self.turn_size * len(self.splits)
        first = self.start // round_size * round_size + elements.cycle_index * turn_size
        if first + turn_size <= self.start:
            first += round_size
        first -= self.start
        if turn_size > self.size:  # a complete turn may not fit
            starts = range(first, self.size, round_size)
            turns = [range(max(start, 0), min(start + turn_size, self.size)) for start in starts]
            return np.concatenate([np.array(turn, np.int32) for turn in turns])
        indices = np.arange(first, self.size, round_size, dtype=np.int32)
        if turn_size > 1:
            indices = np.add.outer(indices, np.arange(turn_size, dtype=np.int32)).reshape(-1)
        num_earlier = max(0, -first)
        return indices[num_earlier : num_earlier + elements.size]

    def to_array(self) -> NDArray[Any]:
        """Return the column as an array."""
        cycle_indices, starts, sizes = self._turns()
        splits = np.array(self.splits, np.int64)[cycle_indices]
        if self.first_ordinals is None:
            return split_column(splits.repeat(sizes), None)
        starts += np.array(self.first_ordinals, np.int64)[cycle_indices]
        turn_offsets = sizes.cumsum() - sizes
        ordinals = np.arange(self.size) + (starts - turn_offsets).repeat(sizes)
        return id_column(splits.repeat(sizes), ordinals)

    def _turns(self) -> _Turns:
        cycle_length = len(self.splits)
        first_turn, num_turns = self.start // self.turn_size, self.num_turns
        rounds, cycle_indices = np.divmod(
            np.arange(first_turn, first_turn + num_turns), cycle_length
        )
        starts = rounds * self.turn_size
        sizes = np.full(num_turns, self.turn_size)
        if num_turns:
            offset = self.start % self.turn_size
            starts[0] += offset
            sizes[0] -= offset
            sizes[-1] -= (first_turn + num_turns) * self.turn_size - self.start - self.size
        return _Turns(cycle_indices, starts, sizes)

    def max_split(self) -> int:
        """Return the largest split index in the column."""
        cycle_length, first_turn = len(self.splits), self.start // self.turn_size
        num_turns = self.num_turns
        if num_turns == 1:
            return self.splits[first_turn % cycle_length]
        if num_turns >= cycle_length:
            return max(self.splits)
        turns = range(first_turn, first_turn + num_turns)
        return max([self.splits[turn % cycle_length] for turn in turns])

    def concatenate_with(self, following: MetadataColumn) -> InterleavedSplits | None:
        """Return this column and the following one joined, or None if there is no compact form."""
        if (
            not isinstance(following, InterleavedSplits)
            or following.turn_size != self.turn_size
            or following.splits != self.splits
        ):
            return None
        gap = self.start + self.size - following.start
        if (
            gap % (self.turn_size * len(self.splits))
            or following.first_ordinals != self.first_ordinals
        ):
            return None
        if gap and self.first_ordinals is not None:
            return None  # same ordinals, but another round
        return InterleavedSplits(
            self.splits, self.turn_size, self.start, self.size + following.size, self.first_ordinals
        )


MetadataColumn: TypeAlias = NDArray[Any] | ConsecutiveSplits | InterleavedSplits


def concatenate_columns(columns: Sequence[MetadataColumn]) -> MetadataColumn:
    """Return the columns joined, as `concatenate_metadata` does, in compact form if possible."""
    joined = columns[0]
    for column in columns[1:]:
        longer = None if isinstance(joined, np.ndarray) else joined.concatenate_with(column)
        if longer is None:
            arrays = [each if isinstance(each, np.ndarray) else each.to_array() for each in columns]
            return concatenate_metadata(arrays)
        joined = longer
    return joined
