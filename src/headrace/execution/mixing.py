"""Parts of several chunks, mixed into one chunk: columns stay columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.places import of_units
from headrace.element.structure import Structure, flatten, unflatten
from headrace.execution.places import Places, in_turns

__all__ = ["Held", "Strand", "mixed"]

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


def mixed(strands: Sequence[Strand]) -> Chunk:
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
