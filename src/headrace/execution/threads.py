"""Threads of a plan: a read-ahead thread, a pool that runs jobs, and waits that log warnings."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Condition
from types import CodeType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from headrace.element.chunk import Chunk
from headrace.execution.input_buffer import ChunkSizer
from headrace.execution.iterator import ElementIterator, State
from headrace.threads import start_thread

__all__ = [
    "JOIN_TIMEOUT_SECONDS",
    "ReadAheadThread",
    "ReadResult",
    "ThreadPool",
    "WaitWarning",
    "close_quietly",
    "input_wait",
    "input_wait_code",
]

# --- Read-ahead thread ----------------------------------------------------------------------------
#
# Thread safety: the thread uses the iterator exclusively from `start` until `stop` has returned
# True. Everything else changes under `changed`, including what the owner stores of the results.

JOIN_TIMEOUT_SECONDS = 0.2
"""Seconds for a thread to notice that it has been stopped."""
_MAX_SLOW_ELEMENTS = 16
"""Maximum number of slow elements per read; each may be large."""

_logger = logging.getLogger("headrace")


class ReadResult(NamedTuple):
    """Result of one read: elements, an error, or, if both are None, the end."""

    chunk: Chunk | None
    error: BaseException | None
    after: State
    """State of the input after an error or at the end; chunks contain their states."""


class ReadAheadThread:
    """Reads an iterator ahead on a separate thread, as far as there is free space.

    The thread is a daemon, and joins have a timeout: if a user's function or a generator does not
    return, the thread is abandoned, and closes the iterator when it returns.

    Args:
        input_: Iterator to read. No other code may use it before `stop` has returned True.
        free_space: Returns how many elements to read; 0 waits. Called with `lock` held.
        store_result: Stores a result. Called with `lock` held.
        name: Name of the thread.
        max_elements: Maximum number of elements per read.
        max_bytes: Approximate maximum size of a read.
    """

    def __init__(
        self,
        input_: ElementIterator,
        free_space: Callable[[], int],
        store_result: Callable[[ReadResult], None],
        name: str,
        max_elements: int = 1024,
        max_bytes: int = 1 << 18,
    ) -> None:
        self._input = input_
        self._free_space = free_space
        self._store_result = store_result
        self._chunk_sizer = ChunkSizer(max_elements=max_elements, max_bytes=max_bytes)
        #: Protects the state that `free_space` and `store_result` use. Acquired directly and not
        #: through the condition: an interruption between the two steps would leave it locked
        #: forever.
        self.lock: threading.RLock = threading.RLock()
        #: Notified when that state changes.
        self.changed: threading.Condition = threading.Condition(self.lock)
        self._is_stopped = False
        self._has_returned = False
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start reading. The owner must be able to close this thread by now."""
        with self.lock:
            if not self._is_stopped:
                start_thread(self._thread)

    @property
    def owner(self) -> object:
        """Object that stores the results."""
        return getattr(self._store_result, "__self__", None)

    @property
    def is_reading(self) -> bool:
        """Whether more results may follow: not stopped, no end and no BaseException."""
        return not self._has_returned and not self._is_stopped

    def stop(self) -> bool:
        """Stop the thread and wait briefly; return whether the iterator is free to use."""
        with self.lock:
            self._is_stopped = True
            self.changed.notify_all()
            if self._thread.ident is None:
                self._has_returned = True
                return True
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_SECONDS)
        return self._has_returned

    def abandon(self, step: str) -> None:
        """Abandon a thread that did not stop; it closes the iterator when it returns.

        Args:
            step: Description of the step for the warning.
        """
        with self.lock:
            if self._has_returned:
                return
            self._is_abandoned = True
        # Closing the iterator from here ends its wait for a peer.
        close_quietly(self._input)
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_SECONDS)
        if not self._has_returned:
            _logger.warning(
                "%s is still busy in a function; its thread ends when the function returns", step
            )

    def _run(self) -> None:
        try:
            while self._read():
                pass
        finally:
            with self.lock:
                self._has_returned = True
                is_abandoned = self._is_abandoned
                self.changed.notify_all()
            if is_abandoned:
                close_quietly(self._input)

    def _was_stopped(self) -> bool:
        return self._is_stopped

    def _read(self) -> bool:
        """Read once; return whether to continue."""
        with self.lock:
            while not self._is_stopped and not (space := self._free_space()):
                self.changed.wait()
            if self._is_stopped:
                return False
        chunk_sizer, input_ = self._chunk_sizer, self._input
        chunk: Chunk | None = None
        error: BaseException | None = None
        after: State = None
        chunk_sizer.limit = min(chunk_sizer.limit, space)
        try:
            # Read several elements if they are made ahead anyway, to avoid waking the consumer for
            # each.
            min_elements = (
                1 if input_.can_read_ahead else min(input_.preferred_limit, _MAX_SLOW_ELEMENTS)
            )
            chunk = chunk_sizer.read_chunk(input_, min(min_elements, space))
            if chunk is None:
                after = input_.get_state()
        except Exception as read_error:
            error, after = read_error, input_.get_state()
        except BaseException as interruption:
            error = interruption
        with self.lock:
            if self._was_stopped():
                # The elements are read again from the last state.
                return False
            self._store_result(ReadResult(chunk, error, after))
            self.changed.notify_all()
        return chunk is not None or isinstance(error, Exception)


def close_quietly(iterator: ElementIterator) -> None:
    """Close an abandoned iterator that another thread may be using.

    An object in use, such as a running generator, cannot be closed from here. An error that the
    close causes in the other thread is ignored.
    """
    try:
        iterator.close()
    except Exception:
        _logger.debug("failed to close an abandoned iterator", exc_info=True)


# --- Thread pool without unbounded joins ----------------------------------------------------------
#
# Rule 1. The threads are daemons: one that is stuck in a user's function blocks neither `close` nor
#         the exit of the interpreter. It ends when the function returns.
# Rule 2. A job raises nothing: it passes errors of any kind to the code that waits for it.

Job: TypeAlias = Callable[[], None]


class ThreadPool:
    """Up to `size` threads, started on demand, that run jobs in order.

    Args:
        size: Maximum number of threads.
        name: Name of the threads.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, job: Job) -> None:
        """Queue a job to run on a thread, after those submitted before it."""
        if len(self._threads) < self._size and not self._idle.acquire(blocking=False):
            self._start_thread()
        self._jobs.put(job)

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=_run_jobs, args=(self._jobs, self._idle), name=self._name, daemon=True
        )
        self._threads.append(thread)
        start_thread(thread)

    def resize(self, size: int) -> None:
        """Start threads, or end some after the jobs submitted before. Not after `shutdown`."""
        self._size = size
        for _ in self._threads[size:]:
            self._jobs.put(None)
        del self._threads[size:]
        while len(self._threads) < size:
            self._start_thread()

    def shutdown(self) -> None:
        """End each thread after the submitted jobs, without waiting."""
        for _ in self._threads:
            self._jobs.put(None)


def _run_jobs(jobs: SimpleQueue[Job | None], idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        job()
        job = None  # not kept alive while this thread waits
        idle.release()


# --- Waits that log a warning when they last long -------------------------------------------------

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

input_wait_code: set[CodeType] = set()
"""Code of functions in which a step waits for its input."""


def input_wait(function: _FunctionT) -> _FunctionT:
    """Mark a function in which a step waits for its input, such as workers, for profilers."""
    input_wait_code.add(function.__code__)
    return function


_MIN_WAIT_SECONDS = 0.01
_FIRST_WARNING_SECONDS = 10.0
_REPEAT_WARNING_SECONDS = 60.0


class WaitWarning:
    """A wait without progress that logs a warning after 10 s, and then every minute.

    Args:
        awaited: Object of the wait, for the warning: the step and where the user created it.
        clock: Returns the time in seconds.
        warn: Called with each warning.
    """

    __slots__ = ("_awaited", "_clock", "_next_warning", "_start", "_warn")

    def __init__(
        self,
        awaited: str,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = _logger.warning,
    ) -> None:
        self._awaited = awaited
        self._clock = clock
        self._warn = warn
        self._start = clock()
        self._next_warning = self._start + _FIRST_WARNING_SECONDS

    @input_wait
    def wait(self, changed: Condition) -> None:
        """Wait on a held condition until it is notified, or until a warning is due.

        The condition is always held on return.
        """
        try:
            changed.wait(max(0.0, self._next_warning - self._clock()))
        except BaseException:
            # A signal while the lock is reacquired leaves it free. The caller would then fail to
            # release the condition, and hide the interruption.
            with contextlib.suppress(RuntimeError):
                changed.release()
            changed.acquire()
            raise
        self.warn_if_due()

    @input_wait
    def wait_with_backoff(self, changed: Condition) -> None:
        """Wait like `wait`, but return at the latest after as long as was waited so far.

        For changes without notification: they are found after at most twice the time.
        """
        now = self._clock()
        changed.wait(
            max(0.0, min(self._next_warning - now, max(now - self._start, _MIN_WAIT_SECONDS)))
        )
        self.warn_if_due()

    def warn_if_due(self) -> None:
        """Log a warning if it is due."""
        now = self._clock()
        if now >= self._next_warning:
            self._next_warning = now + _REPEAT_WARNING_SECONDS
            self._warn(f"waiting for {self._awaited}: no element for {now - self._start:.0f} s")
