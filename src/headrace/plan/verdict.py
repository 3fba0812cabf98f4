"""What the predicate of a `filter` or a `take_while` says of an element."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["PLAIN_VERDICTS", "is_true"]

PLAIN_VERDICTS = frozenset((bool, np.bool_))
"""Types of what comparisons return, which need no `is_true`."""


def is_true(verdict: Any) -> bool:
    """Return whether a predicate's result is true: a bool, a number, or an array of one of them.

    Raises:
        TypeError: It is something else, such as the None of a function without `return`.
    """
    kind = getattr(getattr(verdict, "dtype", None), "kind", "")
    is_number = isinstance(verdict, bool | int | float)
    # Scalars and arrays, of NumPy or of a framework; what holds several values refuses by itself.
    if is_number or (hasattr(verdict, "shape") and kind not in ("S", "U", "O")):
        return bool(verdict)
    raise TypeError(
        f"it returned {verdict!r:.80}, which is neither true nor false; return a bool, as in "
        "`return x > 0` or `return bool(...)`"
    )
