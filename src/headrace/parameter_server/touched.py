"""Which rows were written since a mark: what an incremental checkpoint has to hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Touched"]


class Touched:
    """The rows of one shard, each with the number of the period in which it was last written.

    Periods are counted from 0, and each mark begins one. In period 0 nothing is kept: whoever sets
    no mark pays nothing.

    Args:
        period: Now; the shard is new, so all of it was written in this period.
    """

    def __init__(self, period: int) -> None:
        self._period = period
        self._whole = period
        self._rows = np.zeros(0, np.uint32)

    def begin(self, period: int) -> None:
        """Begin a period: what is written from now on belongs to it."""
        self._period = period

    def write_all(self) -> None:
        """Note that all rows were written."""
        self._whole = self._period

    def write(self, rows: NDArray[np.int64], room: int) -> None:
        """Note that rows were written, of `room` that there are or may be."""
        if not self._period:
            return
        if len(self._rows) < room:
            larger = np.zeros(room, np.uint32)
            larger[: len(self._rows)] = self._rows
            self._rows = larger
        self._rows[rows] = self._period

    def since(self, mark: int) -> NDArray[np.int64] | None:
        """Return the rows that were written in later periods than `mark`; None: all of them."""
        return None if self._whole > mark else np.flatnonzero(self._rows > mark)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._rows.nbytes
