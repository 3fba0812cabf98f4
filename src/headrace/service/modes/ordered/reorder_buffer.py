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
        next_start = END_ORDINAL
        for first, num_splits, split, _ in self.assigned:
            if first <= number < first + num_splits:
                return split + number - first, first + num_splits - number
            if first > number:
                next_start = min(next_start, first)
        return -1, next_start - number

    def holds(self, split: int) -> bool:
        """Return whether the task was assigned this split and may not have finished it."""
        return any(start <= split < start + num_splits for _, num_splits, start, _ in self.assigned)


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
        self.bytes: int = 0
        """Bytes that are buffered and were not read."""

    # --- arriving elements ------------------------------------------------------------------------

    def add_reply(
        self, task_id: int, reply: GetElementsReply, content: Chunk | Exception | None, size: int
    ) -> None:
        """Process a reply. The replies of a task must be added in the order of their numbers.

        Args:
            task_id: Task of the reply.
            reply: The worker's reply.
            content: Its elements, or the error in place of one.
            size: Bytes of the elements.
        """
        task = self._tasks.setdefault(task_id, _TaskAssignments())
        element_ids = reply.element_ids
        task.assigned = element_ids.assigned
        if isinstance(content, Exception) and element_ids.failed_split >= 0:
            is_last = reply.done_from <= element_ids.failed_split < reply.done_to
            split, _ = task.locate(element_ids.failed_split)
            error_position = ErrorPosition(split, *element_ids.failed_position, is_last=is_last)
            self._add_error(error_position, content)
        ends = [run for run in element_ids.runs if run[2] + run[3] >= END_ORDINAL]
        row, element_bytes = 0, size // max(1, reply.num_elements)
        for number, num_splits, first, count in element_ids.runs:
            if first + count >= END_ORDINAL or not isinstance(content, Chunk):
                continue
            while num_splits:
                split, length = task.locate(number)
                length = min(length, num_splits)
                assert split >= 0, (
                    f"split {number} in assignment order is done, but yields elements"
                )
                run = (split, length, first, count)
                # Each of these splits ends with its elements here, so it is complete.
                are_complete = (
                    length > 1 and first == 0 and _have_ended(number, length, count, ends)
                )
                add = self._add_block if are_complete else self._add_pieces
                add(run, content, row, element_bytes * count)
                row += length * count
                number, num_splits = number + length, num_splits - length
        for number, num_splits, num_elements, _ in ends:
            while num_splits:
                split, length = task.locate(number)
                length = min(length, num_splits)
                if split >= 0:
                    self._record_end(split, length, num_elements)
                number, num_splits = number + length, num_splits - length
        number = reply.done_from
        while number < reply.done_to:
            split, length = task.locate(number)
            length = min(length, reply.done_to - number)
            if split >= 0:
                self._mark_complete(split, split + length)
            number += length

    def abandon(self, splits: Iterable[tuple[int, int]]) -> None:
        """Record that no further elements of these splits will arrive."""
        for start, stop in subtract(union(splits), self._complete_splits):
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
        split, num_splits, _, count = run
        if not self._is_unknown(split, split + num_splits):
            self._add_pieces(run, chunk, row, size)
            return
        part = chunk.slice(row, row + num_splits * count)
        index = bisect_right(self._block_starts, split)
        self._block_starts.insert(index, split)
        self._blocks.insert(index, _Block(split, split + num_splits, count, part, split, size))
        self.bytes += size * num_splits

    def _add_pieces(
        self, run: tuple[int, int, int, int], chunk: Chunk, row: int, size: int
    ) -> None:
        """Add elements of consecutive splits, starting at a row of a chunk."""
        split, num_splits, first, count = run
        for number in range(num_splits):
            start = row + number * count
            self._add_piece(split + number, first, chunk.slice(start, start + count), size)

    def _is_unknown(self, start: int, stop: int) -> bool:
        """Return whether nothing is known of these splits."""
        index = bisect_right(self._block_starts, start) - 1
        if index >= 0 and self._blocks[index].stop > start:
            return False
        if index + 1 < len(self._block_starts) and self._block_starts[index + 1] < stop:
            return False
        known = subtract(((start, stop),), union((*self._read_splits, *self._complete_splits)))
        if known != ((start, stop),):
            return False
        if len(self._split_buffers) < stop - start:
            return not any(start <= split < stop for split in self._split_buffers)
        return not any(split in self._split_buffers for split in range(start, stop))

    def _add_piece(self, split: int, first: int, chunk: Chunk, size: int) -> None:
        stop = first + chunk.size
        buffer = self._find_buffer(split)
        if buffer is None or stop <= buffer.received_to:
            return
        if first < buffer.received_to:
            chunk = chunk.slice(buffer.received_to - first, chunk.size)
            size = size * chunk.size // (stop - first)
            first = buffer.received_to
        buffer.pieces.append(_Piece(first, chunk, size))
        buffer.received_to, buffer.error_number = stop, 0
        self.bytes += size

    def _add_error(self, position: ErrorPosition, error: Exception) -> None:
        buffer = self._find_buffer(position.split) if position.split >= 0 else None
        if buffer is None or (position.ordinal, position.number_at_ordinal) <= (
            buffer.received_to,
            buffer.error_number,
        ):
            return
        buffer.received_to, buffer.error_number = position.ordinal, position.number_at_ordinal
        set_error_position(error, position)
        buffer.pieces.append(_Piece(position.ordinal, error, 0))

    def _find_buffer(self, split: int) -> _SplitBuffer | None:
        """Return the buffer of a split; None if nothing more of it is needed."""
        found = self._split_buffers.get(split)
        if found is not None:
            return found
        if _contains(split, self._read_splits) or self._find_block(split) is not None:
            return None
        return self._split_buffers.setdefault(split, _SplitBuffer())

    def _record_end(self, split: int, num_splits: int, num_elements: int) -> None:
        if num_elements == 0:
            # Only errors can arrive for them, and those arrive before their end is reported.
            self._complete_splits = union((*self._complete_splits, (split, split + num_splits)))
            return
        remaining: Ranges = ((split, split + num_splits),)
        if num_splits > 1:
            # Blocks are known to be complete.
            blocks = ((block.start, block.stop) for block in self._blocks)
            remaining = subtract(remaining, union((*self._read_splits, *blocks)))
        for each in (each for start, stop in remaining for each in range(start, stop)):
            buffer = self._find_buffer(each)
            if buffer is not None:
                buffer.num_elements = num_elements

    def _mark_complete(self, start: int, stop: int) -> None:
        self._complete_splits = union((*self._complete_splits, (start, stop)))

    # --- reading ----------------------------------------------------------------------------------

    def next_elements(self, split: int, ordinal: int, limit: int) -> NextElements | None:
        """Return the next elements of a split; None if none have arrived yet.

        Args:
            split: The split.
            ordinal: First ordinal that is needed.
            limit: Maximum number of elements.
        """
        block = self._find_block(split)
        if block is not None:
            if ordinal < block.size:
                start = (split - block.base) * block.size + ordinal
                size = min(limit, block.size - ordinal)
                return NextElements(block.chunk.slice(start, start + size), ordinal)
            self._consume_block(split, block)
            return NextElements(num_elements=block.size)
        buffer = self._split_buffers.get(split)
        while buffer is not None and buffer.pieces:
            piece = buffer.pieces.popleft()
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
                buffer.pieces.appendleft(_Piece(end, rest, size))
                self.bytes += size
            return NextElements(piece.content.slice(first - piece.first, end - piece.first), first)
        received_to, num_elements = (
            (0, None) if buffer is None else (buffer.received_to, buffer.num_elements)
        )
        is_complete = _contains(split, self._complete_splits)
        if not is_complete and (num_elements is None or received_to < num_elements):
            return None
        self._mark_read(split, split + 1)
        return NextElements(num_elements=max(received_to, num_elements or 0))

    def take_complete(self, split: int, max_splits: int, limit: int) -> tuple[Chunk, int] | None:
        """Return consecutive complete splits of equal size; None if there are none.

        Args:
            split: First split.
            max_splits: Maximum number of splits.
            limit: Maximum number of elements.
        """
        block = self._find_block(split)
        if block is None or block.size > limit:
            return None
        num_splits = min(block.stop - split, max_splits, limit // block.size)
        start = (split - block.base) * block.size
        chunk = block.chunk.slice(start, start + num_splits * block.size)
        self._consume_block(split, block, num_splits)
        return chunk, num_splits

    def was_read(self, split: int) -> bool:
        """Return whether a split was read to its end; none of it is buffered then."""
        return _contains(split, self._read_splits)

    def tasks_to_request(
        self, split: int | None, tasks: set[int], helpers: frozenset[int] = frozenset()
    ) -> set[int] | None:
        """Return the tasks that may be sent requests; None for all.

        Args:
            split: The awaited split, or None.
            tasks: Tasks that are being read.
            helpers: Tasks that can deliver the split according to the dispatcher.
        """
        if self.bytes < self._max_bytes:
            return None
        if split is None:
            return set()
        holders = {each for each in tasks & self._tasks.keys() if self._tasks[each].holds(split)}
        return (holders | tasks & helpers) if holders else None

    def _find_block(self, split: int) -> _Block | None:
        index = bisect_right(self._block_starts, split) - 1
        if index < 0 or split >= self._blocks[index].stop:
            return None
        return self._blocks[index]

    def _consume_block(self, split: int, block: _Block, num_splits: int = 1) -> None:
        """Remove splits that were read."""
        stop = split + num_splits
        self._mark_read(split, stop)
        self.bytes -= num_splits * block.bytes
        index = bisect_right(self._block_starts, split) - 1
        if split == block.start:
            block.start = self._block_starts[index] = stop
        else:
            rest = _Block(stop, block.stop, block.size, block.chunk, block.base, block.bytes)
            block.stop = split
            index += 1
            self._blocks.insert(index, rest)
            self._block_starts.insert(index, stop)
        if self._blocks[index].start == self._blocks[index].stop:
            del self._blocks[index], self._block_starts[index]

    def _mark_read(self, start: int, stop: int) -> None:
        for split in range(start, stop) if self._split_buffers else ():
            self._split_buffers.pop(split, None)
        if self._read_splits and self._read_splits[-1][1] == start:
            self._read_splits = (*self._read_splits[:-1], (self._read_splits[-1][0], stop))
        else:
            self._read_splits = union((*self._read_splits, (start, stop)))
        if len(self._complete_splits) > _PRUNE_RANGES:
            self._complete_splits = subtract(self._complete_splits, self._read_splits)


_PRUNE_RANGES = 64


def _have_ended(number: int, num_splits: int, num_elements: int, ends: list[ElementIdRun]) -> bool:
    """Return whether these splits, in assignment order, all ended with this number of elements."""
    return any(
        first <= number and number + num_splits <= first + length and each == num_elements
        for first, length, each, _ in ends
    )


def _contains(split: int, ranges: Ranges) -> bool:
    index = bisect_right(ranges, (split, END_ORDINAL)) - 1
    return index >= 0 and split < ranges[index][1]
