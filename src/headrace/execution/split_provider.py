"""Assigned splits of a plan as ranges of positions of its leaves; no iterators, no locks.

    next_splits() -> PositionSplitProvider -> peek, take: ranges of positions -> leaves

A split may be assigned partially: the reader wants only some of its elements, because others have
been delivered. It is read alone by a partition boundary, where the elements of a split are counted.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.execution.element_ids import OrdinalRanges
from headrace.execution.split_progress import SplitProgress
from headrace.rewrites.split_space import SplitSpace

__all__ = [
    "AssignedPositions",
    "FirstEpochSplitProvider",
    "NextSplits",
    "PartialSplit",
    "PartialSplitProvider",
    "Pause",
    "PositionSplitProvider",
    "SplitProvider",
    "WholeSplitProvider",
]


class PartialSplit(NamedTuple):
    """A split with only some elements wanted."""

    split: int
    wanted_ordinals: OrdinalRanges
    """Ordinals of the wanted elements at the partition boundary."""
    may_have_failed: bool = True
    """Whether elements before the first wanted one may have failed.

    If none did, they are skipped without calls where possible.
    """


class Pause(enum.Enum):
    """Returned in place of splits: more come later, and the steps must yield what they hold now."""

    PAUSE = "pause"


NextSplits: TypeAlias = Callable[[], tuple[int, int] | PartialSplit | Pause | None]
"""Returns the next assigned splits (start, stop) or a partial split, possibly after a wait; None at
the end. Partial splits require a plan that is started with `with_element_ids`.
"""


class AssignedPositions(NamedTuple):
    """Positions `start` to `stop` - 1 of a leaf, assigned together."""

    start: int
    stop: int
    positions_per_split: int
    """Positions per split; the last split of a range may have fewer."""
    num_assigned_before: int
    """Number of splits assigned before this range."""

    def num_finished(self, position: int) -> int:
        """Return how many splits are complete, in assignment order, before `position`."""
        num_positions = position - self.start
        return self.num_assigned_before + (
            -(-num_positions // self.positions_per_split)
            if position == self.stop
            else num_positions // self.positions_per_split
        )

    def num_started(self, position: int) -> int:
        """Return how many splits, in assignment order, have positions before `position`."""
        return self.num_assigned_before - (self.start - position) // self.positions_per_split

    def assignments_of(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the split of each of `count` positions, in assignment order."""
        offsets = np.arange(position - self.start, position - self.start + count)
        return self.num_assigned_before + (
            offsets if self.positions_per_split == 1 else offsets // self.positions_per_split
        )


class SplitProvider(Protocol):
    """Provides the assigned splits of a plan as ranges of positions of its leaves."""

    def peek(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the leaf and the epochs of the next range, or None at the end."""

    def take(self, leaf: int, epochs: tuple[int, ...]) -> AssignedPositions | None:
        """Return the next range, or None if it belongs to another leaf or epoch."""

    def mark_started(self, num_splits: int) -> None:
        """Record that a leaf has started the first `num_splits` splits, in assignment order."""

    @property
    def num_assigned(self) -> int:
        """Number of splits in the ranges taken so far."""


class _LocatedPositions(NamedTuple):
    leaf: int
    epochs: tuple[int, ...]
    positions: AssignedPositions
    partial_split: PartialSplit | None


class PositionSplitProvider:
    """Converts splits to ranges of positions.

    Args:
        split_space: Maps the splits of the plan to positions.
        next_splits: Returns the next assigned splits.
        epochs: Epochs of the plan; leaves append those of their repeats.
        progress: Counts the elements of splits at partition boundaries; None without boundaries.
    """

    def __init__(
        self,
        split_space: SplitSpace,
        next_splits: NextSplits,
        epochs: tuple[int, ...],
        progress: SplitProgress | None = None,
    ) -> None:
        self._split_space = split_space
        self._next_splits = next_splits
        self._epochs = epochs
        self._ranges: deque[_LocatedPositions] = deque()
        self._num_located = 0  # splits in all ranges, taken or not
        self._has_ended = False
        self.progress = progress
        self.is_paused: bool = False
        """Whether no splits are returned until `resume`; iterators end instead."""
        self.num_started: int = 0
        """Number of splits, in assignment order, that leaves have started to read."""

    @property
    def num_assigned(self) -> int:
        return self._ranges[0].positions.num_assigned_before if self._ranges else self._num_located

    def peek(self) -> tuple[int, tuple[int, ...]] | None:
        return (self._ranges[0].leaf, self._ranges[0].epochs) if self._fetch_next() else None

    @property
    def is_next_partial(self) -> bool:
        """Whether the next range is a partial split."""
        return self._fetch_next() and self._ranges[0].partial_split is not None

    def _fetch_next(self) -> bool:
        """Fetch the next range if there is none; return False at the end."""
        while not (self._ranges or self._has_ended or self.is_paused):
            splits = self._next_splits()
            if splits is None:
                self._has_ended = True
            elif splits is Pause.PAUSE:
                self.is_paused = True
            elif isinstance(splits, PartialSplit):
                self._locate(splits.split, splits.split + 1, splits)
            else:
                self._locate(*splits, None)
        return bool(self._ranges)

    def take(self, leaf: int, epochs: tuple[int, ...]) -> AssignedPositions | None:
        if self.peek() != (leaf, epochs):
            return None
        return self._ranges.popleft().positions

    def take_partial(
        self, leaves: frozenset[int], epochs: tuple[int, ...]
    ) -> tuple[PartialSplit, PartialSplitProvider] | None:
        """Return the next range if it is a partial split of these leaves and epochs, else None."""
        if not self.is_next_partial:
            return None
        leaf, range_epochs, positions, partial_split = self._ranges[0]
        if leaf not in leaves or range_epochs[: len(epochs)] != epochs:
            return None
        assert partial_split is not None
        self._ranges.popleft()
        return partial_split, PartialSplitProvider(self, leaf, range_epochs, positions)

    def resume(self) -> None:
        """Continue after a pause."""
        self.is_paused = False

    def mark_started(self, num_splits: int) -> None:
        self.num_started = max(self.num_started, num_splits)

    def _locate(self, first: int, stop: int, partial_split: PartialSplit | None) -> None:
        for leaf, epochs, start, end in self._split_space.locate(first, stop):
            ((_, _, split_start, split_stop),) = self._split_space.locate(first, first + 1)
            positions = AssignedPositions(start, end, split_stop - split_start, self._num_located)
            self._ranges.append(
                _LocatedPositions(leaf, (*self._epochs, *epochs), positions, partial_split)
            )
            num_splits = positions.num_finished(end) - positions.num_assigned_before
            if self.progress is not None:
                self.progress.record_assigned(leaf, self._num_located, num_splits, first)
            self._num_located += num_splits
            first += num_splits


class WholeSplitProvider:
    """Provides the splits before the next partial split, which is read separately."""

    def __init__(self, split_provider: PositionSplitProvider) -> None:
        self._split_provider = split_provider

    @property
    def num_assigned(self) -> int:
        return self._split_provider.num_assigned

    def peek(self) -> tuple[int, tuple[int, ...]] | None:
        return None if self._split_provider.is_next_partial else self._split_provider.peek()

    def take(self, leaf: int, epochs: tuple[int, ...]) -> AssignedPositions | None:
        return (
            None
            if self._split_provider.is_next_partial
            else self._split_provider.take(leaf, epochs)
        )

    def mark_started(self, num_splits: int) -> None:
        self._split_provider.mark_started(num_splits)


class PartialSplitProvider:
    """Provides a single split, which is read alone."""

    def __init__(
        self,
        split_provider: PositionSplitProvider,
        leaf: int,
        epochs: tuple[int, ...],
        positions: AssignedPositions,
    ) -> None:
        self._split_provider = split_provider
        self._location = leaf, epochs
        self.positions = positions
        self._is_taken = False

    @property
    def num_assigned(self) -> int:
        return self.positions.num_assigned_before + self._is_taken

    def peek(self) -> tuple[int, tuple[int, ...]] | None:
        return None if self._is_taken else self._location

    def take(self, leaf: int, epochs: tuple[int, ...]) -> AssignedPositions | None:
        if self.peek() != (leaf, epochs):
            return None
        self._is_taken = True
        return self.positions

    def mark_started(self, num_splits: int) -> None:
        self._split_provider.mark_started(num_splits)


class FirstEpochSplitProvider:
    """Provides the splits of some epoch as epoch 0, because a cache has the same data in each."""

    def __init__(self, split_provider: SplitProvider, epochs: tuple[int, ...]) -> None:
        self._split_provider = split_provider
        self._epochs = epochs

    @property
    def num_assigned(self) -> int:
        return self._split_provider.num_assigned

    def peek(self) -> tuple[int, tuple[int, ...]] | None:
        upcoming, depth = self._split_provider.peek(), len(self._epochs)
        if upcoming is None or upcoming[1][:depth] != self._epochs:
            return None
        return upcoming[0], (0,) * depth + upcoming[1][depth:]

    def take(self, leaf: int, epochs: tuple[int, ...]) -> AssignedPositions | None:
        return self._split_provider.take(leaf, self._epochs + epochs[len(self._epochs) :])

    def mark_started(self, num_splits: int) -> None:
        self._split_provider.mark_started(num_splits)
