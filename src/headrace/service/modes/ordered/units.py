"""Units in order: what arrives from many tasks, first come, is sorted by unit and ordinal.

    take (an answer, what came with it) -> found (the next of one unit), askable (who may be asked)

No thread, lock or clock.

Rule 1. Nothing is given twice: what a task sends of a unit is dropped up to where others have got.
        Tasks give a unit's elements in order, each without gaps but for those that filters left
        out, so one number for each unit says what came. Errors have numbers of their own between.
Rule 2. A unit is whole when so many ordinals came as it has, or when the task that gave the last of
        it says that it is done with it: what is missing then was left out.
Rule 3. The task that holds the unit which is waited for may always be asked; others while what is
        here fits the bound. Where nobody is known to hold it, all may be: one of them is dealt it.
        So may those that the dispatcher names when it has been waited for for a while (helpers).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.element.chunk import Chunk
from headrace.execution.origins import ErrorOrigin, give_origin
from headrace.service.messages import GetElementsReply
from headrace.service.ranges import Ranges, subtracted, united
from headrace.service.rows import END, OriginRun

__all__ = ["Found", "Units"]


class Found(NamedTuple):
    """What comes next of a unit."""

    chunk: Chunk | None = None
    ordinal: int = 0
    """Of the first element of the chunk; they are consecutive."""
    error: Exception | None = None
    """In their place, with its origin (`execution.origins`)."""
    elements: int = 0
    """If there is neither: the unit is over, and had so many elements at the root."""


class _Piece(NamedTuple):
    """Elements of one unit with consecutive ordinals, or an error."""

    first: int
    content: Chunk | Exception
    bytes: int


@dataclass
class _Block:
    """Whole units in a row, of as many elements each; nothing else comes of them."""

    start: int
    """The first that was not read."""
    stop: int
    size: int
    chunk: Chunk
    base: int
    """The unit that the chunk begins with."""
    bytes: int
    """Of each."""


@dataclass
class _Unit:
    """What is here of a unit, and what is known of it."""

    pieces: deque[_Piece] = field(default_factory=deque)
    upto: int = 0
    """Everything before this ordinal came, or was left out."""
    failed: int = 0
    """The number of the last error that came and stands there (`GetElementsReply.failed_at`)."""
    elements: int | None = None
    """How many it has at the root, once that is known."""


@dataclass
class _Task:
    """Where a task stands."""

    dealt: tuple[tuple[int, int, int, int], ...] = ()
    """As in `GetElementsReply.dealt`."""

    def place(self, number: int) -> tuple[int, int]:
        """Return the unit of the stream with a number in dealt order, and for how many it goes.

        Unit -1: they are done, and what is said of them only now is known.
        """
        later = END
        for first, units, unit, _ in self.dealt:
            if first <= number < first + units:
                return unit + number - first, first + units - number
            if first > number:
                later = min(later, first)
        return -1, later - number

    def holds(self, unit: int) -> bool:
        """Whether it was dealt a unit of the stream, and may not be done with it."""
        return any(start <= unit < start + units for _, units, start, _ in self.dealt)


class Units:
    """Sorts what arrives.

    Args:
        bound: Bytes that may be here while others than the task that is waited for are asked.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._tasks: dict[int, _Task] = {}
        self._units: dict[int, _Unit] = {}
        #: Blocks in the order of their units, apart, and where each starts.
        self._blocks: list[_Block] = []
        self._starts: list[int] = []
        #: Units that were read to their end, and others of which all that comes has come.
        self._read: Ranges = ()
        self._whole: Ranges = ()
        self.bytes = 0
        """What is here and was not read."""

    # --- what arrives ---------------------------------------------------------------------------

    def take(
        self, task_id: int, answer: GetElementsReply, content: Chunk | Exception | None, size: int
    ) -> None:
        """Take an answer; those of one task are taken in the order of their numbers.

        Args:
            task_id: Whose.
            answer: What its worker said.
            content: What came with it: elements, or the error in the place of one.
            size: Its bytes.
        """
        task = self._tasks.setdefault(task_id, _Task())
        origins = answer.element_ids
        task.dealt = origins.assigned
        if isinstance(content, Exception) and origins.failed_split >= 0:
            is_last = answer.done_from <= origins.failed_split < answer.done_to
            unit, _ = task.place(origins.failed_split)
            origin = ErrorOrigin(unit, *origins.failed_position, is_last=is_last)
            self._fail(origin, content)
        ends = [run for run in origins.runs if run[2] + run[3] >= END]
        row, each = 0, size // max(1, answer.num_elements)
        for number, units, first, count in origins.runs:
            if first + count >= END or not isinstance(content, Chunk):
                continue
            while units:
                unit, few = task.place(number)
                few = min(few, units)
                assert unit >= 0, f"unit {number} in dealt order is done, and gives elements"
                run = (unit, few, first, count)
                # Where each has ended with these, there is nothing else to know of them.
                are_whole = few > 1 and first == 0 and _are_over(number, few, count, ends)
                add = self._add_block if are_whole else self._add_pieces
                add(run, content, row, each * count)
                row += few * count
                number, units = number + few, units - few
        for number, units, elements, _ in ends:
            while units:
                unit, few = task.place(number)
                few = min(few, units)
                if unit >= 0:
                    self._end(unit, few, elements)
                number, units = number + few, units - few
        number = answer.done_from
        while number < answer.done_to:
            unit, few = task.place(number)
            few = min(few, answer.done_to - number)
            if unit >= 0:
                self._finish(unit, unit + few)
            number += few

    def give_up(self, units: Iterable[tuple[int, int]]) -> None:
        """Take note that no more comes of units of the stream."""
        for start, stop in subtracted(united(units), self._whole):
            self._finish(start, stop)

    def forget(self, task_ids: Iterable[int]) -> None:
        """Take note that tasks are over."""
        for task_id in task_ids:
            self._tasks.pop(task_id, None)

    @property
    def tasks(self) -> set[int]:
        """Tasks that something came from."""
        return set(self._tasks)

    def _add_block(self, run: tuple[int, int, int, int], chunk: Chunk, row: int, size: int) -> None:
        """Add all elements of units in a row, from a row of a chunk on."""
        unit, units, _, count = run
        if not self._is_new(unit, unit + units):
            self._add_pieces(run, chunk, row, size)
            return
        part = chunk.slice(row, row + units * count)
        place = bisect_right(self._starts, unit)
        self._starts.insert(place, unit)
        self._blocks.insert(place, _Block(unit, unit + units, count, part, unit, size))
        self.bytes += size * units

    def _add_pieces(
        self, run: tuple[int, int, int, int], chunk: Chunk, row: int, size: int
    ) -> None:
        """Add elements of units in a row, from a row of a chunk on."""
        unit, units, first, count = run
        for number in range(units):
            start = row + number * count
            self._add_piece(unit + number, first, chunk.slice(start, start + count), size)

    def _is_new(self, start: int, stop: int) -> bool:
        """Whether nothing is known of units."""
        place = bisect_right(self._starts, start) - 1
        if place >= 0 and self._blocks[place].stop > start:
            return False
        if place + 1 < len(self._starts) and self._starts[place + 1] < stop:
            return False
        known = subtracted(((start, stop),), united((*self._read, *self._whole)))
        if known != ((start, stop),):
            return False
        if len(self._units) < stop - start:
            return not any(start <= unit < stop for unit in self._units)
        return not any(unit in self._units for unit in range(start, stop))

    def _add_piece(self, unit: int, first: int, chunk: Chunk, size: int) -> None:
        stop = first + chunk.size
        known = self._known(unit)
        if known is None or stop <= known.upto:
            return
        if first < known.upto:
            chunk = chunk.slice(known.upto - first, chunk.size)
            size = size * chunk.size // (stop - first)
            first = known.upto
        known.pieces.append(_Piece(first, chunk, size))
        known.upto, known.failed = stop, 0
        self.bytes += size

    def _fail(self, origin: ErrorOrigin, error: Exception) -> None:
        known = self._known(origin.unit) if origin.unit >= 0 else None
        if known is None or (origin.ordinal, origin.number) <= (known.upto, known.failed):
            return
        known.upto, known.failed = origin.ordinal, origin.number
        give_origin(error, origin)
        known.pieces.append(_Piece(origin.ordinal, error, 0))

    def _known(self, unit: int) -> _Unit | None:
        """Return what is known of a unit; None: nothing more of it is wanted."""
        found = self._units.get(unit)
        if found is not None:
            return found
        if _is_among(unit, self._read) or self._block_of(unit) is not None:
            return None
        return self._units.setdefault(unit, _Unit())

    def _end(self, unit: int, units: int, elements: int) -> None:
        if elements == 0:
            # Nothing of them comes but errors, which come before this is said.
            self._whole = united((*self._whole, (unit, unit + units)))
            return
        left: Ranges = ((unit, unit + units),)
        if units > 1:
            # Of those in blocks it is known.
            blocks = ((block.start, block.stop) for block in self._blocks)
            left = subtracted(left, united((*self._read, *blocks)))
        for each in (each for start, stop in left for each in range(start, stop)):
            known = self._known(each)
            if known is not None:
                known.elements = elements

    def _finish(self, start: int, stop: int) -> None:
        self._whole = united((*self._whole, (start, stop)))

    # --- what is read ---------------------------------------------------------------------------

    def found(self, unit: int, ordinal: int, limit: int) -> Found | None:
        """Return what comes next of a unit; None: nothing yet.

        Args:
            unit: Which.
            ordinal: Nothing before this one is wanted.
            limit: The most elements to return.
        """
        block = self._block_of(unit)
        if block is not None:
            if ordinal < block.size:
                start = (unit - block.base) * block.size + ordinal
                size = min(limit, block.size - ordinal)
                return Found(block.chunk.slice(start, start + size), ordinal)
            self._close_in_block(unit, block)
            return Found(elements=block.size)
        known = self._units.get(unit)
        while known is not None and known.pieces:
            piece = known.pieces.popleft()
            if isinstance(piece.content, Exception):
                if piece.first < ordinal:
                    continue
                return Found(error=piece.content)
            self.bytes -= piece.bytes
            stop = piece.first + piece.content.size
            if stop <= ordinal:
                continue
            first = max(piece.first, ordinal)
            end = min(stop, first + limit)
            if end < stop:
                rest = piece.content.slice(end - piece.first, piece.content.size)
                size = piece.bytes * rest.size // piece.content.size
                known.pieces.appendleft(_Piece(end, rest, size))
                self.bytes += size
            return Found(piece.content.slice(first - piece.first, end - piece.first), first)
        upto, elements = (0, None) if known is None else (known.upto, known.elements)
        is_whole = _is_among(unit, self._whole)
        if not is_whole and (elements is None or upto < elements):
            return None
        self._close(unit, unit + 1)
        return Found(elements=max(upto, elements or 0))

    def whole(self, unit: int, most: int, limit: int) -> tuple[Chunk, int] | None:
        """Return units in a row that are whole and of as many elements; None: there are none.

        Args:
            unit: The first.
            most: The most units.
            limit: The most elements.
        """
        block = self._block_of(unit)
        if block is None or block.size > limit:
            return None
        units = min(block.stop - unit, most, limit // block.size)
        start = (unit - block.base) * block.size
        chunk = block.chunk.slice(start, start + units * block.size)
        self._close_in_block(unit, block, units)
        return chunk, units

    def was_read(self, unit: int) -> bool:
        """Whether a unit was read to its end: nothing of it is here any more."""
        return _is_among(unit, self._read)

    def askable(
        self, unit: int | None, tasks: set[int], helpers: frozenset[int] = frozenset()
    ) -> set[int] | None:
        """Return the tasks that may be asked; None: all.

        Args:
            unit: The one that is waited for, or None.
            tasks: Those that are read.
            helpers: Of which the dispatcher says that they give it.
        """
        if self.bytes < self._bound:
            return None
        if unit is None:
            return set()
        holders = {each for each in tasks & self._tasks.keys() if self._tasks[each].holds(unit)}
        return (holders | tasks & helpers) if holders else None

    def _block_of(self, unit: int) -> _Block | None:
        place = bisect_right(self._starts, unit) - 1
        if place < 0 or unit >= self._blocks[place].stop:
            return None
        return self._blocks[place]

    def _close_in_block(self, unit: int, block: _Block, units: int = 1) -> None:
        """Forget units that were read."""
        stop = unit + units
        self._close(unit, stop)
        self.bytes -= units * block.bytes
        place = bisect_right(self._starts, unit) - 1
        if unit == block.start:
            block.start = self._starts[place] = stop
        else:
            rest = _Block(stop, block.stop, block.size, block.chunk, block.base, block.bytes)
            block.stop = unit
            place += 1
            self._blocks.insert(place, rest)
            self._starts.insert(place, stop)
        if self._blocks[place].start == self._blocks[place].stop:
            del self._blocks[place], self._starts[place]

    def _close(self, start: int, stop: int) -> None:
        for unit in range(start, stop) if self._units else ():
            self._units.pop(unit, None)
        if self._read and self._read[-1][1] == start:
            self._read = (*self._read[:-1], (self._read[-1][0], stop))
        else:
            self._read = united((*self._read, (start, stop)))
        if len(self._whole) > _MANY:
            self._whole = subtracted(self._whole, self._read)


_MANY = 64


def _are_over(number: int, units: int, elements: int, ends: list[OriginRun]) -> bool:
    """Whether units, in dealt order, have all ended with so many elements."""
    return any(
        first <= number and number + units <= first + many and each == elements
        for first, many, each, _ in ends
    )


def _is_among(unit: int, units: Ranges) -> bool:
    place = bisect_right(units, (unit, END)) - 1
    return place >= 0 and unit < units[place][1]
