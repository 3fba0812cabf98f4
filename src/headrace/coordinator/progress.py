"""How far a pass over a shared dataset is: which elements were used by functions that have ended.

Elements are read in order and used in any. What is kept is small: places of the reader, a few of
them, and which elements after the oldest one that counts were used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Progress"]

_BETWEEN_MARKS = 64


class Progress:
    """One pass; elements are numbered from where it was begun or gone on with.

    Args:
        pass_number: Which pass it is.
        used: Elements that were used before, as ranges [first, last + 1].
    """

    def __init__(self, pass_number: int, used: Iterable[Sequence[int]] = ()) -> None:
        self.pass_number = pass_number
        self._lock = threading.Lock()
        #: All elements before it were used.
        self._low = 0
        #: Those after it that were used.
        self._used: set[int] = set()
        #: How many were read.
        self._read = 0
        #: Places of the reader, each with the number of the element that comes next there.
        self._marks: deque[tuple[int, Any]] = deque()
        self._is_wanted = False
        for first, end in used:
            self.use(range(first, end))

    @property
    def wants_mark(self) -> bool:
        """Whether it should know where the reader stands now.

        From the beginning on where somebody asks for states; a place may cost its reader something.
        """
        if not self._marks:
            return True
        return self._is_wanted and self._read - self._marks[-1][0] >= _BETWEEN_MARKS

    def mark(self, place: Any) -> None:
        """Take note of where the reader stands."""
        with self._lock:
            self._marks.append((self._read, place))

    def read(self) -> int | None:
        """Take note that an element was read; return its number, or None if it was used before."""
        with self._lock:
            number = self._read
            self._read += 1
            return None if number < self._low or number in self._used else number

    def use(self, numbers: Iterable[int]) -> None:
        """Take note that elements were used."""
        with self._lock:
            self._used.update(numbers)
            while self._low in self._used:
                self._used.remove(self._low)
                self._low += 1
            while len(self._marks) > 1 and self._marks[1][0] <= self._low:
                self._marks.popleft()

    def state(self) -> tuple[Any, list[list[int]]]:
        """Return a place of the reader, and which elements from there on were used, as ranges."""
        with self._lock:
            self._is_wanted = True
            first, place = self._marks[0]
            ranges = [[0, self._low - first]] if self._low > first else []
            for number in sorted(self._used):
                if ranges and ranges[-1][1] == number - first:
                    ranges[-1][1] += 1
                else:
                    ranges.append([number - first, number - first + 1])
            return place, ranges
