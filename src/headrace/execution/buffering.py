"""The iterator of `prefetch`, which reads elements ahead.

Thread safety: the results and their counters are changed by the reader thread and by the consumer,
under the thread's `changed` condition. Only the consumer uses the position of the next element.
"""

from __future__ import annotations

import time
from collections import deque

from headrace.element.chunk import Chunk, States
from headrace.element.wire import frame_bytes
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.threads import ReadAheadThread, ReadResult, WaitWarning
from headrace.plan.buffering import Prefetch
from headrace.plan.node import AUTOTUNE
from headrace.plan.user_function import step_name

__all__ = ["PrefetchIterator"]

_AUTOTUNE_BYTES = 64 << 20
_AUTOTUNE_ELEMENTS = 1 << 16
_MIN_CHUNKS = 2
_MAX_RESULTS = 1024
_HANDOVER_SECONDS = 5e-5
"""Approximate time to hand an element from one thread to another, including both GIL switches."""
_MAX_INLINE_SECONDS = 1e-2
"""Accumulated excess time of elements after which a thread reads ahead. With a tenth of it, a few
delays by other processes started a thread for the rest of the epoch, although elements were cheap.
"""


@make_iterator.register(Prefetch)
def _make_prefetch(node: Prefetch, context: Context) -> ElementIterator:
    if node.buffer_size == 0:
        return make_iterator(node.input, context)
    return PrefetchIterator(node, context)


class PrefetchIterator(ElementIterator):
    """Reads ahead on a thread that starts with the first read.

    With a fixed buffer size it holds at most that many elements. With AUTOTUNE it holds at least
    two chunks, and up to 64 MiB. Its state is the input's: its elements are at positions of the
    input.
    """

    def __init__(self, node: Prefetch, context: Context) -> None:
        self._node = node
        self._context = context
        self._buffer_size = node.buffer_size
        #: Read-ahead elements that one read may return.
        self._read_size = 1 if self._buffer_size == AUTOTUNE else max(1, self._buffer_size // 8)
        self._input = make_iterator(node.input, context)
        self._reader_thread: ReadAheadThread | None = None
        #: Excess seconds of elements made on request, or None if a thread reads ahead.
        self._inline_seconds: float | None = 0.0 if node.only_if_slow else None
        self._reset()

    @property
    def can_read_ahead(self) -> bool:
        # AUTOTUNE requests reading ahead wherever possible.
        return self._buffer_size == AUTOTUNE or self._input.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return self._read_size

    @property
    def is_ready(self) -> bool:
        return bool(self._results)

    def _reset(self) -> None:
        self._results: deque[ReadResult] = deque()
        self._num_buffered = 0  # elements in `_results`
        self._num_buffered_errors = 0  # in `_results`
        self._buffered_bytes = 0
        self._offset = 0  # elements consumed of the first result
        self._is_awaited = False
        self._has_ended = False
        #: Position of the next element: index `_index` in a chunk with these states. None means the
        #: position of the input, which no thread reads.
        self._states: States | None = None
        self._index = 0

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._has_ended:
            return None
        if self._inline_seconds is not None:
            return self._read_inline(self._inline_seconds, limit)
        reader_thread = self._reader_thread or self._start()
        with reader_thread.lock:
            result = self._wait(reader_thread)
            if result is None or result.chunk is None:
                self._raise_or_end(reader_thread, result)
                return None
            chunk, start = result.chunk, self._offset
            stop = min(start + limit, chunk.size)
            self._num_buffered -= stop - start
            if stop == chunk.size:
                self._results.popleft()
                self._buffered_bytes -= self._bytes_of(chunk)
                self._offset = 0
            else:
                self._offset = stop
            self._states, self._index = chunk.states, stop
            if self._free_space():
                reader_thread.changed.notify_all()
        return chunk.slice(start, stop)

    def _read_inline(self, inline_seconds: float, limit: int) -> Chunk | None:
        """Return elements made on request, and decide whether a thread is worthwhile."""
        start = time.perf_counter()
        chunk = self._input.next_chunk(min(limit, self._read_size))
        seconds = time.perf_counter() - start
        if chunk is not None:
            # One slow element may be due to a busy machine, so its time is capped; earlier times
            # decay.
            inline_seconds += min(seconds / chunk.size, 0.6 * _MAX_INLINE_SECONDS) * chunk.size
            self._inline_seconds = max(0.0, inline_seconds - chunk.size * _HANDOVER_SECONDS)
            if self._inline_seconds > _MAX_INLINE_SECONDS:
                self._inline_seconds = None
                self._start()
        return chunk

    def _start(self) -> ReadAheadThread:
        state = self._input.get_state()
        self._states, self._index = (lambda index: state), 0
        max_elements = _AUTOTUNE_ELEMENTS if self._buffer_size == AUTOTUNE else self._buffer_size
        self._reader_thread = ReadAheadThread(
            self._input,
            self._free_space,
            self._store_result,
            "headrace-prefetch",
            max_elements=max(1, min(1024, max_elements // _MIN_CHUNKS)),
        )
        self._reader_thread.start()
        return self._reader_thread

    def _wait(self, reader_thread: ReadAheadThread) -> ReadResult | None:
        """Return the first result, or None if the thread has ended without one."""
        if not self._results:
            node = self._node
            wait = WaitWarning(f"{step_name(node.input)}, the input of {step_name(node)}")
            # Count the next result as consumed, so that the thread continues immediately and does
            # not wait until this thread has woken up.
            self._is_awaited = True
            try:
                while not self._results:
                    if not reader_thread.is_reading:
                        return None
                    wait.wait(reader_thread.changed)
            finally:
                self._is_awaited = False
        return self._results[0]

    def _raise_or_end(self, reader_thread: ReadAheadThread, result: ReadResult | None) -> None:
        """Raise an error of the reader thread, or end."""
        if result is None:
            self._has_ended = True
            return
        after = result.after
        if result.error is None:
            self._states, self._index = (lambda index: after), 0
            self._has_ended = True
            return
        self._results.popleft()
        self._num_buffered_errors -= 1
        reader_thread.changed.notify_all()
        if isinstance(result.error, Exception):
            self._states, self._index = (lambda index: after), 0
        else:
            self._has_ended = True  # not an Exception: the iterator has to be built again
        raise result.error

    # --- on the thread, with the lock held ------------------------------------------------------

    def _free_space(self) -> int:
        if self._buffer_size != AUTOTUNE:
            # An eighth is refilled at a time: a thread that wakes up for each element gains
            # nothing.
            space = (
                self._buffer_size
                - self._read_size
                + 1
                - self._num_buffered
                - self._num_buffered_errors
                + self._is_awaited
            )
            return space if space > self._buffer_size // 8 else 0
        if len(self._results) < _MIN_CHUNKS:
            return _AUTOTUNE_ELEMENTS
        # Errors take no memory, but an input may fail forever.
        if len(self._results) > _MAX_RESULTS:
            return 0
        if self._buffered_bytes >= _AUTOTUNE_BYTES:
            return 0
        return max(0, _AUTOTUNE_ELEMENTS - self._num_buffered)

    def _store_result(self, result: ReadResult) -> None:
        self._results.append(result)
        self._num_buffered_errors += result.error is not None
        if result.chunk is not None:
            self._num_buffered += result.chunk.size
            self._buffered_bytes += self._bytes_of(result.chunk)

    def _bytes_of(self, chunk: Chunk) -> int:
        # A fixed buffer size limits the number of elements, not their bytes.
        return frame_bytes(chunk) if self._buffer_size == AUTOTUNE else 0

    # --- state ----------------------------------------------------------------------------------

    def get_state(self) -> State:
        if self._states is None:
            return self._input.get_state()
        return self._states(self._index)

    def set_state(self, state: State) -> None:
        self._stop()
        self._reset()
        self._input.set_state(state)

    def skip(self, count: int) -> int:
        if self._states is not None:
            self.set_state(self.get_state())
        return self._input.skip(count)

    def _stop(self) -> None:
        reader_thread = self._reader_thread
        if reader_thread is not None and not reader_thread.stop():
            reader_thread.abandon(step_name(self._node.input))
            self._input = make_iterator(self._node.input, self._context)
        # Last: after an interruption before this line, the thread is stopped again.
        self._reader_thread = None

    def close(self) -> None:
        self._stop()
        self._reset()
        self._has_ended = True
        self._input.close()
