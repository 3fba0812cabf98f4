"""What becomes of contributions: one value of those of all workers, in the order of their ranks.

    ANY    whether any worker said yes, and the arrays of the first that brought some
    SUM    each worker's arrays, added element by element
    FIRST  what the first worker brought
    ALL    what all workers brought, one after another
    ERROR  nothing: the same step failed on all workers. What is brought is the error, as text

Sums are made once, in one order: so they are the same on all workers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.collectives import ReduceOp, reduced
from headrace.errors import FailedPreconditionError, InvalidArgumentError

__all__ = ["ALL", "ANY", "ERROR", "FIRST", "SUM", "Brought", "combine"]

ANY, SUM, FIRST, ALL, ERROR = "any", "sum", "first", "all", "error"


class Brought(NamedTuple):
    """What a worker brings, and what all take away."""

    flag: bool = False
    arrays: Sequence[NDArray[Any]] = ()


_Combine: TypeAlias = Callable[[Sequence[Brought]], Brought]


def combine(kind: str, values: Sequence[Brought]) -> Brought:
    """Return what comes of what the workers brought.

    Raises:
        FailedPreconditionError: There is no such kind.
        InvalidArgumentError: What they brought does not fit together.
    """
    how = _KINDS.get(kind)
    if how is None:
        raise FailedPreconditionError(
            f"meetings of the kind {kind!r} are not known; do all workers run the same version?"
        )
    return how(values)


def _any(values: Sequence[Brought]) -> Brought:
    arrays = next((value.arrays for value in values if value.arrays), ())
    return Brought(any(value.flag for value in values), [_kept(array) for array in arrays])


def _sum(values: Sequence[Brought]) -> Brought:
    _check_counts(values)
    columns = zip(*(value.arrays for value in values), strict=True)
    return Brought(arrays=[np.asarray(reduced(ReduceOp.SUM, column)) for column in columns])


def _first(values: Sequence[Brought]) -> Brought:
    return Brought(values[0].flag, [_kept(array) for array in values[0].arrays])


def _all(values: Sequence[Brought]) -> Brought:
    _check_counts(values)
    return Brought(arrays=[_kept(array) for value in values for array in value.arrays])


def _check_counts(values: Sequence[Brought]) -> None:
    if len({len(value.arrays) for value in values}) > 1:
        counts = ", ".join(str(len(value.arrays)) for value in values)
        raise InvalidArgumentError(
            f"the workers brought different numbers of values: {counts}, in the order of their "
            "ranks; return the same structure on all"
        )


def _kept(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that does not change later: what cannot be written here is somebody's own."""
    return array if array.flags.writeable else array.copy()


def _error(values: Sequence[Brought]) -> Brought:
    return Brought()


_KINDS: dict[str, _Combine] = {ANY: _any, SUM: _sum, FIRST: _first, ALL: _all, ERROR: _error}
