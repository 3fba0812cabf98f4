"""Numbers of rows, as users give them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError

__all__ = ["are_large_integers", "as_ids", "check_rows", "rows_of"]


def rows_of(variable: Any, ids: Any) -> NDArray[np.int64]:
    """Return numbers of rows of a variable, of any shape.

    Args:
        variable: Has a `name` and a `shape`.
        ids: Integers.

    Raises:
        ValueError: The variable is one number.
        TypeError: They are no integers.
        InvalidArgumentError: There is no such row; it is named, and where it stands.
    """
    whose = f"Variable {variable.name!r}"
    if not variable.shape:
        raise ValueError(f"{whose} has no rows: it is one number")
    return check_rows(ids, variable.shape[0], whose)


def check_rows(rows: Any, count: int, whose: str) -> NDArray[np.int64]:
    """Return row numbers as int64, of any shape.

    Args:
        rows: Integers.
        count: There are so many rows.
        whose: For the message.

    Raises:
        TypeError: They are no integers.
        InvalidArgumentError: One is not in [0, count); it is named, and where it stands.
    """
    found = as_ids(rows, whose)
    if found.size == 0 and not isinstance(rows, np.ndarray):
        found = found.astype(np.int64)
    if found.dtype.kind not in "iu" and not are_large_integers(found):
        raise TypeError(f"ids of {whose} must be integers, but got dtype {found.dtype}")
    if found.size and (found.min() < 0 or found.max() >= count):
        flat = found.reshape(-1)
        first = int(np.flatnonzero((flat < 0) | (flat >= count))[0])
        place = ", ".join(map(str, np.unravel_index(first, found.shape)))
        raise InvalidArgumentError(
            f"ids[{place}] = {flat[first]} is not in [0, {count}) of {whose}"
        )
    return found.astype(np.int64, copy=False)


def as_ids(ids: Any, whose: str) -> NDArray[Any]:
    """Return ids as an array.

    Raises:
        ValueError: They are lists of unlike lengths.
    """
    try:
        return np.asarray(ids)
    except ValueError:
        raise ValueError(
            f"ids of {whose} must be an array, but here lists of ids have unlike lengths; look up "
            "each list by itself, or see hr.torch.EmbeddingBag"
        ) from None


def are_large_integers(values: NDArray[Any]) -> bool:
    """Whether they are integers of Python of which one is beyond 64 bits: no array has them."""
    return bool(values.dtype == object and all(type(each) is int for each in values.flat))
