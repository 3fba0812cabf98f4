"""Numbers of places: which element of a plan one is, whoever reads it and whatever came before it.

A place is (pass, position, ordinal within the position). Its number, 64 bits, follows from these by
arithmetic on whole columns. Chunks carry the numbers of their elements where a step above opens
datasets for them (`Context.wants_places`): those draw from the numbers, so they are the same
however the work is split, and in whichever order the elements come.

Rule 1. The numbers are a format: what is drawn after a restore follows from them.
Rule 2. Whatever joins streams (`repeat`, `concatenate`, `zip`, an interleave) mixes in which of
        them an element is of. Whatever chooses, holds or reorders elements leaves their numbers
        as they are. None depends on a count that another split would change.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.plan.random_words import mixed

__all__ = ["Places", "of_positions", "within"]

Places: TypeAlias = NDArray[np.uint64]


def of_positions(first: int, count: int) -> Places:
    """Return the places of positions `first` and following of an index part."""
    return mixed(np.arange(first, first + count, dtype=np.uint64))


def within(outer: Places, inner: Places | int) -> Places:
    """Return the places of what stands at `inner` within what stands at `outer`.

    Both are one number an element; either may be one for all. An ordinal is as good as a place.
    """
    if isinstance(inner, int):
        inner = np.array([inner], np.uint64)
    return mixed(mixed(outer) + inner)
