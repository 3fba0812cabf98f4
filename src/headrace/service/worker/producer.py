"""Producer: a thread that reads a task's iterator and groups its elements into result batches.

Rule 1. The first batch holds one element, and each batch at most twice as many as the one before,
    so that the first element arrives early and a short dataset is shared fairly.
Rule 2. A failed element is a separate batch: an error that is sent once; the task continues. A
    split that ends with the error is complete with it: it is not reassigned if the worker dies.
Rule 3. A task fails if its plan cannot be opened, if it raises the same message `_MAX_FAILURES`
    times in succession, or if an error that is no `Exception` escapes, because the state of the
    iterator is then undefined.
Rule 4. The sink always receives the end.
Rule 5. Buffered elements are delivered before a wait for splits (`flush`), on this thread or on a
    read-ahead thread of the plan, because the wait may be long. Elements that arrive during the
    wait are delivered at once: up to two batches are then made although there was room for one.
Rule 6. After a pause, before which the steps of the plan yield everything they hold, a batch
    without elements reports that all splits so far are complete: clients then acknowledge at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from headrace.element import wire
from headrace.element.chunk import Chunk, concatenate
from headrace.element.compact_columns import concatenate_columns
from headrace.errors import HeadraceError, UserFunctionError
from headrace.execution.element_ids import ErrorPosition, get_error_position, group_by_split
from headrace.execution.iterator import ElementIterator, State
from headrace.process_metrics import count_user_function_error
from headrace.service.element_sets import END_ORDINAL, ElementIdRun
from headrace.service.messages import ElementIds
from headrace.service.worker.client_errors import format_error, to_client_error
from headrace.service.worker.producer_channel import ResultSink
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.split_ends import SplitEnds
from headrace.service.worker.task_iterator import (
    count_yielded_splits,
    find_element_ids,
    max_started_splits,
    state_after,
    take_ended_splits,
)
from headrace.service.worker.task_thread import TaskThread
from headrace.transport.channel import Buffer

__all__ = ["MAX_BATCH_ELEMENTS", "Producer", "next_batch_limit"]

_log = logging.getLogger(__name__)

MAX_BATCH_ELEMENTS = 1 << 16
_BATCH_BYTES = 8 << 20
"""Target size of a batch. Smaller batches waste time: the fixed cost of a batch, for worker and
client together, is that of copying about 3 MB. Larger ones do not stay in the CPU caches while they
are produced, sent and consumed.
"""
_BATCH_SECONDS = 0.04
"""Target time to produce a batch. Each batch wakes threads of two processes, which costs a
millisecond or two.
"""
_MAX_FAILURES = 100


def next_batch_limit(
    limit: int, count: int, size: int, seconds: float, batch_bytes: int = _BATCH_BYTES
) -> int:
    """Return the maximum number of elements of the next batch.

    Args:
        limit: Maximum number of elements of the last batch.
        count: Number of its elements.
        size: Bytes of its elements.
        seconds: Seconds it took to produce.
        batch_bytes: Maximum bytes of a batch with more than one element.
    """
    if seconds > _BATCH_SECONDS:
        return max(1, limit // 2)
    if count == limit and seconds < _BATCH_SECONDS / 2:
        affordable = max(1, batch_bytes * count // max(size, 1))
        return max(1, min(limit * 2, MAX_BATCH_ELEMENTS, affordable))
    return limit


class Producer(TaskThread[ResultSink]):
    """Produces one task's result batches on a separate thread.

    Args:
        name: Name of the task, for the thread and the log.
        open_plan: Creates the iterator, given `flush`.
        sink: Receiver of the batches.
        counts_splits: Whether the iterator's states have split counts.
        max_elements: Maximum number of elements of a batch.
        reports_element_ids: Whether batches carry element ids.
        max_batch_bytes: Maximum bytes of a batch with several elements; None for 8 MiB.
        is_ordered: Whether elements are read in order: split by split, with each end.
    """

    def __init__(
        self,
        name: str,
        open_plan: Callable[[Callable[[], None]], ElementIterator],
        sink: ResultSink,
        *,
        counts_splits: bool = False,
        max_elements: int = MAX_BATCH_ELEMENTS,
        reports_element_ids: bool = False,
        max_batch_bytes: int | None = None,
        is_ordered: bool = False,
    ) -> None:
        super().__init__(name, open_plan, sink)
        self._batch_bytes = min(_BATCH_BYTES, max_batch_bytes or _BATCH_BYTES)
        #: Larger chunks are divided.
        self._max_frame_bytes = math.inf if max_batch_bytes is None else 2 * max_batch_bytes
        self._counts_splits = counts_splits
        self._max_elements = max_elements
        self._reports_element_ids = reports_element_ids
        self._is_ordered = is_ordered
        self._split_ends = SplitEnds(is_ordered=is_ordered)
        #: The iterator while it is being read.
        self._iterator: ElementIterator | None = None
        #: Chunks that were yielded and are in no batch yet.
        self._buffered_chunks: list[Chunk] = []
        #: State after these chunks, and the end of the splits that may have yielded elements.
        self._position: tuple[State, int] | None = None
        #: Whether a part of this batch was delivered before a wait for splits.
        self._was_flushed = False
        self._num_elements = 0
        #: End of the splits that are complete with the delivered batches.
        self._delivered_to = 0
        #: End of the splits assigned before the last pause.
        self._flushed_to = 0

    def flush(self) -> None:
        with self._put_lock:
            self._was_flushed = self._was_flushed or bool(self._buffered_chunks)
            self._put_buffered()
            num_yielded = 0 if self._iterator is None else count_yielded_splits(self._iterator)
            if num_yielded > self._flushed_to:
                self._flushed_to = self._done_to = self._delivered_end = num_yielded
                before, self._delivered_to = self._delivered_to, num_yielded
                self._put_empty_batch(before, self._take_split_ends())

    def _fail(self, error: BaseException) -> str:
        failure = format_error(error)
        try:
            _log.error("%s failed: %s", self._name, failure, exc_info=error)
            self._put_error(to_client_error(error))
        except BaseException:
            _log.exception("%s could not report its error to clients", self._name)
        return failure

    def _produce(self) -> str | None:
        try:
            iterator = self._open_iterator()
        except BaseException as error:
            self._put_error(to_client_error(error))
            return f"its plan cannot be opened: {format_error(error)}"
        self._iterator = iterator
        try:
            return self._produce_from(iterator)
        finally:
            self._iterator = None
            iterator.close()

    def _produce_from(self, iterator: ElementIterator) -> str | None:
        limit, failures, last_message = 1, 0, ""
        while self._sink.wait_for_room():
            limit = min(limit, self._sink.max_elements or limit)
            error: BaseException | None = None
            at_end = False
            count = size = 0
            self._was_flushed = False
            started_at = time.perf_counter()
            while count < limit and size < self._batch_bytes:
                try:
                    chunk = iterator.next_chunk(limit - count)
                except BaseException as raised:
                    error = raised
                    break
                if chunk is None:
                    at_end = True
                    break
                self._add_chunk(iterator, chunk)
                count += chunk.size
                size += wire.frame_bytes(chunk)
                is_slow = time.perf_counter() - started_at > _BATCH_SECONDS / 2
                if is_slow or self._sink.delivers_at_once or self._was_flushed:
                    break
            seconds = time.perf_counter() - started_at
            with self._put_lock:
                # If a split ended with an error, its end is reported with the error.
                self._put_buffered(reports_ends=error is None)
            if count:
                failures = 0
            if at_end:
                self._put_split_ends()
                return None
            if error is None:
                if not self._was_flushed:
                    next_limit = next_batch_limit(limit, count, size, seconds, self._batch_bytes)
                    limit = min(self._max_elements, next_limit)
                continue
            client_error = to_client_error(error)
            # After an error that is no `Exception` the iterator's state is undefined. The state is
            # requested without the lock for the same reason as in `_add_chunk`.
            has_state = self._counts_splits and isinstance(error, Exception)
            state = iterator.get_state() if has_state else None
            # A split that ends with an error is complete with it and is not needed again.
            self._put_error(
                client_error, state, max_started_splits(iterator), get_error_position(error)
            )
            if not isinstance(error, Exception):
                return format_error(error)
            failures = failures + 1 if str(client_error) == last_message else 1
            last_message = str(client_error)
            if failures >= _MAX_FAILURES:
                failure = f"the same error {failures} times in a row: {last_message}"
                _log.warning("%s failed: %s", self._name, failure)
                return failure
        return None

    def _add_chunk(self, iterator: ElementIterator, chunk: Chunk) -> None:
        """Buffer a chunk."""
        # The state is requested now, because another thread that calls `flush` must not request it;
        # and without the lock, because a thread of the plan that waits for the lock may hold what
        # the state needs.
        position = (
            (state_after(chunk), max_started_splits(iterator)) if self._counts_splits else None
        )
        with self._put_lock:
            self._buffered_chunks.append(chunk)
            self._position = position

    def _put_buffered(self, *, reports_ends: bool = True) -> None:
        chunks, self._buffered_chunks = self._buffered_chunks, []
        if chunks:
            if self._position is not None:
                self._count_splits(*self._position)
            before, self._delivered_to = self._delivered_to, self._done_to
            ended = self._take_split_ends() if reports_ends else ()
            self._put_chunk(_concatenate_chunks(chunks), before, self._done_to, ended)

    def _put_split_ends(self) -> None:
        """Report the remaining ends of splits, in ordered reading."""
        with self._put_lock:
            ended = self._take_split_ends(at_end=True) if self._is_ordered else ()
            if ended:
                self._put_empty_batch(self._delivered_to, ended)

    def _put_empty_batch(self, done_from: int, ended: tuple[ElementIdRun, ...]) -> None:
        """Deliver a batch without elements, which reports complete or ended splits."""
        self._sink.put(
            ResultBatch(
                first_element=self._num_elements,
                done_from=done_from,
                done_to=self._delivered_to,
                delivered_end=self._delivered_end,
                mode_data=ElementIds(runs=ended) if ended else None,
            )
        )

    def _take_split_ends(self, *, at_end: bool = False) -> tuple[ElementIdRun, ...]:
        """Return the ends of splits to report (`split_ends`)."""
        iterator = self._iterator if self._reports_element_ids else None
        ended = () if iterator is None else take_ended_splits(iterator)
        runs = self._sink.element_ids((), ended) if ended else ()
        return self._split_ends.take_due(runs, END_ORDINAL if at_end else self._done_to)

    def _put_chunk(
        self,
        chunk: Chunk,
        done_from: int,
        done_to: int,
        ended: tuple[ElementIdRun, ...],
    ) -> None:
        buffers: list[Buffer] = []
        error: HeadraceError | None = None
        if self._is_ordered:
            chunk = group_by_split(chunk)
        try:
            buffers = wire.encode(chunk)
        except HeadraceError as raised:
            error = raised
        size = sum([memoryview(buffer).nbytes for buffer in buffers])
        if chunk.size > 1 and (error is not None or size > self._max_frame_bytes):
            # One element may be the cause; the others can still be sent.
            middle = chunk.size // 2
            self._put_chunk(chunk.slice(0, middle), done_from, done_from, ())
            self._put_chunk(chunk.slice(middle, chunk.size), done_from, done_to, ended)
            return
        mode: ElementIds | None = None
        if self._reports_element_ids:
            ids = find_element_ids(chunk)
            runs = self._sink.element_ids(ids.runs, ()) + ended
            mode = ElementIds(
                runs=runs,
                is_permuted=ids.is_permuted,
                permutation=ids.permutation,
                interleaving=ids.interleaving,
                ids_per_element=ids.ids_per_element,
                failed_split=runs[0][0] if error is not None and runs else -1,
                failed_position=(runs[0][2] + 1, 0) if error is not None and runs else (0, 0),
            )
        first_element, self._num_elements = self._num_elements, self._num_elements + chunk.size
        self._sink.put(
            ResultBatch(
                first_element=first_element,
                num_elements=0 if error else chunk.size,
                buffers=buffers,
                size=size,
                done_from=done_from,
                done_to=done_to,
                delivered_end=self._delivered_end,
                error=error,
                mode_data=mode,
            )
        )

    def _put_error(
        self,
        error: HeadraceError,
        state: State | None = None,
        started_end: int = 0,
        position: ErrorPosition | None = None,
    ) -> None:
        """Deliver an error.

        Args:
            error: The error.
            state: State of the iterator after it, if it counts splits and is defined.
            started_end: End of the splits that may have yielded elements.
            position: Position of the error among the elements, if known.
        """
        if isinstance(error, UserFunctionError):
            count_user_function_error()
        with self._put_lock:
            if state is not None:
                self._count_splits(state, started_end)
            else:
                self._delivered_end = max(self._delivered_end, started_end)
            before, self._delivered_to = self._delivered_to, self._done_to
            ended = self._take_split_ends()
            mode = ElementIds(runs=ended) if ended else None
            if position is not None and self._is_ordered:
                run = (position.split, 1, position.element, 1)
                ((failed_split, *_),) = self._sink.element_ids((run,), ())
                failed_position = (position.ordinal, position.number_at_ordinal)
                mode = ElementIds(
                    runs=ended, failed_split=failed_split, failed_position=failed_position
                )
            self._sink.put(
                ResultBatch(
                    first_element=self._num_elements,
                    error=error,
                    done_from=before,
                    done_to=self._done_to,
                    delivered_end=self._delivered_end,
                    mode_data=mode,
                )
            )


def _concatenate_chunks(chunks: list[Chunk]) -> Chunk:
    """Return one chunk with the elements of all chunks; large elements are not copied."""
    count = sum(chunk.size for chunk in chunks)
    if len(chunks) > 1 and sum(map(wire.frame_bytes, chunks)) >= count * wire.OWN_BUFFER_BYTES:
        rows = [row for chunk in chunks for row in chunk.rows()]
        element_ids = [column for chunk in chunks if (column := chunk.compact_metadata) is not None]
        return Chunk.of_rows(rows, None, concatenate_columns(element_ids) if element_ids else None)
    return concatenate(chunks)
