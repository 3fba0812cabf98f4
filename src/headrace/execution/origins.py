"""Origins of elements, and of errors: which units they are of, and where they stand in those.

    chunk of a plan with roots -> origins_of -> runs of (units, ordinals)

An ordinal counts the elements that a unit gives at the root (`rewrites.roots`). One that fails
counts as none; who counts is the `ledger`. Runs are plain integers, ready for the wire.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.brief import InRow, InTurns
from headrace.element.chunk import Chunk
from headrace.element.places import has_origins, rows_of
from headrace.execution.places import Places

__all__ = [
    "ErrorOrigin",
    "Failed",
    "Ranges",
    "Run",
    "blame_element",
    "by_number",
    "by_unit",
    "fails_below",
    "give_origin",
    "is_within",
    "one_run_of",
    "order_in_turns",
    "order_of",
    "origin_of_error",
    "origins_of",
    "runs_in_turns",
    "runs_of",
    "sizes_of",
    "sorted_runs",
    "starts_of",
]

Ranges: TypeAlias = tuple[tuple[int, int | None], ...]
"""Ordinals: (first, one after the last) each, in order; the last may be without end (None)."""


class Run(NamedTuple):
    """Elements `first` to `first + size - 1` of a unit; then those of the next unit, and so on."""

    unit: int
    units: int
    """How many units in a row, each with these elements."""
    first: int
    size: int


def origins_of(chunk: Chunk, *, is_sorted: bool = False) -> tuple[Run, ...]:
    """Return the origins of a chunk's elements in order, as runs.

    Elements that were made from several, batches, have the origins of all of those.

    Args:
        chunk: Of a plan that was started with `origins`.
        is_sorted: Whether they are to be sorted: of units that are mixed there are fewer runs then.

    Raises:
        ValueError: It has none.
    """
    places = chunk.places
    if places is None or not has_origins(places):
        raise ValueError(_NO_ORIGINS)
    units, ordinals = rows_of(places)
    if is_sorted and len(units):
        order = order_of(units, ordinals)
        units, ordinals = units[order], ordinals[order]
    return runs_of(units, ordinals)


def order_of(units: NDArray[np.int64], ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order that sorts units and ordinals, of which there are some."""
    order = by_number(units)
    units, ordinals = units[order], ordinals[order]
    if not ((units[1:] == units[:-1]) & (ordinals[1:] < ordinals[:-1])).any():
        return order  # those of each unit ascend, however units are mixed
    unit, each = int(units[0]), int(np.maximum.reduce(ordinals)) + 1
    if (int(units[-1]) - unit + 1) * each >= 1 << 62:
        return order[np.lexsort((ordinals, units))]
    # One number sorts faster than two.
    return order[((units - unit) * each + ordinals).argsort()]


def runs_in_turns(turns: InTurns) -> tuple[bool, tuple[Run, ...]]:
    """Return whether elements are mixed, and their runs: unit by unit then, else in their order.

    Args:
        turns: From the root on.
    """
    ordinals = turns.ordinals
    assert ordinals is not None, "the elements are below the root"
    found = [
        (turns.units[number], ordinals[number] + before, size)
        for number, before, size in turns.shares()
    ]
    in_order = len(found) < 2 or turns.turns == len(found)
    ascending = sorted(found, key=operator.itemgetter(0))
    return not in_order or ascending != found, _of_each(ascending)


def order_in_turns(turns: InTurns) -> NDArray[np.int32]:
    """Return the order that sorts elements by their units, as of `runs_in_turns`."""
    shares = sorted(turns.shares(), key=lambda share: turns.units[share.number])
    return np.concatenate([turns.places_of(share) for share in shares])


def _of_each(found: list[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Return (unit, ordinal, size) of units that ascend as runs."""
    runs: list[Run] = []
    for unit, ordinal, size in found:
        last = runs[-1] if runs else None
        if last is not None and (last[0] + last[1], *last[2:]) == (unit, ordinal, size):
            runs[-1] = Run(last[0], last[1] + 1, ordinal, size)
        else:
            runs.append(Run(unit, 1, ordinal, size))
    return tuple(runs)


def by_unit(chunk: Chunk) -> Chunk:
    """Return a chunk's elements unit by unit, those of each in order. They have no states then.

    Whoever takes the units apart has them as runs, however they were mixed.

    Args:
        chunk: Of a plan that was started with `origins`, with no batches of several elements.
    """
    column = chunk.column
    if isinstance(column, InRow):
        return chunk
    if isinstance(column, InTurns):
        is_mixed, _ = runs_in_turns(column)
        return chunk.take(order_in_turns(column)) if is_mixed else chunk
    places = chunk.places
    if places is None or not has_origins(places):
        raise ValueError(_NO_ORIGINS)
    units = places["unit"]
    if len(units) < 2 or (units[1:] >= units[:-1]).all():
        return chunk
    return chunk.take(by_number(units))


def one_run_of(units: NDArray[np.int64], ordinals: NDArray[np.int64]) -> Run | None:
    """Return units and ordinals as a run, where they are one."""
    size = len(units)
    if not size:
        return None
    unit, first = int(units[0]), int(ordinals[0])
    if size == 1:  # large elements come one by one
        return Run(unit, 1, first, 1)
    units_apart, ordinals_apart = int(units[-1]) - unit, int(ordinals[-1]) - first
    # Both ends say which of the two it can be; most often it is.
    if units_apart == size - 1 and not ordinals_apart:
        is_run = (units[1:] - units[:-1] == 1).all() and (ordinals == first).all()
        return Run(unit, size, first, 1) if is_run else None
    if not units_apart and ordinals_apart == size - 1:
        is_run = (units == unit).all() and (ordinals[1:] - ordinals[:-1] == 1).all()
        return Run(unit, 1, first, size) if is_run else None
    return None


def runs_of(units: NDArray[np.int64], ordinals: NDArray[np.int64]) -> tuple[Run, ...]:
    """Return units and ordinals as runs."""
    size = len(units)
    if not size:
        return ()
    run = one_run_of(units, ordinals)
    if run is not None:
        return (run,)
    steps = units[1:] - units[:-1]
    follows = (steps == 0) & (ordinals[1:] == ordinals[:-1] + 1)
    starts = starts_of(~follows)
    units, first = units[starts], ordinals[starts]
    sizes = sizes_of(starts, size)
    return _in_rows(units, first, sizes)


def sorted_runs(
    units: NDArray[np.int64], ordinals: NDArray[np.int64]
) -> tuple[NDArray[np.int64], tuple[Run, ...]]:
    """Return the order that sorts units and ordinals, of which there are some, and their runs."""
    least = int(np.minimum.reduce(units))
    since = units - least
    if int(np.maximum.reduce(since)) < max(_FEW_UNITS, 4 * len(units)):
        order = by_number(units)
        sorted_, sizes = ordinals[order], np.bincount(since)
        (held,) = sizes.nonzero()
        sizes = sizes[held]
        stops = sizes.cumsum()
        follows = sorted_[1:] - sorted_[:-1] == 1
        to_others = np.count_nonzero(follows[stops[:-1] - 1])
        # Within each unit one follows the other, as wherever no step left any out.
        if np.count_nonzero(follows) - to_others == len(units) - len(held):
            return order, _in_rows(held + least, sorted_[stops - sizes], sizes)
    order = order_of(units, ordinals)
    return order, runs_of(units[order], ordinals[order])


def _in_rows(
    units: NDArray[np.int64], first: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Run, ...]:
    """Return runs of one unit each as few: units in a row that have the same ordinals are one."""
    same = (units[1:] == units[:-1] + 1) & (first[1:] == first[:-1]) & (sizes[1:] == sizes[:-1])
    heads = starts_of(~same)
    many = sizes_of(heads, len(units))
    columns = (units[heads], many, first[heads], sizes[heads])
    return tuple(map(Run._make, zip(*[column.tolist() for column in columns], strict=True)))


def is_within(ordinals: NDArray[np.int64], wanted: Ranges) -> NDArray[np.bool_]:
    """Return which of the ordinals lie in one of the ranges."""
    found = np.zeros(len(ordinals), np.bool_)
    for first, stop in wanted:
        part = ordinals >= first
        found |= part if stop is None else part & (ordinals < stop)
    return found


_FEW_UNITS = 1024
_NO_ORIGINS = "these elements have no origins: start the plan with `origins=True`"


def starts_of(is_new: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where runs begin, given which elements but the first are unlike the one before."""
    (later,) = is_new.nonzero()
    starts = np.zeros(len(later) + 1, np.int64)
    np.add(later, 1, out=starts[1:])
    return starts


def sizes_of(starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return how long runs are that begin there, of which there are some, `size` in all."""
    sizes = np.empty(len(starts), np.int64)
    np.subtract(starts[1:], starts[:-1], out=sizes[:-1])
    sizes[-1] = size - int(starts[-1])
    return sizes


def by_number(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order that sorts units; those of one stay in theirs."""
    least, greatest = int(np.minimum.reduce(units)), int(np.maximum.reduce(units))
    if greatest - least < 1 << 16:  # two bytes are sorted in one go over them
        return (units - least).astype(np.uint16).argsort(kind="stable")
    return units.argsort(kind="stable")


# --- Origins of errors: where one stands among the elements of its unit ---------------------------
#
# An error that is raised at the root or below is counted there (`root`), as an element is. At a
# step above the root an element fails that has an origin. An error carries its own to whoever
# reads.
#
# Rule. Whoever reads a unit, from the start or from an element on, finds the same origins.


class ErrorOrigin(NamedTuple):
    """Where an error stands. Sorted, those of a unit are in order."""

    unit: int
    """Of the stream of the plan."""
    ordinal: int
    """Of the element before which it stands, at the root."""
    number: int
    """1, 2, ... among those that stand there; 0: the element before that one has failed itself;
    -1: so it has, below steps of the client's half that choose (`plan.units`)."""
    is_last: bool = False
    """Whether it is known that nothing of the unit comes after it."""

    @property
    def element(self) -> int:
        """The ordinal of the element that is to be read for the error to be met."""
        return self.ordinal if self.number > 0 else self.ordinal - 1

    @property
    def stands_for_all(self) -> bool:
        """Whether the unit has nothing else: what it was to be made of failed."""
        return self.is_last and self.ordinal == 0


class Failed:
    """Stands in the place of an element that has failed, until its turn has come.

    Args:
        error: To be raised then.
    """

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


_NAME = "_headrace_origin"


def give_origin(error: BaseException, origin: ErrorOrigin) -> None:
    """Let an error carry where it stands."""
    setattr(error, _NAME, origin)


def blame_element(error: BaseException, places: Places | None, index: int) -> None:
    """Let an error carry that it is of an element, if elements have origins.

    Args:
        error: Which.
        places: What travels with elements.
        index: Which of them has failed.
    """
    if places is not None and (places.dtype.names or ("",))[-1] == "ordinal":
        unit, ordinal = int(places["unit"][index]), int(places["ordinal"][index])
        give_origin(error, ErrorOrigin(unit, ordinal + 1, 0))


def fails_below(error: BaseException) -> None:
    """Let an error of an element say that it comes from below steps that choose."""
    origin = origin_of_error(error)
    if origin is not None and not origin.number:
        give_origin(error, origin._replace(number=-1))


def origin_of_error(error: BaseException) -> ErrorOrigin | None:
    """Return where an error stands, if it carries that."""
    return getattr(error, _NAME, None)
