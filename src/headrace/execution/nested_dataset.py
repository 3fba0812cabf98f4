"""An open dataset of an interleave, and the threads that read such datasets ahead.

Thread safety: a dataset belongs to the consumer or to a thread. A thread owns its iterator and
chunk sizer while the dataset is busy, from `DatasetReadAhead.read` until the result is set.
`result`, `is_busy` and `is_abandoned` change under the lock of the threads; the consumer reads and
clears a result without it, because no thread uses the dataset then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from headrace.element.chunk import Chunk, States
from headrace.execution.element_numbers import BufferedChunk, IdColumn, nest_ids
from headrace.execution.input_buffer import ChunkSizer
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.thread_tuning import ThreadTuner
from headrace.execution.threads import (
    JOIN_TIMEOUT_SECONDS,
    ReadResult,
    ThreadPool,
    WaitWarning,
    close_quietly,
)

__all__ = ["ClosedError", "DatasetReadAhead", "NestedDataset", "OpenResult"]

_logger = logging.getLogger("headrace")


class ClosedError(Exception):
    """Another thread has closed the object of a wait."""


class NestedDataset:
    """An open dataset: its buffered elements, and the state before its next element.

    Args:
        outer_states: States of the outer input; that of index 0 is before the outer element.
        number: Number of the outer element in the outer input.
        iterator: Iterator of the dataset's elements.
        chunk_sizer: Determines read sizes for reading ahead.
        outer_id: Metadata of the outer element.
    """

    __slots__ = (
        "buffered",
        "chunk_sizer",
        "index",
        "is_abandoned",
        "is_busy",
        "iterator",
        "number",
        "outer_id",
        "outer_states",
        "result",
        "rows",
        "split",
        "states",
    )

    def __init__(
        self,
        outer_states: States,
        number: int,
        iterator: ElementIterator,
        chunk_sizer: ChunkSizer,
        outer_id: IdColumn,
    ) -> None:
        self.outer_states: States = outer_states
        self.number: int = number
        self.outer_id: IdColumn = outer_id
        #: Split of all its elements, if splits are tracked.
        self.split: int | None = None if outer_id.dtype.names is None else int(outer_id["split"][0])
        self.iterator: ElementIterator = iterator
        self.chunk_sizer: ChunkSizer = chunk_sizer
        #: Buffered chunk; elements before `index` are consumed.
        self.buffered: BufferedChunk | None = None
        #: Lazy rows that come next, if they were requested; else None.
        self.rows: Iterator[Any] | None = None
        #: State before the next element is `states(index)`.
        self.states: States = _no_states
        self.index: int = 0
        self._set_position(iterator.get_state())
        self.is_busy: bool = False  # a thread reads it, or will
        self.is_abandoned: bool = False  # the reading thread closes it
        self.result: ReadResult | None = None  # result of a thread's read

    @property
    def num_buffered(self) -> int:
        """Number of elements that can be taken without reading."""
        return 0 if self.buffered is None else self.buffered.chunk.size - self.index

    @property
    def is_ready(self) -> bool:
        """Whether the next result is available without waiting."""
        return self.result is not None

    def _set_position(self, state: State) -> None:
        self.states, self.index = (lambda index: state), 0

    def take(self, count: int) -> tuple[BufferedChunk, int]:
        """Take buffered elements; return their chunk and the index of the first."""
        buffered, start = self.buffered, self.index
        assert buffered is not None
        self.index = start + count
        if self.index == buffered.chunk.size:
            self.buffered = None
        return buffered, start

    def read(self, limit: int, may_read_more: bool = False) -> bool:
        """Fill the buffer; return False at the end."""
        if self.rows is not None:
            states, index = self.states, self.index
            for row in self.rows:
                self._set_buffered(Chunk.of_rows([row], lambda after: states(index + after)))
                return True
            self.rows = None
        iterator = self.iterator
        chunk = (
            self.chunk_sizer.read_chunk(iterator, limit)
            if may_read_more
            else iterator.next_chunk(limit)
        )
        if chunk is None:
            return False
        self._set_buffered(chunk)
        return True

    def start_lazy_rows(self) -> bool:
        """Set `rows` to lazy rows; return False at the end."""
        if self.rows is None:
            rows_and_states = self.iterator.lazy_rows()
            if rows_and_states is None:
                return False
            (self.rows, self.states), self.index = rows_and_states, 0
        return True

    def skip(self, count: int) -> int:
        """Skip elements that are not buffered; return how many were skipped."""
        if self.rows is not None:
            self.set_state(self.states(self.index))
        num_skipped = self.iterator.skip(count)
        self._set_position(self.iterator.get_state())
        return num_skipped

    def receive(self) -> bool:
        """Buffer a thread's result, or raise its error; return False at the end."""
        result = self.result
        assert result is not None
        if result.error is not None:
            raise result.error
        if result.chunk is None:
            return False
        self.result = None
        self._set_buffered(result.chunk)
        return True

    def _set_buffered(self, chunk: Chunk) -> None:
        if chunk.metadata is not None:
            chunk = chunk.with_metadata(nest_ids(self.outer_id, chunk.metadata))
            split = None
        else:
            split = self.split  # one number, until the neighbors in the output are known
        self.buffered, self.states, self.index = BufferedChunk(chunk, split), chunk.states, 0

    def skip_error(self) -> None:
        """Move past an error that is being raised."""
        result, self.result, self.rows = self.result, None, None
        self._set_position(self.iterator.get_state() if result is None else result.after)

    def set_state(self, state: State) -> None:
        """Restore a state."""
        self.rows = None
        self.iterator.set_state(state)
        self._set_position(state)

    def close(self) -> None:
        """Close the iterator, which no thread may be using."""
        self.buffered = self.rows = None
        self.iterator.close()


class OpenResult(NamedTuple):
    """Result of opening the dataset of the next outer element."""

    outer_states: States
    """States of the outer input; that of index 0 is before the outer element."""
    number: int
    """Number of the outer element in the outer input."""
    dataset: NestedDataset | None = None
    error: Exception | None = None
    is_end: bool = False
    """Whether the outer input has ended."""


class DatasetReadAhead:
    """Threads that read datasets ahead, one chunk at a time.

    Args:
        threads: Maximum number of threads.
        tuner: Changes this number; None keeps it.
    """

    def __init__(self, threads: int, tuner: ThreadTuner | None = None) -> None:
        self._threads = ThreadPool(threads, "headrace-interleave")
        self._tuner = tuner
        self._lock = threading.RLock()  # acquired directly, see `ReadAheadThread.lock`
        self._changed = threading.Condition(self._lock)
        self._is_closed = False

    def stop_tuning(self, threads: int) -> None:
        """Use a fixed number of threads from now on."""
        with self._lock:
            self._tuner = None
            self._threads.resize(threads)

    def read(self, dataset: NestedDataset) -> None:
        """Start reading the next chunk of a dataset."""
        if self._is_closed:
            return
        dataset.is_busy = True
        self._threads.submit(lambda: self._read(dataset))

    def _read(self, dataset: NestedDataset) -> None:
        chunk: Chunk | None = None
        error: BaseException | None = None
        after: State = None
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        if not self._is_closed:
            try:
                chunk = dataset.chunk_sizer.next_chunk(dataset.iterator)
                if chunk is None:
                    after = dataset.iterator.get_state()
            except Exception as read_error:
                error, after = read_error, dataset.iterator.get_state()
            except BaseException as interruption:
                error = interruption
        with self._lock:
            dataset.result = ReadResult(chunk, error, after)
            dataset.is_busy = False
            is_abandoned = dataset.is_abandoned
            tuner = self._tuner
            if tuner is not None and chunk is not None and not self._is_closed:
                cpu_seconds = time.thread_time() - cpu_begin
                if tuner.observe(begin, time.perf_counter(), cpu_seconds, chunk.size):
                    self._threads.resize(tuner.threads)
            self._changed.notify_all()
        if is_abandoned:
            close_quietly(dataset.iterator)
        if tuner is not None:
            tuner.measure_lock()

    def wait_for(self, dataset: NestedDataset, step: str) -> None:
        """Wait for the result of a dataset; start reading if necessary."""
        if dataset.result is None and not dataset.is_busy:
            self.read(dataset)
        self._wait(lambda: dataset.is_ready, f"the dataset of element {dataset.number} of {step}")

    def wait_for_any(self, datasets: Sequence[NestedDataset], step: str) -> None:
        """Wait until one of these datasets has a result."""
        for dataset in datasets:
            if dataset.result is None and not dataset.is_busy:
                self.read(dataset)
        self._wait(lambda: any(dataset.is_ready for dataset in datasets), f"a dataset of {step}")

    def _wait(self, is_over: Callable[[], bool], awaited: str) -> None:
        if is_over():
            return
        wait = WaitWarning(awaited)
        with self._lock:
            while not is_over() and not self._is_closed:
                wait.wait(self._changed)
        if not is_over():
            raise ClosedError

    def close(self, datasets: Sequence[NestedDataset], step: str) -> None:
        """Close these datasets; a thread that does not return closes its dataset later."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        self._threads.shutdown()
        busy = self._wait_until_idle(datasets)
        for dataset in busy:
            # Closing the iterator from here ends its wait for a peer.
            close_quietly(dataset.iterator)
        busy = self._wait_until_idle(busy)
        if busy:
            _logger.warning(
                "%s: %d of its datasets are still busy in a function; their threads end when it "
                "returns",
                step,
                len(busy),
            )
        for dataset in datasets:
            if dataset not in busy:
                dataset.close()

    def _wait_until_idle(self, datasets: Sequence[NestedDataset]) -> list[NestedDataset]:
        """Return the datasets still in use after a short wait; their threads close them."""
        deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
        with self._lock:
            while any(dataset.is_busy for dataset in datasets) and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            busy = [dataset for dataset in datasets if dataset.is_busy]
            for dataset in busy:
                dataset.is_abandoned = True
        return busy


def _no_states(index: int) -> State:
    raise AssertionError("the position is not known yet")
