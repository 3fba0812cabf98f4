"""What is done to gradients before they are sent: the look for what is not finite, and clipping.

Both need the whole gradient, of all variables: so they are the client's. Rows of a sparse gradient
have been summed before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.parameter_server.dtypes import working_dtype

__all__ = ["NonFinite", "are_finite", "clip_by_norm", "clip_by_value", "norm", "refuse_non_finite"]

NonFinite = Literal["raise", "skip", "apply"]
"""What to do when a gradient has a NaN or an infinity."""


def are_finite(values: NDArray[Any]) -> bool:
    """Whether there is neither a NaN nor an infinity."""
    # One pass without a mask; only where it overflows is each element looked at.
    return math.isfinite(_sum_of_squares(values)) or bool(np.isfinite(values).all())


def refuse_non_finite(names: Sequence[str], gradients: Sequence[NDArray[Any]]) -> None:
    """Raise unless all gradients are finite.

    Raises:
        InvalidArgumentError: One is not; it names the variable and the place.
    """
    for name, gradient in zip(names, gradients, strict=True):
        if not are_finite(gradient):
            wrong = np.argwhere(~np.isfinite(gradient))
            place = ", ".join(map(str, wrong[0]))
            raise InvalidArgumentError(
                f"the gradient of {name} has {len(wrong)} of {gradient.size} elements that are not "
                f"finite, the first at [{place}]: {gradient[tuple(wrong[0])]}; nothing was "
                'applied. An optimizer made with non_finite="skip" passes over such a step'
            )


def norm(gradients: Sequence[NDArray[Any]]) -> float:
    """Return the Euclidean norm of all gradients together."""
    return math.sqrt(sum(map(_sum_of_squares, gradients)))


def clip_by_norm(gradients: Sequence[NDArray[Any]], largest: float) -> list[NDArray[Any]]:
    """Return gradients scaled so that their norm, all together, is at most `largest`.

    A norm that is not finite makes them NaN.
    """
    found = norm(gradients)
    if found <= largest:
        return list(gradients)
    scale = largest / found if math.isfinite(found) else math.nan
    return [gradient * gradient.dtype.type(scale) for gradient in gradients]


def clip_by_value(gradients: Sequence[NDArray[Any]], largest: float) -> list[NDArray[Any]]:
    """Return gradients with each element brought into [-largest, largest]."""
    return [
        # Dtypes of other packages are widened by `clip`.
        np.clip(gradient, -largest, largest).astype(gradient.dtype, copy=False)
        for gradient in gradients
    ]


def _sum_of_squares(values: NDArray[Any]) -> float:
    flat = np.ascontiguousarray(values, working_dtype(values.dtype)).reshape(-1)
    # By pieces: sums in float32 over the whole would lose digits.
    pieces = [flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE)]
    with np.errstate(all="ignore"):
        total = sum(float(np.dot(piece, piece)) for piece in pieces)
        if math.isfinite(total) or flat.dtype != np.float32:
            return total
        # Squares of what is above 1e19 are no float32.
        wide = (piece.astype(np.float64) for piece in pieces)
        return sum(float(np.dot(piece, piece)) for piece in wide)


_PIECE = 65_536
