"""A thread that reads an iterator ahead of its use.

Who may touch what. The iterator is the thread's from `start` until `stop` has returned True. All
else changes under `changed`, which the owner holds as well, for what it keeps of what was read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from headrace.element.chunk import Chunk
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.pace import Pace
from headrace.threads import start_thread

__all__ = ["PATIENCE", "Feeder", "Item", "close_quietly"]

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
