"""Runs a session that does no I/O itself: one lock, and one thread that waits for messages.

runner = SessionRunner("headrace-worker", turn)
runner.start()
with runner.lock:           # the session is used under the lock alone, by any thread
session.something_happened()
runner.wake()               # the thread takes a turn now, not when its time is up
runner.wait(lambda: session.is_over, timeout=1.0)
runner.close(1.0)
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.serving.connections import Answered, Connections, Lost
from headrace.threads import start_thread

__all__ = ["SessionRunner"]

_LONGEST_WAIT = 5.0
_SLICE_SECONDS = 1.0


class SessionRunner:
    """A lock around a session, a thread that runs it, and other threads that wait for it.

    Args:
        name: The name of the thread.
        turn: Called on the thread, with answers and losses: passes them to the session, does what
            the session asks for, and returns the seconds after which to call it again.
        failed: Called on the thread, with an error that was raised there; returns whether to go on
            with the next turn.
        ended: Called on the thread at its end, while the connections are open.

    Attributes:
        lock: Re-entrant.
        is_closed: Whether the thread ends after this turn.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[Sequence[Answered | Lost]], float],
        failed: Callable[[BaseException], bool],
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self.lock: contextlib.AbstractContextManager[object] = threading.RLock()
        self.is_closed = False
        self._name = name
        self._turn, self._failed, self._ended = turn, failed, ended
        self._connections: Connections[Any, Any] | None = None
        self._thread: threading.Thread | None = None
        #: The condition of each wait, and the event that ends it.
        self._waiters: list[tuple[Callable[[], bool], threading.Event]] = []

    @property
    def connections(self) -> Connections[Any, Any]:
        """The connections to peers, for the thread alone."""
        assert self._connections is not None
        return self._connections

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is the thread."""
        return self._thread is threading.current_thread()

    def start(self) -> None:
        """Start the thread; to be followed by `close`, whatever it raises."""
        self._connections = Connections()
        self._thread = threading.Thread(target=self.run, name=self._name, daemon=True)
        start_thread(self._thread)

    def run(self) -> None:
        """Take turns until `is_closed`. `start` calls it on a new thread."""
        self._thread = threading.current_thread()
        connections = self._connections = self._connections or Connections()
        seconds = 0.0
        try:
            while not self.is_closed:
                try:
                    seconds = self._turn(connections.wait(min(seconds, _LONGEST_WAIT)))
                except BaseException as error:
                    if not self._failed(error):
                        return
                    seconds = 0.0
        finally:
            try:
                self._ended()
            finally:
                connections.close()

    def wake(self) -> None:
        """Make the thread take a turn now. May be called from any thread."""
        if self._connections is not None:
            self._connections.wake()

    def close(self, seconds: float) -> None:
        """End the thread, and wait until it has ended, at most this number of seconds."""
        self.is_closed = True
        self.wake()
        if self._thread is None or not self._thread.ident:
            if self._connections is not None:
                self._connections.close()
        elif not self.is_current_thread:
            self._thread.join(max(0.0, seconds))

    def leave_to_parent(self, lock: contextlib.AbstractContextManager[object]) -> None:
        """Use another lock and no thread, in a process that was just forked."""
        self.lock, self._connections, self._thread = lock, None, None

    # --- waiting ----------------------------------------------------------------------------------

    def wait(
        self,
        is_met: Callable[[], bool],
        timeout: float | None = None,
        check: Callable[[], object] | None = None,
    ) -> bool:
        """Wait until a condition is met; return False if time is up, or the thread has ended.

        Args:
            is_met: Returns whether it is. Called under the lock, also by `notify`.
            timeout: Seconds; None: no limit.
            check: Called about once a second, without the lock. It may raise, to end the wait.
        """
        waiter = is_met, (event := threading.Event())
        with self.lock:
            if is_met():
                return True
            self._waiters.append(waiter)
        until = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while True:
                if check is not None:
                    check()
                event.wait(max(0.0, min(_SLICE_SECONDS, until - time.monotonic())))
                with self.lock:
                    event.clear()
                    if is_met():
                        return True
                has_ended = self._thread is None or not self._thread.is_alive()
                if has_ended or time.monotonic() >= until:
                    if check is not None:
                        check()
                    return False
        finally:
            with self.lock:
                self._waiters.remove(waiter)

    def notify(self, *, everybody: bool = False) -> None:
        """End waits whose condition is met; all of them run their `check`, if `everybody`.

        To be called under the lock.
        """
        for is_met, event in self._waiters:
            if everybody or is_met():
                event.set()
