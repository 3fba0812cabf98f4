"""Reorder buffer: sorts elements that arrive from many tasks by split and ordinal.

    add_reply(reply, its elements)  -> buffers the elements
    next_elements, take_complete    -> the next elements of a split, or complete splits
    tasks_to_request                -> the tasks that may be sent requests

No thread, lock or clock.

Rule 1. No element is delivered twice: elements of a split that other tasks already delivered are
    dropped. Tasks deliver a split's elements in order, without gaps except for filtered elements,
    so one number per split records what arrived. Errors between elements have separate numbers.
Rule 2. A split is complete when all its ordinals arrived, or when the task that delivered its last
    part reports it as done; missing elements were then filtered out.
Rule 3. The task that holds the awaited split may always be sent requests; other tasks while the
    buffered bytes are below the limit. If no known task holds it, all may be, because one of them
    will be assigned it. The same holds for tasks that the dispatcher names after a longer wait
    (helpers).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.element.chunk import Chunk
from headrace.execution.element_ids import ErrorPosition, set_error_position
from headrace.service.element_sets import END_ORDINAL, ElementIdRun
from headrace.service.messages import GetElementsReply
from headrace.service.ranges import Ranges, subtract, union

__all__ = ["NextElements", "ReorderBuffer"]


class NextElements(NamedTuple):
    """The next elements of a split."""

    chunk: Chunk | None = None
    ordinal: int = 0
    """Ordinal of the first element of the chunk; the others are consecutive."""
    error: Exception | None = None
    """Error in place of elements, with its position (`execution.element_ids`)."""
    num_elements: int = 0
    """Without chunk and error, the split has ended, and this is its number of elements at the
    partition boundary.
    """


class _Piece(NamedTuple):
    """Elements of one split with consecutive ordinals, or an error."""

    first: int
    content: Chunk | Exception
    bytes: int


@dataclass
class _Block:
    """Consecutive complete splits with the same number of elements each."""

    start: int
    """First split that was not read."""
    stop: int
    size: int
    chunk: Chunk
    base: int
    """Split that the chunk begins with."""
    bytes: int
    """Bytes per split."""


@dataclass
class _SplitBuffer:
    """Buffered elements of a split, and its progress."""

    pieces: deque[_Piece] = field(default_factory=deque)
    received_to: int = 0
    """All elements before this ordinal arrived or were filtered out."""
    error_number: int = 0
    """Number of the last error that arrived at that ordinal
    (`messages.ElementIds.failed_position`).
    """
    num_elements: int | None = None
    """Number of elements at the partition boundary, once known."""


@dataclass
class _TaskAssignments:
    """Assignments of a task."""

    assigned: tuple[tuple[int, int, int, int], ...] = ()
    """Same as `messages.ElementIds.assigned`."""

    def locate(self, number: int) -> tuple[int, int]:
        """Return the split of a number in assignment order, and the length of its run.

        Split -1: these splits are done, and the late information about them is known already.
        """
        later = END_ORDINAL
        for first, units, unit, _ in self.assigned:
            if first <= number < first + units:
                return unit + number - first, first + units - number
            if first > number:
                later = min(later, first)
        return -1, later - number

    def holds(self, unit: int) -> bool:
        """Return whether the task was assigned this split and may not have finished it."""
        return any(start <= unit < start + units for _, units, start, _ in self.assigned)


class ReorderBuffer:
    """Sorts arriving elements.

    Args:
        max_bytes: Buffered bytes below which all tasks are sent requests, not only the one that
            holds the awaited split.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tasks: dict[int, _TaskAssignments] = {}
        self._split_buffers: dict[int, _SplitBuffer] = {}
        #: Disjoint blocks in the order of their splits, and their starts.
        self._blocks: list[_Block] = []
        self._block_starts: list[int] = []
        #: Splits that were read to their end, and others whose elements have all arrived.
        self._read_splits: Ranges = ()
        self._complete_splits: Ranges = ()
        self.bytes = 0
        """Bytes that are buffered and were not read."""

    # --- arriving elements ------------------------------------------------------------------------

    def add_reply(
        self, task_id: int, answer: GetElementsReply, content: Chunk | Exception | None, size: int
    ) -> None:
        """Process a reply. The replies of a task must be added in the order of their numbers.

        Args:
            task_id: Task of the reply.
            answer: The worker's reply.
            content: Its elements, or the error in place of one.
            size: Bytes of the elements.
        """
        task = self._tasks.setdefault(task_id, _TaskAssignments())
        origins = answer.element_ids
        task.assigned = origins.assigned
        if isinstance(content, Exception) and origins.failed_split >= 0:
            is_last = answer.done_from <= origins.failed_split < answer.done_to
            unit, _ = task.locate(origins.failed_split)
            origin = ErrorPosition(unit, *origins.failed_position, is_last=is_last)
            self._add_error(origin, content)
        ends = [run for run in origins.runs if run[2] + run[3] >= END_ORDINAL]
        row, each = 0, size // max(1, answer.num_elements)
        for number, units, first, count in origins.runs:
            if first + count >= END_ORDINAL or not isinstance(content, Chunk):
                continue
            while units:
                unit, few = task.locate(number)
                few = min(few, units)
                assert unit >= 0, f"unit {number} in dealt order is done, and gives elements"
                run = (unit, few, first, count)
                # Each of these splits ends with its elements here, so it is complete.
                are_whole = few > 1 and first == 0 and _have_ended(number, few, count, ends)
                add = self._add_block if are_whole else self._add_pieces
                add(run, content, row, each * count)
                row += few * count
                number, units = number + few, units - few
        for number, units, elements, _ in ends:
            while units:
                unit, few = task.locate(number)
                few = min(few, units)
                if unit >= 0:
                    self._record_end(unit, few, elements)
                number, units = number + few, units - few
        number = answer.done_from
        while number < answer.done_to:
            unit, few = task.locate(number)
            few = min(few, answer.done_to - number)
            if unit >= 0:
                self._mark_complete(unit, unit + few)
            number += few

    def abandon(self, units: Iterable[tuple[int, int]]) -> None:
        """Record that no further elements of these splits will arrive."""
        for start, stop in subtract(union(units), self._complete_splits):
            self._mark_complete(start, stop)

    def forget_tasks(self, task_ids: Iterable[int]) -> None:
        """Remove finished tasks."""
        for task_id in task_ids:
            self._tasks.pop(task_id, None)

    @property
    def tasks(self) -> set[int]:
        """Tasks that have sent replies."""
        return set(self._tasks)

    def _add_block(self, run: tuple[int, int, int, int], chunk: Chunk, row: int, size: int) -> None:
        """Add all elements of consecutive splits, starting at a row of a chunk."""
        unit, units, _, count = run
        if not self._is_unknown(unit, unit + units):
            self._add_pieces(run, chunk, row, size)
            return
        part = chunk.slice(row, row + units * count)
        place = bisect_right(self._block_starts, unit)
        self._block_starts.insert(place, unit)
        self._blocks.insert(place, _Block(unit, unit + units, count, part, unit, size))
        self.bytes += size * units

    def _add_pieces(
        self, run: tuple[int, int, int, int], chunk: Chunk, row: int, size: int
    ) -> None:
        """Add elements of consecutive splits, starting at a row of a chunk."""
        unit, units, first, count = run
        for number in range(units):
            start = row + number * count
            self._add_piece(unit + number, first, chunk.slice(start, start + count), size)

    def _is_unknown(self, start: int, stop: int) -> bool:
        """Return whether nothing is known of these splits."""
        place = bisect_right(self._block_starts, start) - 1
        if place >= 0 and self._blocks[place].stop > start:
            return False
        if place + 1 < len(self._block_starts) and self._block_starts[place + 1] < stop:
            return False
        known = subtract(((start, stop),), union((*self._read_splits, *self._complete_splits)))
        if known != ((start, stop),):
            return False
        if len(self._split_buffers) < stop - start:
            return not any(start <= unit < stop for unit in self._split_buffers)
        return not any(unit in self._split_buffers for unit in range(start, stop))

    def _add_piece(self, unit: int, first: int, chunk: Chunk, size: int) -> None:
        stop = first + chunk.size
        known = self._find_buffer(unit)
        if known is None or stop <= known.received_to:
            return
        if first < known.received_to:
            chunk = chunk.slice(known.received_to - first, chunk.size)
            size = size * chunk.size // (stop - first)
            first = known.received_to
        known.pieces.append(_Piece(first, chunk, size))
        known.received_to, known.error_number = stop, 0
        self.bytes += size

    def _add_error(self, origin: ErrorPosition, error: Exception) -> None:
        known = self._find_buffer(origin.split) if origin.split >= 0 else None
        if known is None or (origin.ordinal, origin.number_at_ordinal) <= (
            known.received_to,
            known.error_number,
        ):
            return
        known.received_to, known.error_number = origin.ordinal, origin.number_at_ordinal
        set_error_position(error, origin)
        known.pieces.append(_Piece(origin.ordinal, error, 0))

    def _find_buffer(self, unit: int) -> _SplitBuffer | None:
        """Return the buffer of a split; None if nothing more of it is needed."""
        found = self._split_buffers.get(unit)
        if found is not None:
            return found
        if _contains(unit, self._read_splits) or self._find_block(unit) is not None:
            return None
        return self._split_buffers.setdefault(unit, _SplitBuffer())

    def _record_end(self, unit: int, units: int, elements: int) -> None:
        if elements == 0:
            # Only errors can arrive for them, and those arrive before their end is reported.
            self._complete_splits = union((*self._complete_splits, (unit, unit + units)))
            return
        left: Ranges = ((unit, unit + units),)
        if units > 1:
            # Blocks are known to be complete.
            blocks = ((block.start, block.stop) for block in self._blocks)
            left = subtract(left, union((*self._read_splits, *blocks)))
        for each in (each for start, stop in left for each in range(start, stop)):
            known = self._find_buffer(each)
            if known is not None:
                known.num_elements = elements

    def _mark_complete(self, start: int, stop: int) -> None:
        self._complete_splits = union((*self._complete_splits, (start, stop)))

    # --- reading ----------------------------------------------------------------------------------

    def next_elements(self, unit: int, ordinal: int, limit: int) -> NextElements | None:
        """Return the next elements of a split; None if none have arrived yet.

        Args:
            unit: The split.
            ordinal: First ordinal that is needed.
            limit: Maximum number of elements.
        """
        block = self._find_block(unit)
        if block is not None:
            if ordinal < block.size:
                start = (unit - block.base) * block.size + ordinal
                size = min(limit, block.size - ordinal)
                return NextElements(block.chunk.slice(start, start + size), ordinal)
            self._consume_block(unit, block)
            return NextElements(num_elements=block.size)
        known = self._split_buffers.get(unit)
        while known is not None and known.pieces:
            piece = known.pieces.popleft()
            if isinstance(piece.content, Exception):
                if piece.first < ordinal:
                    continue
                return NextElements(error=piece.content)
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
            return NextElements(piece.content.slice(first - piece.first, end - piece.first), first)
        upto, elements = (0, None) if known is None else (known.received_to, known.num_elements)
        is_whole = _contains(unit, self._complete_splits)
        if not is_whole and (elements is None or upto < elements):
            return None
        self._mark_read(unit, unit + 1)
        return NextElements(num_elements=max(upto, elements or 0))

    def take_complete(self, unit: int, most: int, limit: int) -> tuple[Chunk, int] | None:
        """Return consecutive complete splits of equal size; None if there are none.

        Args:
            unit: First split.
            most: Maximum number of splits.
            limit: Maximum number of elements.
        """
        block = self._find_block(unit)
        if block is None or block.size > limit:
            return None
        units = min(block.stop - unit, most, limit // block.size)
        start = (unit - block.base) * block.size
        chunk = block.chunk.slice(start, start + units * block.size)
        self._consume_block(unit, block, units)
        return chunk, units

    def was_read(self, unit: int) -> bool:
        """Return whether a split was read to its end; none of it is buffered then."""
        return _contains(unit, self._read_splits)

    def tasks_to_request(
        self, unit: int | None, tasks: set[int], helpers: frozenset[int] = frozenset()
    ) -> set[int] | None:
        """Return the tasks that may be sent requests; None for all.

        Args:
            unit: The awaited split, or None.
            tasks: Tasks that are being read.
            helpers: Tasks that can deliver the split according to the dispatcher.
        """
        if self.bytes < self._max_bytes:
            return None
        if unit is None:
            return set()
        holders = {each for each in tasks & self._tasks.keys() if self._tasks[each].holds(unit)}
        return (holders | tasks & helpers) if holders else None

    def _find_block(self, unit: int) -> _Block | None:
        place = bisect_right(self._block_starts, unit) - 1
        if place < 0 or unit >= self._blocks[place].stop:
            return None
        return self._blocks[place]

    def _consume_block(self, unit: int, block: _Block, units: int = 1) -> None:
        """Remove splits that were read."""
        stop = unit + units
        self._mark_read(unit, stop)
        self.bytes -= units * block.bytes
        place = bisect_right(self._block_starts, unit) - 1
        if unit == block.start:
            block.start = self._block_starts[place] = stop
        else:
            rest = _Block(stop, block.stop, block.size, block.chunk, block.base, block.bytes)
            block.stop = unit
            place += 1
            self._blocks.insert(place, rest)
            self._block_starts.insert(place, stop)
        if self._blocks[place].start == self._blocks[place].stop:
            del self._blocks[place], self._block_starts[place]

    def _mark_read(self, start: int, stop: int) -> None:
        for unit in range(start, stop) if self._split_buffers else ():
            self._split_buffers.pop(unit, None)
        if self._read_splits and self._read_splits[-1][1] == start:
            self._read_splits = (*self._read_splits[:-1], (self._read_splits[-1][0], stop))
        else:
            self._read_splits = union((*self._read_splits, (start, stop)))
        if len(self._complete_splits) > _PRUNE_RANGES:
            self._complete_splits = subtract(self._complete_splits, self._read_splits)


_PRUNE_RANGES = 64


def _have_ended(number: int, units: int, elements: int, ends: list[ElementIdRun]) -> bool:
    """Return whether these splits, in assignment order, all ended with this number of elements."""
    return any(
        first <= number and number + units <= first + many and each == elements
        for first, many, each, _ in ends
    )


def _contains(unit: int, units: Ranges) -> bool:
    place = bisect_right(units, (unit, END_ORDINAL)) - 1
    return place >= 0 and unit < units[place][1]
