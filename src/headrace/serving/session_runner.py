"""Runs a session that does no I/O itself: one lock, and one thread that waits for messages.

runner = SessionRunner("headrace-worker", run_turn, on_failure)
runner.start()
with runner.lock:           # every thread uses the session under the lock only
    session.request_received(request)
runner.wake()               # the thread takes a turn now, before its planned time
runner.wait(lambda: session.is_finished, timeout=1.0)
runner.close(1.0)
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.serving.connections import PeerConnections, PeerLost, ReplyReceived
from headrace.threads import start_thread

__all__ = ["SessionRunner"]

_MAX_WAIT = 5.0
_SLICE_SECONDS = 1.0


class SessionRunner:
    """Lock around a session, thread that runs it, and waits of other threads.

    Args:
        name: Name of the thread.
        run_turn: Called on the thread with replies and losses: passes them to the session, runs
            its actions, and returns the seconds after which to call it again.
        on_failure: Called on the thread with an error raised there; returns whether to continue
            with the next turn.
        on_end: Called on the thread at its end, while the connections are open.

    Attributes:
        lock: Reentrant lock.
        is_closed: Whether the thread ends after this turn.
    """

    def __init__(
        self,
        name: str,
        run_turn: Callable[[Sequence[ReplyReceived | PeerLost]], float],
        on_failure: Callable[[BaseException], bool],
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.lock: contextlib.AbstractContextManager[object] = threading.RLock()
        self.is_closed: bool = False
        self._name = name
        self._run_turn, self._on_failure, self._on_end = run_turn, on_failure, on_end
        self._connections: PeerConnections[Any, Any] | None = None
        self._thread: threading.Thread | None = None
        #: Condition of each wait, and the event that ends it.
        self._waiters: list[tuple[Callable[[], bool], threading.Event]] = []

    @property
    def connections(self) -> PeerConnections[Any, Any]:
        """Connections to peers, for the thread only."""
        assert self._connections is not None
        return self._connections

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is the thread."""
        return self._thread is threading.current_thread()

    def start(self) -> None:
        """Start the thread; `close` must follow, even after an error."""
        self._connections = PeerConnections()
        self._thread = threading.Thread(target=self.run, name=self._name, daemon=True)
        start_thread(self._thread)

    def run(self) -> None:
        """Take turns until `is_closed`. `start` calls it on a new thread."""
        self._thread = threading.current_thread()
        connections = self._connections = self._connections or PeerConnections()
        seconds = 0.0
        try:
            while not self.is_closed:
                try:
                    seconds = self._run_turn(connections.wait(min(seconds, _MAX_WAIT)))
                except BaseException as error:
                    if not self._on_failure(error):
                        return
                    seconds = 0.0
        finally:
            try:
                self._on_end()
            finally:
                connections.close()

    def wake(self) -> None:
        """Wake the thread for a turn. May be called from any thread."""
        if self._connections is not None:
            self._connections.wake()

    def close(self, seconds: float) -> None:
        """End the thread, and wait at most this number of seconds for its end."""
        self.is_closed = True
        self.wake()
        if self._thread is None or not self._thread.ident:
            if self._connections is not None:
                self._connections.close()
        elif not self.is_current_thread:
            self._thread.join(max(0.0, seconds))

    def after_fork_in_child(self, lock: contextlib.AbstractContextManager[object]) -> None:
        """Use another lock and no thread, in a forked child."""
        self.lock, self._connections, self._thread = lock, None, None

    # --- waiting ----------------------------------------------------------------------------------

    def wait(
        self,
        condition: Callable[[], bool],
        timeout: float | None = None,
        check: Callable[[], object] | None = None,
    ) -> bool:
        """Wait until a condition is met; return False on timeout, or if the thread has ended.

        Args:
            condition: Called under the lock, also by `notify`.
            timeout: Seconds to wait; None waits forever.
            check: Called about once a second, without the lock. It may raise, to end the wait.
        """
        waiter = condition, (event := threading.Event())
        with self.lock:
            if condition():
                return True
            self._waiters.append(waiter)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while True:
                if check is not None:
                    check()
                event.wait(max(0.0, min(_SLICE_SECONDS, deadline - time.monotonic())))
                with self.lock:
                    event.clear()
                    if condition():
                        return True
                has_ended = self._thread is None or not self._thread.is_alive()
                if has_ended or time.monotonic() >= deadline:
                    if check is not None:
                        check()
                    return False
        finally:
            with self.lock:
                self._waiters.remove(waiter)

    def notify(self, *, notify_all: bool = False) -> None:
        """End waits whose condition is met; with `notify_all`, make all waits run their `check`.

        Must be called under the lock.
        """
        for is_met, event in self._waiters:
            if notify_all or is_met():
                event.set()
