"""Rows of matrices that steps look up, and the signals of a step that needs other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MissingRows", "Rows", "WholeWeightNeeded", "merged"]


class Rows(NamedTuple):
    """Rows of a matrix, or gradients of them.

    Attributes:
        ids: Sorted, without duplicates.
        values: One for each id.
    """

    ids: NDArray[np.int64]
    values: NDArray[Any]


def merged(first: Rows, second: Rows) -> Rows:
    """Return the rows of two that have no id in common."""
    if not len(second.ids):
        return first
    ids = np.concatenate([first.ids, second.ids])
    order = np.argsort(ids)
    return Rows(ids[order], np.concatenate([first.values, second.values])[order])


class MissingRows(Exception):  # noqa: N818 - a signal, which the caller always handles
    """A step looked up rows that it was not given.

    Attributes:
        ids: Sorted unique ids, by index among the trainable variables.
    """

    def __init__(self, ids: dict[int, NDArray[np.int64]]) -> None:
        super().__init__(ids)
        self.ids = ids


class WholeWeightNeeded(Exception):  # noqa: N818 - likewise
    """A step used more of matrices than the rows that layers look up.

    Attributes:
        indices: Indices of these matrices among the trainable variables.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(indices)
        self.indices = list(indices)
