"""The splits of a plan: one stream, in which each split is a few positions of an index plan.

A leaf is a maximal index plan (`plan.traverse`): all shuffles in it are arithmetic, the same on
every machine. The `repeat` and `concatenate` steps above the leaves define the order of their
positions; other steps are irrelevant here. If a batch of `k` is above a leaf, and all steps between
them preserve the count (map, gather, cache, ...), a split has `k` positions, so that no batch is
divided; otherwise it has one position (`Node.input_split_size`).

The dispatcher needs only the number of splits.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from headrace.plan.combining import Concatenate
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import cardinality, find_leaves, walk

__all__ = ["PositionRange", "SplitSpace", "compute_split_space"]

PositionRange: TypeAlias = tuple[int, tuple[int, ...], int, int]
"""(leaf, epochs, start, stop): positions `start` to `stop` - 1 of leaf number `leaf`, in the epoch
with these numbers, one for each `repeat` above the leaf, outermost first.
"""


@dataclass(frozen=True)
class SplitSpace:
    """The splits of a plan, in the order in which one process would read them."""

    size: int
    """Number of splits, or INFINITE."""
    is_single_split: bool
    """Whether the only split is the whole plan, because its streams cannot be assigned separately.

    Its reader runs the plan as a single process would; other readers get nothing.
    """
    _layout: _Layout

    def locate(self, start: int, stop: int) -> list[PositionRange]:
        """Return the positions of splits `start` to `stop` - 1, in order.

        If the plan is a single split, the result is (leaf, (), 0, its positions in an epoch or
        INFINITE) for each leaf, and means every epoch.

        Raises:
            ValueError: If there are no such splits.
        """
        if not 0 <= start <= stop or (self.size != INFINITE and stop > self.size):
            size = "infinite" if self.size == INFINITE else self.size
            raise ValueError(
                f"splits {start} to {stop} are out of range: the number of splits is {size}"
            )
        found: list[PositionRange] = []
        pending: list[_LayoutRange] = [(self._layout, start, stop, ())]
        while pending:
            layout, first, last, epochs = pending.pop()
            if first < last:
                pending.extend(reversed(layout.locate(first, last, epochs, found)))
        return found


def compute_split_space(plan: Node) -> SplitSpace | None:
    """Return the split space of a plan in canonical form.

    Returns:
        The split space, or None if the plan reads a source that cannot be read in parts.
    """
    steps = list(walk(plan))
    if any(isinstance(step, FromSource) for step in steps):
        return None
    leaves = find_leaves(plan)
    if UNKNOWN in [cardinality(end) for end in leaves]:
        return None  # a shard whose number of shards is not set yet
    leaf_step_ids = {id(step) for end in leaves for step in walk(end)}
    above = [step for step in steps if id(step) not in leaf_step_ids]
    if any(step.needs_single_split for step in above):
        return SplitSpace(1, True, _SingleSplitLayout([cardinality(end) for end in leaves]))
    layout = _build_layout(plan, {id(end): number for number, end in enumerate(leaves)})
    return SplitSpace(layout.size, False, layout)


def _build_layout(plan: Node, numbers: dict[int, int]) -> _Layout:
    """Return the layout of a plan whose leaves have these numbers, by `id`."""
    results: list[list[_Layout]] = []  # in order
    # A node, its positions per split as required by a batch above, and whether its inputs are done.
    pending: list[tuple[Node, int, bool]] = [(plan, 1, False)]
    while pending:
        node, split_size, is_ready = pending.pop()
        if id(node) in numbers:
            results.append([_LeafLayout(numbers[id(node)], cardinality(node), split_size)])
        elif not is_ready:
            input_split_size = node.input_split_size(split_size) or 1
            pending.append((node, split_size, True))
            pending.extend((input_, input_split_size, False) for input_ in reversed(node.inputs))
        elif isinstance(node, Concatenate):
            second = results.pop()
            results[-1].extend(second)
        elif isinstance(node, Repeat):
            results.append([_RepeatedLayout(_concatenate_layouts(results.pop()), node.count)])
    return _concatenate_layouts(results[0])


_LayoutRange: TypeAlias = "tuple[_Layout, int, int, tuple[int, ...]]"
"""A layout, a range of its splits (start, stop), and the epoch numbers around it."""


# Each layout has `size`, its number of splits, and `locate(start, stop, epochs, found)`: a leaf
# appends the positions of its splits `start` to `stop` - 1 to `found`; other layouts return the
# ranges of their members to locate next. Nothing recurses, because plans are deep.


class _LeafLayout:
    """Splits of `positions_per_split` positions each of a leaf; the last split may be smaller."""

    size: int

    def __init__(self, number: int, positions: int, positions_per_split: int) -> None:
        self.size = positions if positions == INFINITE else -(-positions // positions_per_split)
        self._number = number
        self._positions = positions
        self._positions_per_split = positions_per_split

    def locate(
        self, start: int, stop: int, epochs: tuple[int, ...], found: list[PositionRange]
    ) -> list[_LayoutRange]:
        last = stop * self._positions_per_split
        if self._positions != INFINITE:
            last = min(last, self._positions)
        found.append((self._number, epochs, start * self._positions_per_split, last))
        return []


class _ConcatenatedLayout:
    """Layouts one after the other."""

    size: int

    def __init__(self, members: list[_Layout]) -> None:
        infinite = [index for index, member in enumerate(members) if member.size == INFINITE]
        # A layout after an infinite one is never reached.
        self.members = members[: infinite[0] + 1] if infinite else members
        self.size = INFINITE if infinite else sum(member.size for member in members)
        sizes = [member.size for member in self.members[:-1]]
        self._starts = [0, *accumulate(sizes)]

    def locate(
        self, start: int, stop: int, epochs: tuple[int, ...], found: list[PositionRange]
    ) -> list[_LayoutRange]:
        ranges: list[_LayoutRange] = []
        index = bisect_right(self._starts, start) - 1
        while index < len(self.members) and self._starts[index] < stop:
            member, before = self.members[index], self._starts[index]
            last = stop - before
            if member.size != INFINITE:
                last = min(last, member.size)
            ranges.append((member, max(start - before, 0), last, epochs))
            index += 1
        return ranges


class _RepeatedLayout:
    """A repeated layout."""

    size: int

    def __init__(self, member: _Layout, count: int | None) -> None:
        self._member = member
        self.size = INFINITE
        if member.size == 0 or count == 0:
            self.size = 0
        elif member.size != INFINITE and count is not None:
            self.size = member.size * count

    def locate(
        self, start: int, stop: int, epochs: tuple[int, ...], found: list[PositionRange]
    ) -> list[_LayoutRange]:
        size = self._member.size
        if size == INFINITE:  # the first epoch never ends
            return [(self._member, start, stop, (*epochs, 0))]
        return [
            (
                self._member,
                max(start - number * size, 0),
                min(stop - number * size, size),
                (*epochs, number),
            )
            for number in range(start // size, -(-stop // size))
        ]


class _SingleSplitLayout:
    """A single split: all leaves, in every epoch."""

    size = 1

    def __init__(self, positions: list[int]) -> None:
        self._positions = positions

    def locate(
        self, start: int, stop: int, epochs: tuple[int, ...], found: list[PositionRange]
    ) -> list[_LayoutRange]:
        found.extend((leaf, (), 0, size) for leaf, size in enumerate(self._positions))
        return []


_Layout: TypeAlias = _LeafLayout | _ConcatenatedLayout | _RepeatedLayout | _SingleSplitLayout


def _concatenate_layouts(members: list[_Layout]) -> _Layout:
    return members[0] if len(members) == 1 else _ConcatenatedLayout(members)
