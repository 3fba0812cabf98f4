"""A server that runs until it is stopped: from its start to the last word."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Protocol

from headrace.cli.failures import wrong_arguments
from headrace.cli.signals import STOP_SIGNALS, Signals
from headrace.errors import CancelledError
from headrace.process.parent import say_leaving, say_ready

__all__ = ["RunningServer", "run_server", "say"]


class RunningServer(Protocol):
    """What both servers can do."""

    @property
    def metrics_address(self) -> str:
        """Where its metrics are served; empty: nowhere."""

    def start(self) -> None:
        """Listen, and return when the server can be used."""

    def stop(self) -> None:
        """Stop listening and join all threads; ends a `start` that waits."""


def run_server(
    role: str,
    server: RunningServer,
    address: Callable[[], str],
    *,
    options: Mapping[str, str] | None = None,
    notice: str | None = None,
    with_parent: bool = False,
    drain: Callable[[], None] | None = None,
) -> None:
    """Start the server, say where it is, wait for Ctrl-C or SIGTERM, stop it.

    A server that can be drained is, until it is done or a second signal comes. `start` may wait
    long for a peer, so it runs beside the main thread, which can stop it.
    """
    parent = [sys.stdin] if with_parent else []
    # Python's own handlers are back while the server stops: a second Ctrl-C does not wait.
    with ExitStack() as stack, Signals() as signals:
        start = _Start(server, signals)
        stack.callback(start.thread.join)
        stack.callback(start.call_off)
        start.thread.start()
        reported = False
        while not STOP_SIGNALS & signals.wait(closing=parent):
            if start.error is not None:
                # Some of what the configuration says can only be judged when it is used.
                with wrong_arguments(options):
                    raise start.error
            if start.done and not reported:
                reported = True
                if notice is not None:
                    say(notice)
                if server.metrics_address:
                    say(f"metrics at http://{server.metrics_address}/metrics")
                say(f"{role} ready at {address()}")
                if with_parent:
                    say_ready(address())
        if with_parent:
            say_leaving()
        if drain is not None and start.done:
            say(f"{role} delivers what it has; a second signal stops it at once")
            _drain(drain, signals)
    if start.error is not None and not isinstance(start.error, CancelledError):
        raise start.error
    say(f"{role} stopped")


def say(words: str) -> None:
    """Print a line in one piece: the processes of a command write to one place."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _drain(drain: Callable[[], None], signals: Signals) -> None:
    """Drain on a thread of its own until that is done, or another signal comes."""
    done = threading.Event()

    def run() -> None:
        try:
            drain()
        finally:
            done.set()
            signals.wake()

    thread = threading.Thread(target=run, name="headrace-drain", daemon=True)
    thread.start()
    # Whoever started us is not watched any more: that it is gone was the first signal perhaps.
    while not done.is_set() and not STOP_SIGNALS & signals.wait():
        pass


class _Start:
    """A server's `start` on a thread of its own; wakes the main thread when it is done."""

    def __init__(self, server: RunningServer, signals: Signals) -> None:
        self._server = server
        self._signals = signals
        self.done = False
        self.error: Exception | None = None
        self._is_called_off = False
        self.thread = threading.Thread(target=self._run, name="headrace-start", daemon=True)

    def _run(self) -> None:
        try:
            self._server.start()
            self.done = True
        except Exception as error:
            # One that was stopped before this thread got so far cannot be started: no failure.
            if not self._is_called_off:
                self.error = error
        self._signals.wake()

    def call_off(self) -> None:
        """Stop the server, whether it has started, is starting, or was about to."""
        self._is_called_off = True
        self._server.stop()
