"""Life cycle of a server: started once and stopped once, from any thread at any time.

    new --start--> starting --> running --stop--> stopping --> stopped
     |                |                              ^
     +------stop------+---- _open raises, or stop ---+

Rule 1. `start` calls `_open` once. `_open` creates one resource after another, and registers a
        closing function with `_on_stop` right after each.
Rule 2. Registered functions are called once, in reverse order: by `stop`, or by `start` if `_open`
        raises, even KeyboardInterrupt. All are called, even if one of them raises.
Rule 3. `stop` may be called at any time, from any thread, repeatedly, and during `start`. It sets
        `_stopping`, which every waiting thread must check, and closes registered resources.
        Resources that `_open` registers after that are closed at once; `start` raises
        CancelledError.
Rule 4. Each `stop` returns when everything is closed, so threads that closing waits for must not
        call it. The closing thread may call it again during closing, without effect.
Rule 5. A garbage-collected server is stopped. So its threads reference what they work on, but never
        the server: `_open` gives them no bound method of it.
Rule 6. A forked child has copies of its parent's resources: `stop` does not touch them there.
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
_STOPPED_WHILE_STARTING = "the server was stopped while it started"


class LifeCycle(ABC):
    """Base class of servers. A subclass implements `_open`.

        class Echo(LifeCycle):
            def _open(self) -> None:
                journal = SqliteJournal(...)
                self._on_stop(journal.close)
                core = JournaledCore(journal, ...)
                self._on_stop(zeromq.serve(core.handle, ...).close)

    A server that drains before it stops waits for either, and then stops:

            def drain(self, timeout: float) -> None:
                self._session.drain()
                until = time.monotonic() + timeout
                while not self._session.is_settled and time.monotonic() < until:
                    if self._stopping.wait(0.02):
                        break
                self.stop()

    A farewell message belongs to the resource registered last, which is closed while everything
    else still works. Closing functions must bound their own duration.
    """

    def __init__(self) -> None:
        #: Set when the server must stop, before anything is closed.
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        # Reentrant: a signal handler or the garbage collector may stop a server at any point.
        self._life_cycle_lock = threading.RLock()
        self._started = False
        self._exit_stack = ExitStack()
        #: Thread that closes the resources, while it does so.
        self._closer: threading.Thread | None = None
        self._closing = False
        self._process = os.getpid()

    @abstractmethod
    def _open(self) -> None:
        """Create the server's resources; register a closing function right after each."""

    def _on_stop(self, close: Callable[[], object]) -> None:
        """Register a function to call at the stop, before those registered earlier.

        Raises:
            CancelledError: If the server was stopped in the meantime; `close` was called.
        """
        with self._life_cycle_lock:
            if not self._stopping.is_set():
                self._exit_stack.callback(close)
                return
        close()
        raise CancelledError(_STOPPED_WHILE_STARTING)

    @property
    def is_stopped(self) -> bool:
        """Whether everything is closed, after `stop` or a failed `start`."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Start serving. No effect if called before.

        Raises:
            RuntimeError: If the server was stopped, or an earlier start failed.
            CancelledError: If `stop` was called in the meantime.
        """
        with self._life_cycle_lock:
            if self._stopping.is_set():
                raise RuntimeError("Server cannot be started after it has been stopped")
            if self._started:
                return
            self._started = True
        try:
            self._open()
            if self._stopping.is_set():
                raise CancelledError(_STOPPED_WHILE_STARTING)
        except BaseException as error:
            is_called_off = self._stopping.is_set()
            self.stop()
            if is_called_off and isinstance(error, Exception):
                # Replaces any error, since `stop` closed resources that `_open` was using.
                raise CancelledError(_STOPPED_WHILE_STARTING) from error
            raise

    def join(self, timeout: float | None = None) -> None:
        """Wait until the server is stopped, or `timeout` seconds have passed."""
        if timeout is not None:
            self._stopped.wait(timeout)
            return
        # In slices, so that Ctrl-C is handled on every platform.
        while not self._stopped.wait(_SLICE_SECONDS):
            pass

    def stop(self) -> None:
        """Stop serving, and return when everything is closed. May be called at any time."""
        if os.getpid() != self._process:
            return
        with self._life_cycle_lock:
            self._stopping.set()
            if self._closer is None:
                self._closer = threading.current_thread()
        if self._closer is not threading.current_thread():
            self.join()
        elif not self._closing:
            try:
                self._closing = True
                self._exit_stack.close()
            finally:
                self._closing = False
                self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __del__(self) -> None:
        # A subclass's constructor may have failed before anything was started.
        if getattr(self, "_started", False) and not self._stopped.is_set():
            self.stop()
