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

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.brief import Column, InTurns
from headrace.element.places import has_origins, numbers_in, of_units
from headrace.plan.random_words import mixed

__all__ = ["Places", "in_turns", "of_positions", "within"]

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
