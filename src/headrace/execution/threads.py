"""Threads of a plan: one that reads an iterator ahead, several that run jobs, and waits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Condition
from typing import NamedTuple, TypeAlias

from headrace.element.chunk import Chunk
from headrace.execution.intake import Pace
from headrace.execution.iterator import ElementIterator, State
from headrace.threads import start_thread

__all__ = ["PATIENCE", "Crew", "Feeder", "Item", "LongWait", "close_quietly"]

# --- A thread that reads an iterator ahead of its use ---------------------------------------------
#
# Who may touch what. The iterator is the thread's from `start` until `stop` has returned True. All
# else changes under `changed`, which the owner holds as well, for what it keeps of what was read.

PATIENCE = 0.2
"""Seconds for a thread to notice that it is not needed any more."""
_HANDFUL = 16
"""Slow elements that are asked for at once, at the most; each may be large."""

_logger = logging.getLogger("headrace")


class Item(NamedTuple):
    """What a thread read at once: elements, an error, or, if both are None, the end."""

    chunk: Chunk | None
    error: BaseException | None
    after: State
    """Where the input stands after an error or at the end. Chunks know their places."""


class Feeder:
    """Reads an iterator on a thread of its own, as far as there is room.

    The thread is a daemon, and nobody waits for it without bound: where a user's function or a
    generator does not return, it is left to end by itself, and closes the iterator when it does.

    Args:
        input_: What is read. Nobody else may use it before `stop` has returned True.
        room: Says how many elements to ask for; 0: wait. Called with `lock` held.
        put: Takes what was read. Called with `lock` held.
        name: Name of the thread.
        most: The most elements to ask for at once.
        most_bytes: About the most memory that these should take.
    """

    def __init__(
        self,
        input_: ElementIterator,
        room: Callable[[], int],
        put: Callable[[Item], None],
        name: str,
        most: int = 1024,
        most_bytes: int = 1 << 18,
    ) -> None:
        self._input = input_
        self._room = room
        self._put = put
        self._pace = Pace(most=most, most_bytes=most_bytes)
        #: Held where what `room` and `put` look at changes. It is taken as it is, not by way of the
        #: condition: an interruption between the two would leave it locked for ever.
        self.lock = threading.RLock()
        #: Notified when that has changed.
        self.changed = threading.Condition(self.lock)
        self._is_stopped = False
        self._has_returned = False
        self._is_left = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to read. Whoever may close what owns this knows of it by now."""
        with self.lock:
            if not self._is_stopped:
                start_thread(self._thread)

    @property
    def is_reading(self) -> bool:
        """Whether more may come: not stopped, and met neither the end nor a BaseException."""
        return not self._has_returned and not self._is_stopped

    def stop(self) -> bool:
        """Have the thread stop, and wait a moment; return whether the iterator is free to use."""
        with self.lock:
            self._is_stopped = True
            self.changed.notify_all()
            if self._thread.ident is None:
                self._has_returned = True
                return True
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)
        return self._has_returned

    def leave(self, step: str) -> None:
        """Leave the iterator to the thread, which did not stop: it closes it when it returns.

        Args:
            step: The step that is left to end by itself, for the warning.
        """
        with self.lock:
            if self._has_returned:
                return
            self._is_left = True
        # A wait for a peer ends when it is closed from here.
        close_quietly(self._input)
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)
        if not self._has_returned:
            _logger.warning(
                "%s does not return; its thread goes on until it does, and ends then", step
            )

    def _run(self) -> None:
        try:
            while self._read():
                pass
        finally:
            with self.lock:
                self._has_returned = True
                is_left = self._is_left
                self.changed.notify_all()
            if is_left:
                close_quietly(self._input)

    def _was_stopped(self) -> bool:
        return self._is_stopped

    def _read(self) -> bool:
        """Read once; return whether to go on."""
        with self.lock:
            while not self._is_stopped and not (room := self._room()):
                self.changed.wait()
            if self._is_stopped:
                return False
        pace, input_ = self._pace, self._input
        chunk: Chunk | None = None
        error: BaseException | None = None
        after: State = None
        pace.limit = min(pace.limit, room)
        try:
            # Of what is made ahead anyway some at a time: nobody is to be woken for each of them.
            made = 1 if input_.reads_ahead_freely else min(input_.at_hand, _HANDFUL)
            chunk = pace.ask(input_, min(made, room))
            if chunk is None:
                after = input_.get_state()
        except Exception as failure:
            error, after = failure, input_.get_state()
        except BaseException as escape:
            error = escape
        with self.lock:
            if self._was_stopped():
                # What was read is read again by whoever goes on from the last state.
                return False
            self._put(Item(chunk, error, after))
            self.changed.notify_all()
        return chunk is not None or isinstance(error, Exception)


def close_quietly(iterator: ElementIterator) -> None:
    """Close an iterator that another thread may be in, and that nobody waits for any more.

    What is used at this moment, a generator that runs, cannot be closed from here; an error that
    this makes in the other thread is read by nobody.
    """
    try:
        iterator.close()
    except Exception:
        _logger.debug("an iterator could not be closed", exc_info=True)


# --- Threads that run jobs, and are never waited for without bound --------------------------------
#
# Rule 1. The threads are daemons: one that is stuck in a user's function holds up neither `close`
#         nor the end of the interpreter. It ends by itself when the function returns.
# Rule 2. A job lets nothing escape: it hands errors, of whatever kind, to whoever waits for it.

Job: TypeAlias = Callable[[], None]


class Crew:
    """Up to `size` threads, started as they are needed, that run jobs in turn.

    Args:
        size: The most threads.
        name: Their name.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, job: Job) -> None:
        """Have a thread run a job, after those that were submitted before it."""
        if len(self._threads) < self._size and not self._idle.acquire(blocking=False):
            thread = threading.Thread(
                target=_work, args=(self._jobs, self._idle), name=self._name, daemon=True
            )
            self._threads.append(thread)
            start_thread(thread)
        self._jobs.put(job)

    def dismiss(self) -> None:
        """Let each thread end after the jobs that were submitted; wait for none."""
        for _ in self._threads:
            self._jobs.put(None)


def _work(jobs: SimpleQueue[Job | None], idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        job()
        job = None  # not kept alive while this thread waits
        idle.release()


# --- Waits that say what they wait for, once they have lasted long --------------------------------

_SHORTEST = 0.01
_FIRST = 10.0
_AGAIN = 60.0

_logger = logging.getLogger("headrace")


class LongWait:
    """One wait without progress: after 10 s, and then each minute, a warning names its object.

    Args:
        awaited: What is waited for, for the warning: the step and where the user wrote it.
        clock: Gives the time in seconds.
        warn: Called with each warning.
    """

    __slots__ = ("_awaited", "_clock", "_due", "_start", "_warn")

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
        self._due = self._start + _FIRST

    def wait(self, changed: Condition) -> None:
        """Wait on a condition that is held; return when it was notified, or now and then.

        It is held afterwards whatever happens.
        """
        try:
            changed.wait(max(0.0, self._due - self._clock()))
        except BaseException:
            # A signal at the moment when the lock is taken again leaves it free. Whoever holds the
            # condition would fail to release it, and hide the interruption.
            with contextlib.suppress(RuntimeError):
                changed.release()
            changed.acquire()
            raise
        self.look()

    def wait_and_look(self, changed: Condition) -> None:
        """Wait in the same way, but return after as long as was waited so far, too.

        For what may be there without a notice: it is then found at most twice as late.
        """
        now = self._clock()
        changed.wait(max(0.0, min(self._due - now, max(now - self._start, _SHORTEST))))
        self.look()

    def look(self) -> None:
        """Warn if it is time to."""
        now = self._clock()
        if now >= self._due:
            self._due = now + _AGAIN
            self._warn(
                f"waiting for {self._awaited}: nothing has come for {now - self._start:.0f} s"
            )
