"""Numbers of places: which element of a plan one is, whoever reads it and whatever came before it.

A place is (pass, position, ordinal within the position). Its number, 64 bits, follows from these by
arithmetic on whole columns. Chunks carry the numbers of their elements where a step above opens
datasets for them (`Context.wants_places`): those draw from the numbers, so they are the same
however the work is split, and in whichever order the elements come.

Rule 1. The numbers are a format: what is drawn after a restore follows from them.
Rule 2. Whatever joins streams (`repeat`, `concatenate`, `zip`, an interleave) mixes in which of
        them an element is of. Whatever chooses, holds or reorders elements leaves their numbers
        as they are. None depends on a count that another split would change.
Rule 3. Where origins travel too, a column has records (`element.places`). What is opened within an
        element is of its unit. From the root on nothing is opened within an element, and a place
        stays what it was at the root, whatever joins streams above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.brief import Column, InTurns
from headrace.element.chunk import Chunk
from headrace.element.places import has_origins, numbers_in, of_units
from headrace.element.structure import Structure, flatten, unflatten
from headrace.plan.random_words import mixed

__all__ = [
    "Held",
    "Places",
    "Strand",
    "in_turns",
    "mixed_chunk",
    "of_positions",
    "within",
]

Places: TypeAlias = NDArray[Any]
"""A column of places: one number an element, or a record of it and an origin."""


def of_positions(first: int, count: int) -> Places:
    """Return the places of positions `first` and following of an index part."""
    return mixed(np.arange(first, first + count, dtype=np.uint64))


def within(outer: Places, inner: Places | int) -> Places:
    """Return the places of what stands at `inner` within what stands at `outer`.

    Both are one number an element; either may be one for all. An ordinal is as good as a place.
    """
    if isinstance(inner, int):
        inner = np.array([inner], np.uint64)
    if outer.dtype.names is None and inner.dtype.names is None:
        return mixed(mixed(outer) + inner)
    numbers, inner_numbers = numbers_in(outer), numbers_in(inner)
    if inner.dtype.names is not None:
        if has_origins(inner) or inner_numbers is None:
            return inner  # from the root on, or units alone
        units = inner["unit"]
    else:
        units = np.broadcast_to(outer["unit"], np.broadcast_shapes(outer.shape, inner.shape))
    if numbers is None:
        return of_units(units, None)
    assert inner_numbers is not None
    return of_units(units, mixed(mixed(numbers) + inner_numbers))


def in_turns(units: Sequence[int], each: int, start: int, count: int) -> Column:
    """Return the column of elements of units that take turns: without places.

    Args:
        units: In the order of their turns.
        each: Elements in a turn.
        start: Elements, of all units, that are passed over first.
        count: How many there are.
    """
    found = InTurns(tuple(units), each, start, count)
    # Two datasets of one unit: its elements are counted one after the other.
    return found if len(set(units)) == len(units) else found.made()


# --- Parts of several chunks, mixed into one chunk: columns stay columns --------------------------

_FEWEST_A_PART = 4
"""Elements of a part, on average, from which on it pays to move columns instead of rows."""


class Held:
    """A chunk, and what its columns are like.

    Args:
        chunk: The elements.
        unit: That they are all of, where they are to be named and have no places of their own.
    """

    __slots__ = ("_kind", "chunk", "leaves", "structure", "unit")

    def __init__(self, chunk: Chunk, unit: int | None = None) -> None:
        self.chunk = chunk
        self.unit = unit
        self.leaves: list[NDArray[Any]] = []  # once its kind was asked for
        self.structure: Structure | None = None
        self._kind: tuple[Any, ...] | None = None

    @property
    def kind(self) -> tuple[Any, ...] | None:
        """Columns of one kind can be mixed; None: it has no columns."""
        if self._kind is None and self.chunk.is_columnar:
            self.leaves, self.structure = flatten(self.chunk.columns())
            shapes = [(leaf.dtype, leaf.shape[1:]) for leaf in self.leaves]
            self._kind = (self.structure, shapes)
        return self._kind


class Strand(NamedTuple):
    """Elements that are woven: `each` of every part in turn, `rounds` times over."""

    each: int
    rounds: int
    parts: list[tuple[Held, int]]
    """A chunk, and where the elements begin in it."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.each * self.rounds * len(self.parts)


def mixed_chunk(strands: Sequence[Strand]) -> Chunk:
    """Return the elements of the strands, one after the other."""
    size = sum([strand.size for strand in strands])
    parts = sum([len(strand.parts) for strand in strands])
    first, start = strands[0].parts[0]
    if parts == 1:
        made = first.chunk.slice(start, start + size)
        return made if first.unit is None else made.with_places(in_turns([first.unit], 1, 0, size))
    made = _mixed_elements(strands, size, parts)
    if first.unit is not None:
        return made.with_places(_units_of(strands, size))
    if first.chunk.places is None:
        return made
    return made.with_places(_woven(strands, size, first.chunk.places, _places_of))


def _mixed_elements(strands: Sequence[Strand], size: int, parts: int) -> Chunk:
    if parts * _FEWEST_A_PART <= size:
        first = strands[0].parts[0][0]
        if first.kind is not None and all(
            held.kind == first.kind for strand in strands for held, _ in strand.parts
        ):
            return _mixed_columns(strands, size, first)
    rows: list[Any] = []
    for each, rounds, parts_ in strands:
        given = [(held.chunk.rows(), start) for held, start in parts_]
        if each == 1 and rounds > 1:
            woven: list[Any] = [None] * (rounds * len(given))
            for place, (part, start) in enumerate(given):
                woven[place :: len(given)] = part[start : start + rounds]
            rows += woven
            continue
        for at in range(0, rounds * each, each):
            for part, start in given:
                rows += part[start + at : start + at + each]
    return Chunk.of_rows(rows)


def _mixed_columns(strands: Sequence[Strand], size: int, first: Held) -> Chunk:
    made: list[NDArray[Any]] = []
    for number, leaf in enumerate(first.leaves):

        def column(held: Held, number: int = number) -> NDArray[Any]:
            return held.leaves[number]

        made.append(_woven(strands, size, leaf, column))
    assert first.structure is not None
    return Chunk.of_columns(unflatten(first.structure, made), size)


def _woven(
    strands: Sequence[Strand],
    size: int,
    like: NDArray[Any],
    column_of: Callable[[Held], NDArray[Any]],
) -> NDArray[Any]:
    """Return one column of the mixed chunk; those of the parts are like `like`."""
    rest = like.shape[1:]
    # Zeroed where there is padding between fields, which is not written here.
    out = (np.zeros if like.dtype.kind == "V" else np.empty)((size, *rest), like.dtype)
    at = 0
    for each, rounds, parts in strands:
        count = each * rounds
        blocks = [
            column_of(held)[start : start + count].reshape(rounds, each, *rest)
            for held, start in parts
        ]
        stop = at + count * len(parts)
        np.concatenate(blocks, 1, out[at:stop].reshape(rounds, each * len(parts), *rest))
        at = stop
    return out


def _units_of(strands: Sequence[Strand], size: int) -> Places:
    """Return the column of units of the mixed chunk: each part is of one."""
    units = np.empty(size, np.int64)
    at = 0
    for each, rounds, parts in strands:
        stop = at + each * rounds * len(parts)
        shaped = units[at:stop].reshape(rounds, len(parts), each)
        shaped[:] = np.array([held.unit for held, _ in parts], np.int64)[:, np.newaxis]
        at = stop
    return of_units(units, None)


def _places_of(held: Held) -> Places:
    assert held.chunk.places is not None
    return held.chunk.places
