"""Iterator of `interleave` and `flat_map`: reads in turn the datasets that a function opens.

    input --function--> opened datasets --cycle order--> slots --blocks--> chunk

The cycle order is arithmetic (`interleave_order`). A chunk ends where a dataset would have to be
opened, unless the consumer needs all elements (`next_needed_chunk`); so no function is called
before its element is needed. With threads, datasets are opened and read ahead, but get the same
slots in the same order; so states are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace.element.chunk import Chunk
from headrace.element.compact_columns import MetadataColumn
from headrace.execution.context import Context
from headrace.execution.element_numbers import (
    BufferedChunk,
    InterleavedParts,
    interleave_chunks,
    round_robin_column,
)
from headrace.execution.interleave_order import (
    CycleCursor,
    EmptySlot,
    InterleaveLog,
    RoundRobinBlock,
    advance_cursor,
    count_taken,
    make_state,
    next_block,
)
from headrace.execution.iterator import (
    MAX_FAILURES,
    ElementIterator,
    LazyRows,
    State,
    make_iterator,
)
from headrace.execution.nested_dataset import ClosedError, NestedDataset
from headrace.execution.open_datasets import DatasetOpener, OpenDatasets
from headrace.plan.combining import Interleave
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.user_function import step_name

__all__ = ["InterleaveIterator"]


@make_iterator.register(Interleave)
class InterleaveIterator(ElementIterator):
    """Reads the datasets that a function returns for its input's elements, several in turn.

    When a dataset ends, the dataset of the next outer element takes its slot.

    Args:
        node: The step.
        context: Context of the step.
        opener: Opens the datasets; None uses the step's function and input.
    """

    def __init__(
        self, node: Interleave | ReadSplits, context: Context, opener: DatasetOpener | None = None
    ) -> None:
        kind = "flat_map" if node.cycle_length == 1 else None
        self._datasets = OpenDatasets(node, context, step_name(node, kind), opener)
        self._is_unordered = id(node) in context.unordered_steps
        self._wants_element_numbers = context.wants_element_numbers
        self._tracks_splits = context.tracks_splits
        self._cycle_length = node.cycle_length
        # In a cycle of one slot the block length has no effect.
        self._block_length = min(node.block_length, _UNBOUNDED) if self._cycle_length > 1 else 1
        self._reset()

    def _reset(self) -> None:
        self._cursor = CycleCursor(0, 0)
        #: Error to raise after the elements before it, and its dataset.
        self._pending_error: tuple[Exception, NestedDataset] | None = None

    @property
    def _threads(self) -> int:
        return self._datasets.threads

    @property
    def can_read_ahead(self) -> bool:
        return self._datasets.reads_ahead_freely

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        return self._read(limit, are_needed=False)

    def next_needed_chunk(self, count: int) -> Chunk | None:
        return self._read(count, are_needed=True)

    def _read(self, limit: int, *, are_needed: bool) -> Chunk | None:
        try:
            chunk = self._read_lazy_rows(limit, are_needed) if self._cycle_length > 1 else None
            if chunk is None:
                chunk = self._next_chunk(limit, are_needed)
        except ClosedError:  # closed by another thread
            return None
        dataset = self._datasets.slots[self._cursor.slot] if chunk is not None else None
        self.has_lazy_rows = (
            dataset is not None and dataset.iterator.has_lazy_rows and not self._threads
        )
        return chunk

    def lazy_rows(self) -> LazyRows | None:
        if self._tracks_splits or self._current_with_lazy_rows() is None:
            return super().lazy_rows()
        log = self._start_log()
        block = self._next_lazy_block(_UNBOUNDED, log)
        if block is None:
            return super().lazy_rows()
        log.record_taken(block, block.size)
        return self._yield_rows(block), log.states()

    def _start_log(self) -> InterleaveLog:
        return InterleaveLog(self._datasets.position(), self._cursor, self._block_length)

    def _read_lazy_rows(self, limit: int, are_needed: bool) -> Chunk | None:
        """Return elements of datasets that yield lazy rows, or None if chunks must be read."""
        if self._current_with_lazy_rows() is None:
            return None
        log, make_ids = self._start_log(), self._make_id_column() if self._tracks_splits else None
        rows: list[Any] = []
        while len(rows) < limit:
            slot_before = self._cursor.slot
            block = self._next_lazy_block(limit - len(rows), log, keeps_error=bool(rows))
            if block is None:
                if make_ids is not None:  # they are valid until a dataset is opened or closed
                    break
                slot = self._cursor.slot
                if slot != slot_before:
                    continue  # a dataset has ended
                if self._datasets.slots[slot] is not None or self._pending_error is not None:
                    break
                if self._datasets.has_ended or not self._open_slot(
                    slot, log, len(rows), are_needed
                ):
                    break
                continue
            num_before = len(rows)
            rows += self._yield_rows(block, keeps_error=True, is_first=not rows)
            log.record_taken(block, len(rows) - num_before)
        if not rows:
            return None
        return Chunk.of_rows(rows, log.states(), None if make_ids is None else make_ids(len(rows)))

    def _make_id_column(self) -> Callable[[int], MetadataColumn]:
        """Return a function that makes the split column of the next `count` elements.

        Valid as long as no dataset is opened before the last of them.
        """
        datasets, (first, taken) = self._datasets.slots, self._cursor
        start = (first - datasets[:first].count(None)) * self._block_length + taken
        splits = [
            dataset.split
            for dataset in datasets
            if dataset is not None and dataset.split is not None
        ]
        return lambda count: round_robin_column(splits, self._block_length, start, count)

    def _next_lazy_block(
        self, limit: int, log: InterleaveLog, *, keeps_error: bool = False
    ) -> RoundRobinBlock | None:
        """Return the block of the next lazy rows, or None if none come next.

        Args:
            limit: Maximum number of elements.
            log: Log of datasets that start or end.
            keeps_error: Whether an error is left for the next call.
        """
        first, taken = self._cursor
        dataset = self._current_with_lazy_rows()
        if dataset is None:
            return None
        remaining = min(self._block_length - taken, limit) if self._cycle_length > 1 else limit
        if dataset.rows is None:
            # Starting costs calls, so other datasets are not started before their turns.
            try:
                has_more = dataset.start_lazy_rows()
            except Exception as error:
                if keeps_error:
                    self._pending_error = error, dataset
                    return None
                dataset.skip_error()
                raise
            log.record_slot(first, dataset if has_more else None)
            if has_more:
                return RoundRobinBlock((first,), remaining, 1)
            self._close_slot(first)
            log.record_cursor(self._cursor)
            return None
        if taken or self._cycle_length == 1 or limit < 2 * self._block_length:
            return RoundRobinBlock((first,), remaining, 1)
        slots, is_whole = [first], True
        for distance in range(1, self._cycle_length):
            slot = (first + distance) % self._cycle_length
            dataset = self._datasets.slots[slot]
            if dataset is None and self._datasets.has_ended:
                continue
            if dataset is None or dataset.rows is None or dataset.buffered is not None:
                is_whole = False
                break
            slots.append(slot)
        turns = limit // self._block_length
        rounds = turns // len(slots) if is_whole else 1
        return RoundRobinBlock(tuple(slots[:turns]), self._block_length, max(rounds, 1))

    def _open_slot(self, slot: int, log: InterleaveLog, size: int, may_open: bool) -> bool:
        """Open the next dataset in an empty slot.

        Args:
            slot: The slot.
            log: Log of the events.
            size: Number of elements already in the chunk.
            may_open: Whether functions may be called.

        Returns:
            False if the chunk ends here: opening requires a call, a wait, or raising.
        """
        datasets = self._datasets
        if size:
            if may_open and not self._threads:
                datasets.open_one_ahead()
            if not datasets.can_open_immediately:
                return False
        if datasets.open(slot):
            log.record_slot(slot, datasets.slots[slot])
        log.record_outer(datasets.outer_position())
        return True

    def _current_with_lazy_rows(self) -> NestedDataset | None:
        """Return the current dataset if it may yield lazy rows."""
        dataset = self._datasets.slots[self._cursor.slot]
        if dataset is None or self._pending_error is not None or not self._has_lazy_rows(dataset):
            return None
        return dataset

    def _has_lazy_rows(self, dataset: NestedDataset) -> bool:
        """Return whether the next elements of a dataset may be lazy rows."""
        is_sequential = not (self._threads or self._wants_element_numbers)
        return is_sequential and dataset.iterator.has_lazy_rows and dataset.buffered is None

    def _yield_rows(
        self, rows_block: RoundRobinBlock, *, keeps_error: bool = False, is_first: bool = True
    ) -> Iterator[Any]:
        """Yield lazy rows of a block until a dataset's rows end.

        Args:
            rows_block: The block.
            keeps_error: Whether an error after other elements is left for the next call.
            is_first: Whether no elements of the chunk precede the block.
        """
        datasets = [
            dataset
            for slot in rows_block.slots
            if (dataset := self._datasets.slots[slot]) is not None
        ]
        row_iterators = [dataset.rows for dataset in datasets if dataset.rows is not None]
        per_slot, count = rows_block.per_slot, 0
        try:
            for _ in range(rows_block.rounds):
                for rows in row_iterators:
                    stop = count + per_slot
                    for row in rows:
                        count += 1
                        yield row
                        if count == stop:
                            break
                    else:
                        self._record_consumed(rows_block, datasets, count).rows = None
                        return
        except Exception as error:
            dataset = self._record_consumed(rows_block, datasets, count)
            if not keeps_error or (is_first and not count):
                dataset.skip_error()
                raise
            dataset.rows, self._pending_error = None, (error, dataset)
            return
        self._record_consumed(rows_block, datasets, count)

    def _record_consumed(
        self, rows_block: RoundRobinBlock, datasets: list[NestedDataset], count: int
    ) -> NestedDataset:
        """Record that `count` elements of a block were yielded; return the current dataset."""
        for number, dataset in enumerate(datasets):
            dataset.index += count_taken(rows_block, number, count)
        self._cursor = advance_cursor(
            rows_block, count, self._cursor, self._block_length, self._cycle_length
        )
        return datasets[count // rows_block.per_slot % len(datasets)]

    def _next_chunk(self, limit: int, are_needed: bool) -> Chunk | None:
        if self._pending_error is not None:
            error, dataset = self._pending_error
            self._pending_error = None
            dataset.skip_error()
            raise error
        if self._cycle_length == 1 and not self._threads:
            return self._read_sequentially(limit)
        datasets = self._datasets
        log = InterleaveLog(datasets.position(), self._cursor, self._block_length)
        parts: list[InterleavedParts] = []
        size = 0
        was_free = datasets.reads_ahead_freely
        if self._threads:
            datasets.open_ahead()
        while size < limit:
            block_or_slot = next_block(
                datasets.num_buffered, self._cursor, self._block_length, limit - size
            )
            if block_or_slot is None:
                break
            if isinstance(block_or_slot, EmptySlot):
                if was_free and not are_needed and not datasets.reads_ahead_freely:
                    # The request assumed free reading, but an element now costs calls.
                    if size:
                        break
                    limit = 1
                self._cursor = _cursor_at(block_or_slot.slot, self._cursor)
                log.record_cursor(self._cursor)
                slot = block_or_slot.slot
                if not self._prepare_slot(slot, size, limit - size, log, are_needed):
                    break
                continue
            parts.append(self._take_block(block_or_slot))
            log.record_taken(block_or_slot, block_or_slot.size)
            size += block_or_slot.size
            if self._cycle_length == 1:
                break  # pass the chunk on unchanged
        return interleave_chunks(parts).with_states(log.states()) if size else None

    def _read_sequentially(self, limit: int) -> Chunk | None:
        """Return elements of one dataset after the other, for a cycle of one slot."""
        datasets = self._datasets
        was_free = datasets.reads_ahead_freely
        while True:
            dataset = datasets.slots[0]
            if dataset is None:
                if datasets.has_ended or not datasets.open(0):
                    return None
                dataset = datasets.slots[0]
                assert dataset is not None
            if dataset.buffered is not None:
                break
            if was_free and not dataset.iterator.can_read_ahead:
                limit = 1  # the request assumed free reading, but an element now costs calls
            try:
                has_more = dataset.read(limit)
            except Exception:
                dataset.skip_error()
                raise
            if has_more:
                break
            self._close_slot(0)
        count = min(limit, dataset.num_buffered)
        states, start = dataset.states, dataset.index
        buffered, _ = dataset.take(count)
        datasets.num_buffered[0] = dataset.num_buffered
        # The current position, whatever is opened later.
        outer, cursor, current = datasets.outer_position(), self._cursor, dataset

        def states_at(index: int) -> State:
            return make_state(([(current, states, start + index)], outer), cursor)

        chunk = buffered.chunk.slice(start, start + count)
        if buffered.split is not None:
            chunk = chunk.with_metadata(round_robin_column([buffered.split], 1, 0, count))
        return chunk.with_states(states_at)

    def _prepare_slot(
        self, slot: int, size: int, limit: int, log: InterleaveLog, may_open: bool
    ) -> bool:
        """Open or read the dataset of the current slot, or advance to another slot.

        Args:
            slot: The current slot, which has nothing buffered.
            size: Number of elements already in the chunk.
            limit: Number of elements that may be added.
            log: Log of the events.
            may_open: Whether functions may be called to open a dataset.

        Returns:
            False if the chunk ends here, because more elements require opening, waiting or raising,
            or are lazy rows.
        """
        threads, dataset = self._datasets.threads, self._datasets.slots[slot]
        if dataset is None:
            if not self._open_slot(slot, log, size, may_open):
                return False
            dataset = self._datasets.slots[slot]
            if dataset is None or self._datasets.threads:
                return True
        if threads and not dataset.is_ready:
            if self._is_unordered and self._advance_to_ready(log):
                return True
            if size:
                return False
            if self._is_unordered:
                self._datasets.wait_for_any()
                return True
        if (
            size
            and self._cycle_length > 1
            and self._has_lazy_rows(dataset)
            and max(self._datasets.num_buffered) <= 0
        ):
            return False  # lazy rows in the next chunk cost a tenth of separate reads
        try:
            has_more = self._read_into_slot(slot, dataset, limit)
        except ClosedError:
            raise
        except Exception as failure:
            if size:
                self._pending_error = failure, dataset
                return False
            dataset.skip_error()
            raise
        log.record_slot(slot, dataset if has_more else None)
        log.record_cursor(self._cursor)
        return True

    def _take_block(self, rows_block: RoundRobinBlock) -> InterleavedParts:
        """Take a block from the buffers of the slots."""
        count = rows_block.per_slot * rows_block.rounds
        parts: list[tuple[BufferedChunk, int]] = []
        for slot in rows_block.slots:
            dataset = self._datasets.slots[slot]
            assert dataset is not None
            parts.append(dataset.take(count))
            self._datasets.num_buffered[slot] -= count
        self._cursor = advance_cursor(
            rows_block, rows_block.size, self._cursor, self._block_length, self._cycle_length
        )
        return InterleavedParts(rows_block.per_slot, rows_block.rounds, parts)

    def _read_into_slot(self, slot: int, dataset: NestedDataset, limit: int) -> bool:
        """Fill the buffer of the current slot; return False if its dataset has ended."""
        datasets = self._datasets
        if (
            datasets.receive(dataset)
            if self._threads
            else dataset.read(*self._request_size(dataset, limit))
        ):
            datasets.num_buffered[slot] = dataset.num_buffered
            return True
        self._close_slot(slot)
        return False

    def _close_slot(self, slot: int) -> None:
        """Close the dataset of a slot, which has ended, and advance the cycle."""
        self._datasets.close_slot(slot)
        self._cursor = CycleCursor((slot + 1) % self._cycle_length, 0)

    def _request_size(self, dataset: NestedDataset, limit: int) -> tuple[int, bool]:
        """Return how many elements to request from a dataset, and whether it may return more."""
        if not dataset.iterator.can_read_ahead:
            # Only the elements that come next.
            return (
                min(self._block_length - self._cursor.num_taken, limit)
                if self._cycle_length > 1
                else limit
            ), False
        if self._cycle_length == 1:
            return limit, False
        # An equal part of the request, so that all buffers run out and are refilled together.
        turns = -(-limit // self._block_length)
        return -(
            -turns // self._datasets.num_open
        ) * self._block_length - self._cursor.num_taken, True

    def _advance_to_ready(self, log: InterleaveLog) -> bool:
        """Advance to the next slot that requires no wait; return False if there is none."""
        for distance in range(self._cycle_length):
            slot = (self._cursor.slot + distance) % self._cycle_length
            dataset = self._datasets.slots[slot]
            if dataset is None:
                is_ready = not self._datasets.has_ended and self._datasets.has_opened_ahead
            else:
                is_ready = self._datasets.num_buffered[slot] > 0 or dataset.is_ready
            if is_ready:
                self._cursor = _cursor_at(slot, self._cursor)
                log.record_cursor(self._cursor)
                return True
        return False

    def skip(self, count: int) -> int:
        """Skip elements; no function is called if a dataset can skip its own elements."""
        num_skipped = num_failed = 0
        while num_skipped < count:
            try:
                skipped = self._skip_some(count - num_skipped)
            except Exception:
                num_failed += 1
                if num_failed > MAX_FAILURES + count:
                    raise
                continue
            if skipped is None:
                break
            num_skipped += skipped
        return num_skipped

    def _skip_some(self, count: int) -> int | None:
        """Skip up to `count` elements of one slot; return None at the end."""
        if self._pending_error is not None:
            self._pending_error[1].skip_error()
            self._pending_error = None
        block_or_slot = next_block(
            self._datasets.num_buffered, self._cursor, self._block_length, count
        )
        if block_or_slot is None:
            return None
        if isinstance(block_or_slot, RoundRobinBlock):
            self._take_block(block_or_slot)
            return block_or_slot.size
        slot, self._cursor = block_or_slot.slot, _cursor_at(block_or_slot.slot, self._cursor)
        dataset = self._datasets.slots[slot]
        if dataset is None:
            self._datasets.open(slot)
            return 0
        if self._threads or dataset.iterator.can_read_ahead:
            try:
                self._read_into_slot(slot, dataset, count)
            except Exception:
                dataset.skip_error()
                raise
            return 0
        requested = self._request_size(dataset, count)[0]
        num_skipped = dataset.skip(requested)
        if num_skipped:
            block = RoundRobinBlock((slot,), num_skipped, 1)
            self._cursor = advance_cursor(
                block, num_skipped, self._cursor, self._block_length, self._cycle_length
            )
        if num_skipped < requested:
            self._close_slot(slot)
        return num_skipped

    # --- state ----------------------------------------------------------------------------------

    def get_state(self) -> State:
        return make_state(self._datasets.position(), self._cursor)

    def set_state(self, state: State) -> None:
        self._reset()
        self._datasets.set_state(state)
        self._cursor = CycleCursor(state["current"], state["taken"])

    def close(self) -> None:
        self._reset()
        self._datasets.close()


_UNBOUNDED = 1 << 40
"""More elements than any dataset yields in a turn."""


def _cursor_at(slot: int, cursor: CycleCursor) -> CycleCursor:
    return cursor if cursor.slot == slot else CycleCursor(slot, 0)
