"""Columns in brief: a few numbers that say what travels with elements (`element.places`).

    units in a row, one element of each           InRow
    units that take turns, as in an interleave    InTurns

Where chunks are small, to make and join their arrays costs more than to read them; where units take
turns, arithmetic says where the elements of each stand, and nothing has to be sorted. There are no
places in them. Whoever chooses among elements makes the array (`made`), and so does whoever joins
columns of which few numbers do not say all, as where an interleave opened another dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.places import AT_ROOT, BELOW, joined, named, of_units

__all__ = ["Column", "InRow", "InTurns", "Share", "joined_columns"]


class _Brief:
    """A column without places, in a few numbers.

    Attributes:
        size: How many elements.
    """

    __slots__ = ("size",)

    size: int

    def __len__(self) -> int:
        return self.size


class InRow(_Brief):
    """Of units in a row, one element of each.

    Attributes:
        unit: The first.
        ordinal: Which element of each; None: below the root.
    """

    __slots__ = ("ordinal", "unit")

    def __init__(self, unit: int, size: int, ordinal: int | None = None) -> None:
        self.unit = unit
        self.size = size
        self.ordinal = ordinal

    def __getitem__(self, part: slice) -> InRow:
        start, stop, _ = part.indices(self.size)
        return InRow(self.unit + start, max(0, stop - start), self.ordinal)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the array."""
        return BELOW[False] if self.ordinal is None else AT_ROOT[False]

    def made(self) -> NDArray[Any]:
        """Return the array."""
        units = np.arange(self.unit, self.unit + self.size)
        if self.ordinal is None:
            return of_units(units, None)
        return named(units, np.full(self.size, self.ordinal))

    def newest(self) -> int:
        """Return the greatest unit that there is an element of."""
        return self.unit + self.size - 1

    def with_next(self, after: Column) -> InRow | None:
        """Return this column and the one after it as one; None: few numbers do not say both."""
        if not isinstance(after, InRow) or after.unit != self.unit + self.size:
            return None
        if after.ordinal != self.ordinal:
            return None
        return InRow(self.unit, self.size + after.size, self.ordinal)


class Share(NamedTuple):
    """What of a column in turns is of one unit."""

    number: int
    """The unit's, in the cycle."""
    before: int
    """Elements of it that came since the cycle began."""
    size: int


class _Turns(NamedTuple):
    """Turns, the first and the last perhaps in part."""

    numbers: NDArray[np.int64]
    """Whose they are, by its number in the cycle."""
    begins: NDArray[np.int64]
    """How many elements of it came before, since the cycle began."""
    sizes: NDArray[np.int64]


class InTurns(_Brief):
    """Of units that take turns, each with as many elements.

    Attributes:
        units: In the order of their turns, over and over; no two alike.
        each: Elements in a turn.
        start: Elements, of all units, that came before these since the cycle began.
        ordinals: Of each unit, that of its first element since then; None: below the root.
    """

    __slots__ = ("each", "ordinals", "start", "units")

    def __init__(
        self,
        units: tuple[int, ...],
        each: int,
        start: int,
        size: int,
        ordinals: tuple[int, ...] | None = None,
    ) -> None:
        self.units = units
        self.each = each
        self.start = start
        self.size = size
        self.ordinals = ordinals

    def __getitem__(self, part: slice) -> InTurns:
        start, stop, _ = part.indices(self.size)
        size = max(0, stop - start)
        if size == self.size:
            return self
        return InTurns(self.units, self.each, self.start + start, size, self.ordinals)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the array."""
        return BELOW[False] if self.ordinals is None else AT_ROOT[False]

    def shares(self) -> Iterator[Share]:
        """Yield what there is of each unit, in the order of their first turns here."""
        each, cycle = self.each, len(self.units)
        a_round = each * cycle
        begun, passed = divmod(self.start, a_round)
        ended, left = divmod(self.start + self.size, a_round)
        first = passed // each
        for turn in range(first, first + min(self.turns, cycle)):
            number = turn % cycle
            at = number * each
            # Whole rounds, and what a round that is not whole has of it.
            before = begun * each + min(max(passed - at, 0), each)
            after = ended * each + min(max(left - at, 0), each)
            yield Share(number, before, after - before)

    @property
    def turns(self) -> int:
        """How many turns there are here; the first and the last may be in part."""
        if not self.size:
            return 0
        return (self.start + self.size - 1) // self.each - self.start // self.each + 1

    def places_of(self, share: Share) -> NDArray[np.int32]:
        """Return where the elements of a unit stand here, in order."""
        each, a_round = self.each, self.each * len(self.units)
        first = self.start // a_round * a_round + share.number * each
        if first + each <= self.start:
            first += a_round
        first -= self.start
        if each > self.size:  # the whole of a turn may be more than fits
            begins = range(first, self.size, a_round)
            turns = [range(max(begin, 0), min(begin + each, self.size)) for begin in begins]
            return np.concatenate([np.array(turn, np.int32) for turn in turns])
        places = np.arange(first, self.size, a_round, dtype=np.int32)
        if each > 1:
            places = np.add.outer(places, np.arange(each, dtype=np.int32)).reshape(-1)
        passed = max(0, -first)
        return places[passed : passed + share.size]

    def made(self) -> NDArray[Any]:
        """Return the array."""
        numbers, begins, sizes = self._turns()
        units = np.array(self.units, np.int64)[numbers]
        if self.ordinals is None:
            return of_units(units.repeat(sizes), None)
        begins += np.array(self.ordinals, np.int64)[numbers]
        passed = sizes.cumsum() - sizes
        ordinals = np.arange(self.size) + (begins - passed).repeat(sizes)
        return named(units.repeat(sizes), ordinals)

    def _turns(self) -> _Turns:
        cycle = len(self.units)
        first, turns = self.start // self.each, self.turns
        rounds, numbers = np.divmod(np.arange(first, first + turns), cycle)
        begins = rounds * self.each
        sizes = np.full(turns, self.each)
        if turns:
            passed = self.start % self.each
            begins[0] += passed
            sizes[0] -= passed
            sizes[-1] -= (first + turns) * self.each - self.start - self.size
        return _Turns(numbers, begins, sizes)

    def newest(self) -> int:
        """Return the greatest unit that there is an element of."""
        cycle, first = len(self.units), self.start // self.each
        turns = self.turns
        if turns == 1:
            return self.units[first % cycle]
        if turns >= cycle:
            return max(self.units)
        return max([self.units[turn % cycle] for turn in range(first, first + turns)])

    def with_next(self, after: Column) -> InTurns | None:
        """Return this column and the one after it as one; None: few numbers do not say both."""
        if not isinstance(after, InTurns) or after.each != self.each or after.units != self.units:
            return None
        gap = self.start + self.size - after.start
        if gap % (self.each * len(self.units)) or after.ordinals != self.ordinals:
            return None
        if gap and self.ordinals is not None:
            return None  # the same ordinals, in another round
        return InTurns(self.units, self.each, self.start, self.size + after.size, self.ordinals)


Column: TypeAlias = NDArray[Any] | InRow | InTurns


def joined_columns(columns: Sequence[Column]) -> Column:
    """Return columns one after the other, as `places.joined`; in brief, if that says them all."""
    whole = columns[0]
    for after in columns[1:]:
        both = None if isinstance(whole, np.ndarray) else whole.with_next(after)
        if both is None:
            arrays = [each if isinstance(each, np.ndarray) else each.made() for each in columns]
            return joined(arrays)
        whole = both
    return whole
