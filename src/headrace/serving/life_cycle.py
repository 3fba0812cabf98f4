"""Life cycle: a server is started once and stopped once, by whomever, whenever.

    new --start--> starting --> running --stop--> stopping --> stopped
     |                |                              ^
     +------stop------+---- _open raises, or stop ---+

Rule 1. `start` calls `_open` once. `_open` makes one thing after another, and gives what closes it
        to `_keep` at once.
Rule 2. What was kept is closed once, the last first: by `stop`, or by `start` where `_open` raises,
        be it Ctrl-C. Everything is closed, also after the closing of something else raised.
Rule 3. `stop` may be called at any time, from any thread, any number of times, also while `start`
        runs. It sets `_stopping`, for which whatever waits has to look, and closes what is kept.
        What `_open` keeps after that is closed on the spot, and `start` raises CancelledError.
Rule 4. Each `stop` returns when everything is closed, so it is not for threads that closing waits
        for. The one that closes may call it again from there; that does nothing.
Rule 5. A server that is dropped is stopped. So its threads hold what they work on, and never the
        server: `_open` gives them no bound method of it.
Rule 6. A forked child has a copy of what belongs to its parent: `stop` leaves it alone there.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from headrace.errors import CancelledError

__all__ = ["LifeCycle"]

_SLICE_SECONDS = 1.0
_CALLED_OFF = "the server was stopped while it started"


class LifeCycle(ABC):
    """What is started and stopped. A subclass says in `_open` what that means.

        class Echo(LifeCycle):
            def _open(self) -> None:
                journal = SqliteJournal(...)
                self._keep(journal.close)
                core = JournaledCore(journal, ...)
                self._keep(zeromq.serve(core.handle, ...).close)

    One that drains before it stops waits for both, and then stops as usual:

            def drain(self, timeout: float) -> None:
                self._session.drain()
                until = time.monotonic() + timeout
                while not self._session.is_settled and time.monotonic() < until:
                    if self._stopping.wait(0.02):
                        break
                self.stop()

    A last word to others is said by what was kept last, while everything else still works. How
    long closing takes is for those who close to bound.
    """

    def __init__(self) -> None:
        #: Set as soon as the server is to stop, before anything is closed.
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        # Reentrant: a signal's handler, or the collector, may stop a server in between.
        self._life_lock = threading.RLock()
        self._started = False
        self._kept = ExitStack()
        #: The thread that closes what was kept, and whether it is at it.
        self._closer: threading.Thread | None = None
        self._closing = False
        self._process = os.getpid()

    @abstractmethod
    def _open(self) -> None:
        """Make what the server consists of; give what closes each part to `_keep`, at once."""

    def _keep(self, close: Callable[[], object]) -> None:
        """Have `close` called when the server stops, before what was kept earlier is closed.

        Raises:
            CancelledError: The server was stopped meanwhile; `close` was called.
        """
        with self._life_lock:
            if not self._stopping.is_set():
                self._kept.callback(close)
                return
        close()
        raise CancelledError(_CALLED_OFF)

    @property
    def is_stopped(self) -> bool:
        """Whether everything is closed, after `stop` or a `start` that failed."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Start serving. Does nothing when it was called before.

        Raises:
            RuntimeError: The server was stopped, or could not be started before.
            CancelledError: `stop` was called meanwhile.
        """
        with self._life_lock:
            if self._stopping.is_set():
                raise RuntimeError("Server cannot be started after it has been stopped")
            if self._started:
                return
            self._started = True
        try:
            self._open()
            if self._stopping.is_set():
                raise CancelledError(_CALLED_OFF)
        except BaseException as error:
            is_called_off = self._stopping.is_set()
            self.stop()
            if is_called_off and isinstance(error, Exception):
                # Whatever it met: things were closed under its hands.
                raise CancelledError(_CALLED_OFF) from error
            raise

    def join(self, timeout: float | None = None) -> None:
        """Wait until the server is stopped, or `timeout` seconds have passed."""
        if timeout is not None:
            self._stopped.wait(timeout)
            return
        # In slices, so that Ctrl-C gets through on every platform.
        while not self._stopped.wait(_SLICE_SECONDS):
            pass

    def stop(self) -> None:
        """Stop serving, and return when everything is closed. May be called at any time."""
        if os.getpid() != self._process:
            return
        with self._life_lock:
            self._stopping.set()
            if self._closer is None:
                self._closer = threading.current_thread()
        if self._closer is not threading.current_thread():
            self.join()
        elif not self._closing:
            try:
                self._closing = True
                self._kept.close()
            finally:
                self._closing = False
                self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __del__(self) -> None:
        # A subclass's constructor may have failed before there was anything to stop.
        if getattr(self, "_started", False) and not self._stopped.is_set():
            self.stop()
