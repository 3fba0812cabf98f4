"""What can be dealt out of a plan: one stream of units, each a few positions of an index part.

A leaf is a largest index part (`plan.traverse`): all shuffles in it are arithmetic, the same on
every machine. The `repeat` and `concatenate` steps over the leaves say in which order their
positions come; other steps do not matter here. Where a batch of `k` stands over a leaf with only
steps between that keep the count (map, gather, cache, ...), a unit is `k` positions, so that no
batch is cut; else it is one (`Node.unit_below`).

Whoever deals out units needs to know their number and nothing else of the plan.
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
from headrace.plan.traverse import cardinality, leaves, walk

__all__ = ["Deal", "Part", "deal_of"]

Part: TypeAlias = tuple[int, tuple[int, ...], int, int]
"""(leaf, passes, start, stop): positions `start` to `stop` - 1 of leaf number `leaf`, in the pass
with the numbers `passes`, one for each `repeat` between the plan's end and the leaf, the outermost
first."""


@dataclass(frozen=True)
class Deal:
    """The units of a plan, in the order in which one process would read them."""

    size: int
    """Number of units, or INFINITE."""
    whole: bool
    """Whether there is one unit that is the whole plan, for its streams cannot be dealt by
    themselves. Whoever gets it runs the plan as one process would; everyone else has nothing."""
    _layout: _Layout

    def locate(self, start: int, stop: int) -> list[Part]:
        """Return what units `start` to `stop` - 1 are, in order.

        Where the plan is one unit, its part is (leaf, (), 0, its positions in a pass or INFINITE)
        for each leaf, and means every pass.

        Raises:
            ValueError: There are no such units.
        """
        if not 0 <= start <= stop or (self.size != INFINITE and stop > self.size):
            size = "without end" if self.size == INFINITE else self.size
            raise ValueError(
                f"cannot locate units {start} to {stop}: the number of units is {size}"
            )
        found: list[Part] = []
        pending: list[_Run] = [(self._layout, start, stop, ())]
        while pending:
            layout, first, last, passes = pending.pop()
            if first < last:
                pending.extend(reversed(layout.split(first, last, passes, found)))
        return found


def deal_of(plan: Node) -> Deal | None:
    """Return how the units of a plan in its normal form are dealt.

    None: it cannot be dealt, for it reads a source that cannot be read in parts.
    """
    steps = list(walk(plan))
    if any(isinstance(step, FromSource) for step in steps):
        return None
    ends = leaves(plan)
    if UNKNOWN in [cardinality(end) for end in ends]:
        return None  # a shard of which nobody has said how many there are
    inside = {id(step) for end in ends for step in walk(end)}
    above = [step for step in steps if id(step) not in inside]
    if any(step.dealt_whole for step in above):
        return Deal(1, True, _Everything([cardinality(end) for end in ends]))
    layout = _arrange(plan, {id(end): number for number, end in enumerate(ends)})
    return Deal(layout.size, False, layout)


def _arrange(plan: Node, numbers: dict[int, int]) -> _Layout:
    """Return the layout of a plan whose leaves have these numbers, by `id`."""
    results: list[list[_Layout]] = []  # in turn
    # A node, how many positions of a leaf a batch over it takes, and whether its inputs are done.
    pending: list[tuple[Node, int, bool]] = [(plan, 1, False)]
    while pending:
        node, unit, is_ready = pending.pop()
        if id(node) in numbers:
            results.append([_Leaf(numbers[id(node)], cardinality(node), unit)])
        elif not is_ready:
            below = node.unit_below(unit) or 1
            pending.append((node, unit, True))
            pending.extend((input_, below, False) for input_ in reversed(node.inputs))
        elif isinstance(node, Concatenate):
            second = results.pop()
            results[-1].extend(second)
        elif isinstance(node, Repeat):
            results.append([_Repeated(_in_turn(results.pop()), node.count)])
    return _in_turn(results[0])


_Run: TypeAlias = "tuple[_Layout, int, int, tuple[int, ...]]"
"""A layout, units of it (start, stop), and the numbers of the passes that they lie in."""


class _Leaf:
    """Units of `unit` positions each of a leaf; the last unit may be smaller."""

    size: int

    def __init__(self, number: int, positions: int, unit: int) -> None:
        self.size = positions if positions == INFINITE else -(-positions // unit)
        self._number = number
        self._positions = positions
        self._unit = unit

    def split(
        self, start: int, stop: int, passes: tuple[int, ...], found: list[Part]
    ) -> list[_Run]:
        last = stop * self._unit
        if self._positions != INFINITE:
            last = min(last, self._positions)
        found.append((self._number, passes, start * self._unit, last))
        return []


class _InTurn:
    """Layouts one after the other."""

    size: int

    def __init__(self, members: list[_Layout]) -> None:
        ends = [index for index, member in enumerate(members) if member.size == INFINITE]
        # What comes after something without end never comes.
        self.members = members[: ends[0] + 1] if ends else members
        self.size = INFINITE if ends else sum(member.size for member in members)
        sizes = [member.size for member in self.members[:-1]]
        self._starts = [0, *accumulate(sizes)]

    def split(
        self, start: int, stop: int, passes: tuple[int, ...], found: list[Part]
    ) -> list[_Run]:
        runs: list[_Run] = []
        place = bisect_right(self._starts, start) - 1
        while place < len(self.members) and self._starts[place] < stop:
            member, before = self.members[place], self._starts[place]
            last = stop - before
            if member.size != INFINITE:
                last = min(last, member.size)
            runs.append((member, max(start - before, 0), last, passes))
            place += 1
        return runs


class _Repeated:
    """A layout, over and over."""

    size: int

    def __init__(self, member: _Layout, count: int | None) -> None:
        self._member = member
        self.size = INFINITE
        if member.size == 0 or count == 0:
            self.size = 0
        elif member.size != INFINITE and count is not None:
            self.size = member.size * count

    def split(
        self, start: int, stop: int, passes: tuple[int, ...], found: list[Part]
    ) -> list[_Run]:
        size = self._member.size
        if size == INFINITE:  # the first pass never ends
            return [(self._member, start, stop, (*passes, 0))]
        return [
            (
                self._member,
                max(start - number * size, 0),
                min(stop - number * size, size),
                (*passes, number),
            )
            for number in range(start // size, -(-stop // size))
        ]


class _Everything:
    """One unit: all leaves, in every pass."""

    size = 1

    def __init__(self, positions: list[int]) -> None:
        self._positions = positions

    def split(
        self, start: int, stop: int, passes: tuple[int, ...], found: list[Part]
    ) -> list[_Run]:
        found.extend((leaf, (), 0, size) for leaf, size in enumerate(self._positions))
        return []


_Layout: TypeAlias = _Leaf | _InTurn | _Repeated | _Everything


def _in_turn(members: list[_Layout]) -> _Layout:
    return members[0] if len(members) == 1 else _InTurn(members)
