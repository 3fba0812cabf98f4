"""Threads of a parallel map, and their work queue.

    input --reader thread--> batches of elements --grains--> threads --results--> consumer

A read-ahead thread reads the input, so that the threads are not idle while the consumer is busy
elsewhere. Each thread takes a *grain*: elements worth about `_GRAIN_SECONDS` of work, usually one.
Results are delivered element by element. Read-ahead is limited to a few milliseconds of work per
thread, and to `_MAX_BYTES` of inputs and results.

With AUTOTUNE the number of threads changes while they work (`thread_tuning`).

Waking a thread for a single element would cost more than many functions. The reader thread
therefore waits for space for several elements. The consumer waits for all results that it
requested, up to half of the read-ahead, while the threads work on the other half.

Locking. The reader thread and the consumer hold `reader_thread.lock` for everything here. The
threads hold no lock while they work. Each writes `rows` and `results` of one chunk, and appends
to `completed` and `_timings`, which is atomic in CPython. They read `is_stopped` and the chunk that
the consumer awaits without the lock; a thread may see a change too late, so the consumer checks
again after it has announced that it waits, and periodically afterwards.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from queue import SimpleQueue
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.element.ownership import take_ownership
from headrace.element.wire import frame_bytes
from headrace.execution.element_numbers import IdColumn
from headrace.execution.iterator import ElementIterator, element_position
from headrace.execution.thread_tuning import ThreadTuner
from headrace.execution.threads import JOIN_TIMEOUT_SECONDS, ReadAheadThread, ReadResult
from headrace.plan.user_function import UserFunction
from headrace.threads import start_thread

__all__ = ["DELIVERED", "PENDING", "FailedCall", "ParallelCalls"]

_GRAIN_SECONDS = 0.0002
_MAX_GRAIN = 256
_READ_AHEAD_SECONDS = 0.05
"""Seconds of work read ahead per thread, so that one slow element does not block the others."""
_MIN_READ_AHEAD = 2
_MAX_READ_AHEAD = 1024
_MAX_BYTES = 64 << 20
_MAX_BYTES_AT_ONCE = 1 << 20
"""Maximum bytes of inputs per read.

Anything read has left the processor's cache before a thread takes it, even if it is small; and as
many results can be taken at once as inputs were read at once.
"""
_AVERAGING_WINDOW = 64
"""Minimum number of elements over which the time per element is averaged."""


class FailedCall:
    """Stands for the result of a failed element."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException = error


class InputBatch:
    """Elements from one read of the input, with their results."""

    __slots__ = ("first", "metadata", "num_taken", "results", "rows", "states")

    def __init__(
        self,
        first: int,
        rows: list[Any],
        results: list[Any],
        states: States,
        metadata: IdColumn | None = None,
    ) -> None:
        self.first: int = first  # number of the first element
        self.rows: list[Any] = rows  # processed elements are removed
        self.results: list[Any] = results
        self.states: States = states
        self.metadata: IdColumn | None = metadata
        self.num_taken: int = (
            0  # delivered results: the first ones, or with any order only their number
        )


PENDING: Any = object()
DELIVERED: Any = object()


class ParallelCalls:
    """The threads of a parallel map and their work, from one `set_state` to the next."""

    def __init__(
        self,
        input_: ElementIterator,
        function: UserFunction,
        threads: int,
        delivered_mask: int,
        *,
        is_ordered: bool,
        owner: object = None,
        tuner: ThreadTuner | None = None,
    ) -> None:
        self._function = function
        self._tuner = tuner
        # Weak, because this object's threads would keep their iterator alive.
        self._owner = None if owner is None else weakref.ref(owner)
        self._num_threads = threads
        self._is_ordered = is_ordered
        #: Bit i: element i after the restored position was delivered before the restore.
        self._delivered_mask = delivered_mask
        self._grains: SimpleQueue[tuple[InputBatch, int, int] | None] = SimpleQueue()
        self.is_stopped: bool = False
        #: Batches with undelivered results, oldest first.
        self.batches: deque[InputBatch] = deque()
        #: In unordered mode: processed elements, in order of completion.
        self.completed: deque[tuple[InputBatch, int]] = deque()
        #: Whether the consumer waits and has to be notified when enough results are done.
        self.is_awaited: bool = False
        self._num_expected = 0  # number of results awaited in unordered mode
        #: In ordered mode: the awaited results, as batches and indices.
        self._awaited_results: list[tuple[InputBatch, int]] = []
        self.num_read: int = 0  # elements of the input read
        self.num_delivered: int = 0
        self.window: int = threads * _MIN_READ_AHEAD
        self._is_growing = True
        self.has_ended: bool = False  # whether the input has ended
        state = input_.get_state()
        #: Position after everything read: element `index` of a chunk with these states.
        self.end_position: tuple[States, int] = ((lambda index: state), 0)
        #: Begin, end, seconds on a processor and number of elements of grains.
        self._timings: deque[tuple[float, float, float, int]] = deque()
        self._seconds, self._num_timed = 0.0, 0
        self._bytes_in = 0.0  # per element
        self._bytes_out = 0.0  # per result
        self.reader_thread: ReadAheadThread = ReadAheadThread(
            input_,
            self._free_space,
            self._add_result,
            "headrace-map-reader",
            max_bytes=_MAX_BYTES_AT_ONCE,
        )
        self._is_filling = False  # the reader thread reads until there is no space
        #: Notified when the awaited results are done; the reader thread waits on another condition.
        self.ready: threading.Condition = threading.Condition(self.reader_thread.lock)
        self._threads = [self._make_thread() for _ in range(threads)]

    def _make_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="headrace-map", daemon=True)

    @property
    def owner(self) -> object:
        """Iterator for which these threads work; None if it was dropped."""
        return None if self._owner is None else self._owner()

    @property
    def is_full(self) -> bool:
        """Whether as many elements as permitted were read ahead."""
        return self.num_read - self.num_delivered >= self.window

    def start(self) -> None:
        """Start the threads. The owner must be able to close this object by now."""
        with self.reader_thread.lock:
            if self.is_stopped:
                return
            for thread in self._threads:
                start_thread(thread)
        self.reader_thread.start()

    # --- on the reader thread, with the lock held -------------------------------------------

    def _free_space(self) -> int:
        free = self.window - (self.num_read - self.num_delivered)
        self._is_filling = free >= (1 if self._is_filling else self.read_size)
        return free if self._is_filling else 0

    def _add_result(self, result: ReadResult) -> None:
        states, before = self.end_position
        if result.chunk is not None:
            chunk = result.chunk
            self._bytes_in = max(self._bytes_in * 0.9, frame_bytes(chunk.slice(0, 1)))
            rows, pending = list(chunk.rows()), [PENDING] * chunk.size
            batch = InputBatch(self.num_read, rows, pending, chunk.states, chunk.metadata)
            self.end_position = chunk.states, chunk.size
        elif result.error is not None:
            after = result.after
            batch = InputBatch(
                self.num_read,
                [None],
                [FailedCall(result.error)],
                lambda index: after if index else states(before),
            )
            self.end_position = (lambda index: after), 0
            # Nothing follows a BaseException.
            self.has_ended = not isinstance(result.error, Exception)
        else:
            after = result.after
            self.end_position = (lambda index: after), 0
            self.has_ended = True
            self.ready.notify_all()
            return
        size = len(batch.rows)
        self.num_read += size
        self.batches.append(batch)
        self._enqueue_grains(batch, size)
        if not self._num_expected:  # the consumer waits for any result
            self.ready.notify_all()

    def _enqueue_grains(self, batch: InputBatch, size: int) -> None:
        """Queue the elements of a batch in grains."""
        start = 0
        grain = self._grain_size()
        if not self._delivered_mask and batch.results[0] is PENDING:
            for start in range(0, size, grain):
                self._grains.put((batch, start, min(start + grain, size)))
            return
        while start < size:
            if self._delivered_mask >> (batch.first + start) & 1:
                batch.results[start] = DELIVERED
                batch.num_taken += 1
                self.num_delivered += 1
                start += 1
                continue
            if batch.results[start] is not PENDING:  # an error of the input
                if not self._is_ordered:
                    self.completed.append((batch, start))
                start += 1
                continue
            stop = start + 1
            while (
                stop < min(start + grain, size)
                and not self._delivered_mask >> (batch.first + stop) & 1
            ):
                stop += 1
            self._grains.put((batch, start, stop))
            start = stop

    def _grain_size(self) -> int:
        while self._timings:
            begin, end, cpu_seconds, count = self._timings.popleft()
            seconds = end - begin
            if self._tuner is not None and self._tuner.observe(begin, end, cpu_seconds, count):
                self._resize(self._tuner.threads)
            if self._num_timed > _AVERAGING_WINDOW:
                self._seconds, self._num_timed = self._seconds / 2, self._num_timed // 2
            self._seconds += seconds
            self._num_timed += count
        if not self._num_timed:
            return 1
        return int(
            max(1, min(_GRAIN_SECONDS * self._num_timed / (self._seconds + 1e-9), _MAX_GRAIN))
        )

    def _resize(self, threads: int) -> None:
        """Start threads, or end some when they have processed what is queued."""
        for _ in range(threads, self._num_threads):
            self._grains.put(None)
        alive = [thread for thread in self._threads if thread.is_alive()]
        started = [self._make_thread() for _ in range(self._num_threads, threads)]
        # Known before they start, so that `stop` ends all of them.
        self._threads, self._num_threads = alive + started, threads
        for thread in started:
            start_thread(thread)

    # --- on the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        grains, clock, cpu_clock = self._grains, time.perf_counter, time.thread_time
        tuner = self._tuner
        while (grain := grains.get()) is not None:
            if self.is_stopped:
                continue
            begin, cpu_begin = clock(), cpu_clock()
            batch, start, stop = grain
            self._call_function(batch, start, stop)
            self._timings.append((begin, clock(), cpu_clock() - cpu_begin, stop - start))
            grain = batch = None  # type: ignore[assignment]  # not kept alive while waiting
            if tuner is not None:
                tuner.measure_lock()

    def _call_function(self, batch: InputBatch, start: int, stop: int) -> None:
        rows, results, call = batch.rows, batch.results, self._function
        fn = call.fn
        for index in range(start, stop):
            row = rows[index]
            try:
                results[index] = take_ownership(fn(*row) if type(row) is tuple else fn(row))
            except BaseException as error:
                results[index] = self._make_failed_call(error, batch, index)
            rows[index] = row = None
            if not self._is_ordered:
                self.completed.append((batch, index))
        if self.is_awaited and self._has_enough():
            with self.reader_thread.lock:
                self.ready.notify_all()

    def _make_failed_call(self, error: BaseException, batch: InputBatch, index: int) -> FailedCall:
        try:
            number = element_position(batch.states(index), batch.first + index)
            return FailedCall(self._function.wrap_error(error, number, batch.rows[index]))
        except BaseException as failure:
            return FailedCall(failure)

    def _has_enough(self) -> bool:
        if self._is_ordered:
            return all(
                batch.results[index] is not PENDING for batch, index in self._awaited_results
            )
        return len(self.completed) >= self._num_expected

    # --- for the consumer -----------------------------------------------------------------------

    @property
    def read_size(self) -> int:
        """Number of elements to request at once: most of the window stays with the threads."""
        return max(1, self.window // 8)

    def await_results(self, limit: int) -> None:
        """Request a notification when about `limit` results are done. Requires the lock."""
        # Few while the window grows, which happens as results are taken: the first results come
        # soon.
        max_expected = self.read_size if self._is_growing else max(1, self.window // 2)
        self._num_expected = min(limit, max_expected, self.num_read - self.num_delivered)
        if self._is_ordered:
            self._awaited_results = self._first_and_last(self._num_expected)
        self.is_awaited = True

    def _first_and_last(self, count: int) -> list[tuple[InputBatch, int]]:
        """Return the positions of the next result and of the last of the next `count`."""
        found: list[tuple[InputBatch, int]] = []
        for batch in self.batches:
            if not found:
                found.append((batch, batch.num_taken))
            remaining = len(batch.results) - batch.num_taken
            if count <= remaining:
                found.append((batch, batch.num_taken + count - 1))
                break
            count -= remaining
        return found

    def record_delivered(self, chunk: Chunk | None, count: int) -> None:
        """Count delivered elements, and let the reader thread continue. Requires the lock."""
        self.num_delivered += count
        if chunk is not None:
            # Measure one element: measuring each would take longer than many functions do.
            self._bytes_out = max(self._bytes_out * 0.9, frame_bytes(chunk.slice(0, 1)))
        seconds_each = self._seconds / self._num_timed if self._num_timed else _READ_AHEAD_SECONDS
        wanted = max(
            _MIN_READ_AHEAD, min(_READ_AHEAD_SECONDS / (seconds_each + 1e-9), _MAX_READ_AHEAD)
        )
        affordable = _MAX_BYTES / (self._bytes_in + self._bytes_out + 1)
        threads = self._num_threads
        max_window = min(threads * wanted, affordable)
        self._is_growing = 2 * self.window < max_window
        self.window = int(max(threads, min(max_window, 2 * self.window)))
        if self._free_space():
            self.reader_thread.changed.notify_all()

    def stop(self) -> bool:
        """Stop all threads and wait briefly; return whether the input is free to use."""
        with self.reader_thread.lock:
            self.is_stopped = True
            self.ready.notify_all()
        is_free = self.reader_thread.stop()
        for _ in self._threads:
            self._grains.put(None)
        deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return is_free
