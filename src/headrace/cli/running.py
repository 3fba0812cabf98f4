"""Run one server, or several worker processes of one command, from the start to the last line.

Both wait in the main thread for Ctrl-C, SIGTERM and their children, without races.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Protocol, Self, TextIO

from headrace.cli.commands import wrong_arguments
from headrace.errors import CancelledError
from headrace.forks import in_each_child
from headrace.open_files import in_words
from headrace.process.child import ChildCommand, clean_environment
from headrace.process.parent_link import report_ready, report_stopping
from headrace.process.supervisor import (
    ProcessEvent,
    ProcessExited,
    ProcessSet,
    ProcessStartFailed,
    stop_children,
)

__all__ = ["STOP_SIGNALS", "RunningServer", "Signals", "run_children", "run_server", "say"]


STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


class Signals:
    """Collects signals while the `with` block lasts; `wait` tells which came.

    A signal that arrives before `wait` is not lost, and none interrupts what the main thread is
    doing, so that starting and stopping are never left half done.
    """

    def __init__(self, *, children: bool = False) -> None:
        self._wanted = STOP_SIGNALS | ({signal.SIGCHLD} if children else set())

    def __enter__(self) -> Self:
        """Take the signals over from Python's own handlers."""
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {
            number: signal.signal(number, _leave_it_to_the_wakeup) for number in self._wanted
        }
        _taken_over.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        _taken_over.remove(self)
        self._restore(self._wakeup_before)
        self._receiver.close()
        self._sender.close()

    def _restore(self, wakeup: int) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)

    def wake(self) -> None:
        """Let `wait` return without a signal; called from any thread, at any time."""
        # A full buffer wakes as well as one byte more would; after the block nobody waits.
        with contextlib.suppress(OSError):
            self._sender.send(b"\0")

    def wait(
        self,
        timeout: float | None = None,
        closing: Sequence[TextIO] = (),
        readable: Sequence[TextIO] = (),
    ) -> frozenset[signal.Signals]:
        """Wait for signals, or a call of `wake`; return the signals that came.

        Args:
            timeout: Seconds to wait, or None for as long as it takes.
            closing: Streams that tell by closing that whoever started us is gone, which counts as
                SIGTERM.
            readable: Streams that end the wait, too, when something can be read from them.
        """
        watched: list[socket.socket | TextIO] = [self._receiver, *closing, *readable]
        ready, _, _ = select.select(watched, [], [], timeout)
        numbers = set(self._receiver.recv(4096)) if self._receiver in ready else set()
        if any(stream in ready for stream in closing):
            numbers.add(signal.SIGTERM)
        return frozenset(number for number in self._wanted if number in numbers)


def _give_back_in_a_child() -> None:
    # A process that a user's function forks has nobody who waits; what it was sent would be heard
    # in this one, through the socket that both have.
    for each in reversed(_taken_over):
        each._restore(-1)
    _taken_over.clear()


_taken_over: list[Signals] = []
in_each_child(_give_back_in_a_child)


def _leave_it_to_the_wakeup(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number was written to the socket already."""


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
                    report_ready(address())
        if with_parent:
            report_stopping()
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


_STOP_SECONDS = 15.0
_OWN_CODES = (0, 1, 2)
"""What a command of ours ends with before it is ready: done, failed with a message, wrongly
called."""


def run_children(
    commands: Sequence[Sequence[str]],
    *,
    environment: Mapping[str, str] | None = None,
    patience: float = 0.0,
) -> int:
    """Run commands of `headrace` as child processes until all have ended.

    Ctrl-C or SIGTERM lets all of them deliver what they have and stop; a second one stops them at
    once. One that ends unasked is reported on stderr and started again, after a delay that grows
    with each end of it; one that never was ready and ends with a message of its own is not. Should
    this process be killed, the children see it and stop.

    Args:
        commands: The arguments of each.
        environment: Of the children; None: that of this process.
        patience: Seconds that a child may take to deliver what it has.

    Returns:
        The exit code: 0, or 1 if a child failed.
    """
    variables = clean_environment(os.environ if environment is None else environment)
    failed = False
    family = ProcessSet(retries=lambda code: code not in _OWN_CODES)
    with Signals(children=True) as signals:
        try:
            for arguments in commands:
                ours = ("-P", "-m", "headrace", *arguments)
                family.add(ChildCommand(arguments=ours, environment=variables), time.monotonic())
            while not family.is_empty:
                due = family.next_restart_at()
                wait = None if due is None else max(0.0, due - time.monotonic())
                if STOP_SIGNALS & signals.wait(wait):
                    break
                for event in family.poll(time.monotonic()):
                    failed = _note(event, family, len(commands)) or failed
        finally:
            killed = stop_children(
                family.children,
                patience + _STOP_SECONDS,
                hurry_seconds=_STOP_SECONDS,
                should_hurry=lambda seconds: bool(STOP_SIGNALS & signals.wait(seconds)),
            )
    if killed:
        pids = ", ".join(str(child.pid) for child in killed)
        print(f"headrace: did not stop in time and was killed: process {pids}", file=sys.stderr)
    return int(failed or bool(killed))


def _note(event: ProcessEvent, family: ProcessSet, count: int) -> bool:
    """Report what has happened to a child; return whether it failed for good."""
    match event:
        case ProcessExited(_, child, again_in):
            words = (
                "left when a signal asked it to" if child.stop_requested else child.exit_description
            )
            if again_in is not None:
                words += f" and is started again in {again_in:g} s"
            left = sum(other.is_running for other in family.children)
            _say(f"process {child.pid} {words}; {left} of {count} are left")
            return again_in is None and not child.stop_requested and child.exit_code != 0
        case ProcessStartFailed(_, error, again_in):
            _say(f"a process could not be started ({in_words(error)}); next try in {again_in:g} s")
    return False


def _say(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)
