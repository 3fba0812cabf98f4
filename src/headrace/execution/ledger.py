"""The ledger: which unit and ordinal the elements at the roots are of, and which units have ended.

    roots -> Ledger -> columns of units and ordinals; units that ended, how many elements each had

Ended units are plain integers, ready for the wire.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.brief import (
    Column,
    InRow,
    InTurns,
    joined_columns,
)
from headrace.element.chunk import PlacesLater
from headrace.element.places import named, numbers_in
from headrace.execution.origins import by_number, sizes_of, starts_of

__all__ = ["Ended", "Ledger"]

_FEWEST = 64
_MOST_DUE = 256
_MOST_UNCOUNTED = 1 << 16


class Ended(NamedTuple):
    """Units in a row that have ended, each with as many elements at the root."""

    unit: int
    units: int
    elements: int


class _Span:
    """Units that were dealt together and have not all ended."""

    __slots__ = ("dealt", "leaf", "stop", "unit")

    def __init__(self, leaf: int, dealt: int, stop: int, unit: int) -> None:
        self.leaf = leaf
        self.dealt = dealt  # the first of them, as they were dealt
        self.stop = stop
        self.unit = unit  # that one's number in the stream


class _Named:
    """The column of a chunk from the root on, once its elements are counted."""

    __slots__ = ("_ledger", "column", "is_counted")

    def __init__(self, ledger: Ledger, below: Column) -> None:
        self._ledger = ledger
        self.column = below
        self.is_counted = False

    def __call__(self) -> Column:
        """Return it."""
        if not self.is_counted:
            self._ledger.catch_up()
        return self.column


class Ledger:
    """Counts what units gave at the roots. Units are named by the order in which they were dealt.

    Chunks may be small, and each call of NumPy costs as much as to count a thousand elements: so
    those that come are counted together, when somebody asks for what follows from it.

    Roots may run on threads of the plan, and whoever takes what has ended on another. What is held
    grows with the units that are open at a time, however many were dealt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: In the order in which they were dealt.
        self._spans: list[_Span] = []
        self._stop = 0  # units that were dealt
        self._first = 0  # unit that `_counts` begins with
        #: Elements of units so far; of those after the last one, none.
        self._counts = np.zeros(_FEWEST, np.int64)
        #: While units give one element each, one after the other: the one before which all from
        #: `_first` on had theirs, and nothing is counted. None: they are counted.
        self._reach: int | None = 0
        self._ended: list[Ended] = []
        #: Of leaves: the unit before which all of theirs have ended. Worked out when it matters.
        self._due: dict[frozenset[int], int] = {}
        self._looked_at = 0  # the last of those when that was done
        #: What came and is not counted, in order and of one dtype; and how many elements.
        self._uncounted: list[_Named] = []
        self._number_uncounted = 0

    def deal(self, leaf: int, dealt: int, count: int, unit: int) -> None:
        """Take note that units were dealt: `unit` and following, the first as number `dealt`."""
        with self._lock:
            self._spans.append(_Span(leaf, dealt, dealt + count, unit))
            self._stop = dealt + count

    def name(self, column: Column) -> Column | PlacesLater:
        """Count elements, in order; return their column from the root on, or what makes it.

        Args:
            column: Below the root: units as they were dealt.
        """
        made = _Named(self, column)
        with self._lock:
            if isinstance(column, InRow) and not self._uncounted:
                firsts = self._take_firsts(column)
                if firsts is not None:
                    return firsts
            if self._uncounted and self._uncounted[0].column.dtype != column.dtype:
                self._catch_up()
            self._uncounted.append(made)
            self._number_uncounted += len(column)
            if self._number_uncounted >= _MOST_UNCOUNTED:
                self._catch_up()
        return made

    def catch_up(self) -> None:
        """Count all that came."""
        with self._lock:
            self._catch_up()

    def _catch_up(self) -> None:
        came, self._uncounted, self._number_uncounted = self._uncounted, [], 0
        if not came:
            return
        column, start = self._named(joined_columns([each.column for each in came])), 0
        for each in came:
            stop = start + len(each.column)
            each.column, each.is_counted = column[start:stop], True
            start = stop

    def _named(self, below: Column) -> Column:
        """Count elements, in order; return their column from the root on."""
        if isinstance(below, InTurns):
            return self._in_turns(below)
        if isinstance(below, InRow):
            in_row = self._in_row(below)
            if in_row is not None:
                return in_row
            below = below.made()
        units, ordinals = self._count(below["unit"])
        return named(units, ordinals, numbers_in(below))

    def _in_row(self, row: InRow) -> Column | None:
        """Count one element of each unit in a row; None: they are not in one from the root on."""
        firsts = self._take_firsts(row)
        if firsts is not None:
            return firsts
        start, stop = row.unit, row.unit + row.size
        for span in self._spans:
            if span.dealt <= start and stop <= span.stop:
                break
        else:
            return None
        self._have_counts(stop)
        counts = self._counts[start - self._first : stop - self._first]
        ordinal = int(counts[0])
        if (counts != ordinal).any():
            return None
        counts += 1
        return InRow(start - span.dealt + span.unit, row.size, ordinal)

    def _take_firsts(self, row: InRow) -> Column | None:
        """Return the first elements of units in a row, if no unit gave more so far; else None."""
        start, stop = row.unit, row.unit + row.size
        if start != self._reach:
            return None
        self._reach = stop
        found: list[Column] = []
        for span in self._spans:
            low, high = max(start, span.dealt), min(stop, span.stop)
            if low < high:
                found.append(InRow(low - span.dealt + span.unit, high - low, 0))
        return found[0] if len(found) == 1 else joined_columns(found)

    def _in_turns(self, turns: InTurns) -> InTurns:
        """Count elements of units that take turns."""
        self._have_counts(turns.newest() + 1)
        units, ordinals = [-1] * len(turns.units), [0] * len(turns.units)
        for number, before, size in turns.shares():
            dealt = turns.units[number]
            units[number] = self._unit_of(dealt)
            ordinals[number] = int(self._counts[dealt - self._first]) - before
            self._counts[dealt - self._first] += size
        return InTurns(tuple(units), turns.each, turns.start, turns.size, tuple(ordinals))

    def _count(self, dealt: NDArray[np.int64]) -> tuple[NDArray[np.int64] | int, NDArray[np.int64]]:
        """Count elements of units, in order; return their units in the stream and ordinals."""
        size = len(dealt)
        if size == 1:  # a batch, mostly
            return self._one(int(dealt[0]))
        steps, lowest, highest = dealt[1:] - dealt[:-1], int(dealt[0]), int(dealt[-1])
        if highest - lowest == size - 1 and (steps == 1).all():  # one of each
            return self._one_of_each(lowest, highest + 1, dealt)
        highest = int(np.maximum.reduce(dealt))
        self._have_counts(highest + 1)
        if highest == lowest and not steps.any():  # of one unit
            unit = highest
            start = int(self._counts[unit - self._first])
            self._counts[unit - self._first] += size
            return self._unit_of(unit), np.arange(start, start + size)
        return self._units_of(dealt), self._ordinals_of(dealt - self._first, steps)

    def _one(self, unit: int) -> tuple[int, NDArray[np.int64]]:
        """Count an element of a unit."""
        self._have_counts(unit + 1)
        at = unit - self._first
        ordinals = self._counts[at : at + 1].copy()
        self._counts[at] += 1
        return self._unit_of(unit), ordinals

    def _one_of_each(
        self, start: int, stop: int, dealt: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64] | int, NDArray[np.int64]]:
        """Count one element of each of these units."""
        self._have_counts(stop)
        counts = self._counts[start - self._first : stop - self._first]
        ordinals = counts.copy()
        counts += 1
        for span in self._spans:
            if span.dealt <= start and stop <= span.stop:
                return dealt + np.int64(span.unit - span.dealt), ordinals
        return self._units_of(dealt), ordinals

    def _have_counts(self, stop: int) -> None:
        """Have the counts of units before this one."""
        if self._reach is not None:
            ones, self._reach = self._reach, None
            self._have_counts(ones)
            self._counts[: ones - self._first] = 1
        needed = stop - self._first
        if needed > len(self._counts):
            grown = np.zeros(2 * needed, np.int64)
            grown[: len(self._counts)] = self._counts
            self._counts = grown

    def _unit_of(self, dealt: int) -> int:
        for span in self._spans:
            if span.dealt <= dealt < span.stop:
                return span.unit + dealt - span.dealt
        raise AssertionError(f"unit {dealt} has ended, and gives elements")

    def counted(self, dealt: int) -> int:
        """Return how many elements a unit had so far."""
        with self._lock:
            self._catch_up()
            self._have_counts(dealt + 1)
            return int(self._counts[dealt - self._first])

    def stands_at(self, dealt: int) -> tuple[int, int] | None:
        """Return the number of a unit in the stream, and how many elements it had so far.

        None: it has ended.
        """
        counted = self.counted(dealt)
        with self._lock:
            for span in self._spans:
                if span.dealt <= dealt < span.stop:
                    return span.unit + dealt - span.dealt, counted
        return None

    def pass_over(self, dealt: int, count: int) -> None:
        """Count elements of a unit that were passed over."""
        with self._lock:
            self._catch_up()
            self._have_counts(dealt + 1)
            self._counts[dealt - self._first] += count

    def _units_of(self, dealt: NDArray[np.int64]) -> NDArray[np.int64]:
        low, high = int(np.minimum.reduce(dealt)), int(np.maximum.reduce(dealt))
        for span in self._spans:
            if span.dealt <= low and high < span.stop:
                return dealt + np.int64(span.unit - span.dealt)
        starts = np.array([span.dealt for span in self._spans])
        shifts = np.array([span.unit - span.dealt for span in self._spans])
        unit_less_dealt: NDArray[np.int64] = shifts[np.searchsorted(starts, dealt, "right") - 1]
        return dealt + unit_less_dealt

    def _ordinals_of(self, units: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
        size = len(units)
        if int(np.minimum.reduce(steps)) < 0:
            return self._ordinals_of_mixed(units)
        starts = starts_of(steps != 0)
        own = units[starts]
        sizes = sizes_of(starts, size)
        ordinals = np.arange(size) + np.repeat(self._counts[own] - starts, sizes)
        self._counts[own] += sizes
        return ordinals

    def _ordinals_of_mixed(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        order, size, least = by_number(units), len(units), int(np.minimum.reduce(units))
        sizes = np.bincount(units - least)  # no more of them than there are counts
        counts = self._counts[least : least + len(sizes)]
        ordinals = np.empty(size, np.int64)
        ordinals[order] = np.arange(size) + np.repeat(counts - (sizes.cumsum() - sizes), sizes)
        counts += sizes
        return ordinals

    def end(self, leaves: frozenset[int], dealt: int) -> None:
        """Take note that of these leaves' units all before number `dealt` have ended."""
        with self._lock:
            self._due[leaves] = max(dealt, self._due.get(leaves, 0))
            if dealt - self._looked_at >= _MOST_DUE:
                self._looked_at = dealt
                self._work_out()

    def _work_out(self) -> None:
        """Work out what the units had that have ended."""
        self._catch_up()
        due, self._due = self._due, {}
        for leaves, dealt in due.items():
            for span in self._spans:
                if span.dealt >= dealt:
                    break
                if span.leaf in leaves:
                    self._end_of(span, min(dealt, span.stop))
        self._drop_ended()

    def leave(self, dealt: int) -> None:
        """Take note that no more of a unit is read, though it may have more."""
        with self._lock:
            self._catch_up()
            for span in self._spans:
                if span.dealt == dealt:
                    span.dealt = dealt + 1
            self._drop_ended()

    def _end_of(self, span: _Span, stop: int) -> None:
        if self._reach is not None:
            spoke = max(0, min(stop, self._reach) - span.dealt)
            if spoke:
                self._ended.append(Ended(span.unit, spoke, 1))
        else:
            counts = self._counts[span.dealt - self._first : stop - self._first]
            self._ended += _runs_of_ended(span.unit, counts)
            spoke = len(counts)
        silent = stop - span.dealt - spoke
        if silent:
            self._ended.append(Ended(span.unit + spoke, silent, 0))
        span.unit += stop - span.dealt
        span.dealt = stop

    def _drop_ended(self) -> None:
        self._spans = [span for span in self._spans if span.dealt < span.stop]
        first = self._spans[0].dealt if self._spans else self._stop
        if self._reach is not None:
            self._first, self._reach = first, max(first, self._reach)
            return
        passed, held = first - self._first, len(self._counts)
        if passed <= held // 2:
            return
        kept = self._counts[passed:]
        if not kept.any():
            self._reach, kept = first, kept[:0]
        self._counts = np.zeros(max(_FEWEST, 2 * len(kept)), np.int64)
        self._counts[: len(kept)] = kept
        self._first = first

    def take_ended(self) -> tuple[Ended, ...]:
        """Return the units that have ended since this was called last; units in a row together."""
        with self._lock:
            if self._due:
                self._work_out()
            ended, self._ended = self._ended, []
        return tuple(_in_a_row(ended))


def _runs_of_ended(unit: int, counts: NDArray[np.int64]) -> list[Ended]:
    """Return units from `unit` on that have ended with so many elements each."""
    if not len(counts):
        return []
    elements = int(counts[0])
    if len(counts) == 1 or (counts == elements).all():
        return [Ended(unit, len(counts), elements)]
    starts = starts_of(counts[1:] != counts[:-1])
    sizes = sizes_of(starts, len(counts))
    runs = zip(starts.tolist(), sizes.tolist(), counts[starts].tolist(), strict=True)
    return [Ended(unit + start, size, elements) for start, size, elements in runs]


def _in_a_row(ended: Iterable[Ended]) -> Sequence[Ended]:
    joined: list[Ended] = []
    for one in ended:
        last = joined[-1] if joined else None
        if last and last.unit + last.units == one.unit and last.elements == one.elements:
            joined[-1] = last._replace(units=last.units + one.units)
        else:
            joined.append(one)
    return joined
