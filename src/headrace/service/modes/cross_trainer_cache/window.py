"""The sliding window of a task that trainers share: the newest portions, within so many bytes.

Places in it are numbers of portions, from the first that was ever made; a reader's place may fall
behind the window's start, and is then moved there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.service.worker.portion import Portion

__all__ = ["Place", "Window", "part_of"]

_MOST_PORTIONS = 1 << 18
"""What is known of a portion takes about a kilobyte, however small its elements are."""


@dataclass
class Place:
    """Where a reader stands."""

    index: int = 0
    """Number of the portion that it reads next."""
    row: int = 0
    """How many elements of that it had."""
    element: int = 0
    """The task's number of the next element."""


class Window:
    """The newest portions of a task.

    Args:
        most_bytes: What they may take together.
        most: How many they may be.
    """

    def __init__(self, most_bytes: int, most: int = _MOST_PORTIONS) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._portions: deque[Portion] = deque()
        #: The sum of their bytes.
        self.bytes = 0
        #: Number of the oldest portion that is here, and of its first element.
        self._start = 0
        self._start_element = 0
        #: The task's number of the element after the last one.
        self._end_element = 0

    @property
    def elements(self) -> int:
        """Number of elements that are here."""
        return self._end_element - self._start_element

    def __len__(self) -> int:
        return len(self._portions)

    def has_room_for(self, portion: Portion) -> bool:
        """Whether a portion fits at all."""
        return portion.size <= self._most_bytes

    def add(self, portion: Portion) -> None:
        """Add the next portion, for which the oldest leave as far as need be."""
        assert portion.count, "a portion without elements"
        while self._portions and (
            self.bytes + portion.size > self._most_bytes or len(self._portions) >= self._most
        ):
            gone = self._portions.popleft()
            self.bytes -= gone.size
            self._start += 1
            self._start_element = gone.first + gone.count
        if not self._portions:
            self._start_element = portion.first
        self._portions.append(portion)
        self.bytes += portion.size
        self._end_element = portion.first + portion.count

    def clear(self) -> None:
        """Let all portions go."""
        self._start += len(self._portions)
        self._start_element = self._end_element
        self._portions.clear()
        self.bytes = 0

    # --- readers --------------------------------------------------------------------------------

    def beginning(self) -> Place:
        """Return where a new reader begins: at the oldest element that is here."""
        return Place(index=self._start, element=self._start_element)

    def is_at_end(self, place: Place) -> bool:
        """Whether the next element of a place was not made yet."""
        return place.index >= self._start + len(self._portions)

    def catch_up(self, place: Place) -> int:
        """Move a place that fell behind to the oldest element; return how many it did not get."""
        if place.index >= self._start:
            return 0
        missed = self._start_element - place.element
        place.index, place.row, place.element = self._start, 0, self._start_element
        return missed

    def take(self, place: Place, most: int) -> Portion:
        """Return the next elements of a place that is not at the end, and move it after them.

        Args:
            place: Not behind the window.
            most: How many elements may come; 0: as many as were made together.
        """
        portion = self._portions[place.index - self._start]
        left = portion.count - place.row
        count = min(left, most) if most else left
        taken = part_of(portion, place.row, place.row + count)
        place.element = taken.first + taken.count
        if count == left:
            place.index, place.row = place.index + 1, 0
        else:
            place.row += count
        return taken


def part_of(portion: Portion, start: int, stop: int) -> Portion:
    """Return elements `start` to `stop` - 1 of a portion, which is cut when it is sent."""
    if (start, stop) == (0, portion.count):
        return portion
    is_last = stop == portion.count
    return Portion(
        first=portion.first + start,
        count=stop - start,
        buffers=portion.buffers,
        size=max(1, portion.size * (stop - start) // portion.count),
        done_from=portion.done_from,
        done_to=portion.done_to if is_last else portion.done_from,
        touched=portion.touched,
        begun=portion.begun,
        index=portion.index,
        rows=(start, stop),
        is_shared=portion.is_shared,
    )
