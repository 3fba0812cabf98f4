"""Runs one server, or several worker processes of one command, from the start to the end.

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

from headrace.cli.commands import convert_argument_errors
from headrace.errors import CancelledError
from headrace.forks import call_in_children
from headrace.open_files import explain_open_error
from headrace.process.child import ChildCommand, clean_environment
from headrace.process.parent_link import report_ready, report_stopping
from headrace.process.supervisor import (
    ProcessEvent,
    ProcessExited,
    ProcessSet,
    ProcessStartFailed,
    stop_children,
)

__all__ = [
    "OWN_EXIT_CODES",
    "PARENT_SIGNALS",
    "STOP_SIGNALS",
    "RunningServer",
    "Signals",
    "print_line",
    "report_event",
    "run_children",
    "run_server",
]


STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
PARENT_SIGNALS = STOP_SIGNALS | {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that a launcher such as Slurm sends to every process, but only the parent acts on."""


class Signals:
    """Collects signals during the `with` block; `wait` returns the ones that arrived.

    A signal that arrives before `wait` is not lost, and none interrupts the main thread, so that
    starting and stopping are never left half done.

    Args:
        children: Whether the end of a child process also ends a wait.
        ignored: Signals that have no effect until `ignored` is changed.
    """

    def __init__(
        self, *, children: bool = False, ignored: frozenset[signal.Signals] = frozenset()
    ) -> None:
        self._wanted = STOP_SIGNALS | ({signal.SIGCHLD} if children else set())
        self.ignored = ignored

    def __enter__(self) -> Self:
        """Replace Python's signal handlers."""
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {
            number: signal.signal(number, _ignore_signal) for number in self._wanted | self.ignored
        }
        _active_signals.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous signal handlers."""
        _active_signals.remove(self)
        self._restore(self._wakeup_before)
        self._receiver.close()
        self._sender.close()

    def _restore(self, wakeup: int) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)

    def wake(self) -> None:
        """Make `wait` return without a signal; called from any thread, at any time."""
        # If the buffer is full, `wait` wakes up anyway; after the block no thread waits.
        with contextlib.suppress(OSError):
            self._sender.send(b"\0")

    def wait(
        self,
        timeout: float | None = None,
        closing: Sequence[TextIO] = (),
        readable: Sequence[TextIO] = (),
    ) -> frozenset[signal.Signals]:
        """Wait for signals, or a call of `wake`; return the signals that arrived.

        Args:
            timeout: Seconds to wait; None waits forever.
            closing: Streams that close when the parent process ends, which counts as SIGTERM.
            readable: Streams that also end the wait when they have data to read.
        """
        watched: list[socket.socket | TextIO] = [self._receiver, *closing, *readable]
        ready, _, _ = select.select(watched, [], [], timeout)
        numbers = set(self._receiver.recv(4096)) if self._receiver in ready else set()
        numbers -= self.ignored
        if any(stream in ready for stream in closing):
            numbers.add(signal.SIGTERM)
        return frozenset(number for number in self._wanted if number in numbers)


def _restore_in_child() -> None:
    # In a process that a user's function forks, no thread waits for signals; signals to it would
    # arrive in this process, through the shared socket.
    for each in reversed(_active_signals):
        each._restore(-1)
    _active_signals.clear()


_active_signals: list[Signals] = []
call_in_children(_restore_in_child)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number was already written to the socket."""


class RunningServer(Protocol):
    """Interface of both servers."""

    @property
    def metrics_address(self) -> str:
        """Address of the metrics endpoint; empty without one."""

    def start(self) -> None:
        """Start listening; return when the server is ready."""

    def stop(self) -> None:
        """Stop listening and join all threads; interrupts a waiting `start`."""


def run_server(
    role: str,
    server: RunningServer,
    address: Callable[[], str],
    *,
    options: Mapping[str, str] | None = None,
    on_started: str | None = None,
    with_parent: bool = False,
    ignore_signals: bool = False,
    drain: Callable[[], None] | None = None,
) -> None:
    """Start the server, print its address, wait for Ctrl-C or SIGTERM, and stop it.

    A server that supports draining is drained until it is done or a second signal arrives. `start`
    may wait long for a peer, so it runs on another thread, and the main thread can stop it. With
    `ignore_signals`, only the end of the link to the parent stops it.
    """
    parent = [sys.stdin] if with_parent else []
    # Python's handlers are restored before the server stops: a second Ctrl-C acts at once.
    ignored = PARENT_SIGNALS if ignore_signals else frozenset()
    with ExitStack() as stack, Signals(ignored=ignored) as signals:
        start = _StartThread(server, signals)
        stack.callback(start.thread.join)
        stack.callback(start.cancel)
        start.thread.start()
        reported = False
        while not STOP_SIGNALS & signals.wait(closing=parent):
            if start.error is not None:
                # Some settings can be checked only when they are used.
                with convert_argument_errors(options):
                    raise start.error
            if start.done and not reported:
                reported = True
                if on_started is not None:
                    print_line(on_started)
                if server.metrics_address:
                    print_line(f"metrics at http://{server.metrics_address}/metrics")
                print_line(f"{role} ready at {address()}")
                if with_parent:
                    report_ready(address())
        if with_parent:
            report_stopping()
        if drain is not None and start.done:
            print_line(f"{role} draining: delivering buffered elements; a second signal stops it")
            signals.ignored = frozenset()
            _drain_until_signal(drain, signals)
    if start.error is not None and not isinstance(start.error, CancelledError):
        raise start.error
    print_line(f"{role} stopped")


def print_line(line: str) -> None:
    """Print a line atomically: the processes of a command share one output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _drain_until_signal(drain: Callable[[], None], signals: Signals) -> None:
    """Drain on another thread until that is done, or another signal arrives."""
    done = threading.Event()

    def run() -> None:
        try:
            drain()
        finally:
            done.set()
            signals.wake()

    thread = threading.Thread(target=run, name="headrace-drain", daemon=True)
    thread.start()
    # The parent is no longer watched: its end may have been the first signal.
    while not done.is_set() and not STOP_SIGNALS & signals.wait():
        pass


class _StartThread:
    """Runs a server's `start` on another thread; wakes the main thread when it is done."""

    def __init__(self, server: RunningServer, signals: Signals) -> None:
        self._server = server
        self._signals = signals
        self.done = False
        self.error: Exception | None = None
        self._is_cancelled = False
        self.thread = threading.Thread(target=self._run, name="headrace-start", daemon=True)

    def _run(self) -> None:
        try:
            self._server.start()
            self.done = True
        except Exception as error:
            # A server that was stopped before this thread got here cannot start: no failure.
            if not self._is_cancelled:
                self.error = error
        self._signals.wake()

    def cancel(self) -> None:
        """Stop the server, whether it has started, is starting, or is about to."""
        self._is_cancelled = True
        self._server.stop()


_STOP_SECONDS = 15.0
OWN_EXIT_CODES = (0, 1, 2)
"""Exit codes of a command that ends before it is ready: success, reported failure, wrong
usage."""


def run_children(
    commands: Sequence[Sequence[str]],
    *,
    environment: Mapping[str, str] | None = None,
    drain_timeout: float = 0.0,
) -> int:
    """Run commands of `headrace` as child processes until all have ended.

    Ctrl-C or SIGTERM makes all of them deliver their pending results and stop; a second one stops
    them at once. A child that ends unexpectedly is reported on stderr and restarted, after a delay
    that grows with each of its ends; a child that was never ready and reports an error itself is
    not. If this process is killed, the children notice it and stop.

    Args:
        commands: Arguments of each command.
        environment: Environment of the children; None: that of this process.
        drain_timeout: Seconds that a child may take to deliver its pending results.

    Returns:
        The exit code: 0, or 1 if a child failed.
    """
    variables = clean_environment(os.environ if environment is None else environment)
    failed = False
    processes = ProcessSet(retries=lambda code: code not in OWN_EXIT_CODES)
    with Signals(children=True) as signals:
        try:
            for arguments in commands:
                command = ("-P", "-m", "headrace", *arguments)
                processes.add(
                    ChildCommand(arguments=command, environment=variables), time.monotonic()
                )
            while not processes.is_empty:
                due = processes.next_restart_at()
                wait = None if due is None else max(0.0, due - time.monotonic())
                if STOP_SIGNALS & signals.wait(wait):
                    break
                for event in processes.poll(time.monotonic()):
                    failed = report_event(event, processes, len(commands)) or failed
        finally:
            killed = stop_children(
                processes.children,
                drain_timeout + _STOP_SECONDS,
                hurry_seconds=_STOP_SECONDS,
                should_hurry=lambda seconds: bool(STOP_SIGNALS & signals.wait(seconds)),
            )
    if killed:
        pids = ", ".join(str(child.pid) for child in killed)
        print(
            f"headrace: killed because they did not stop in time: processes {pids}", file=sys.stderr
        )
    return int(failed or bool(killed))


def report_event(event: ProcessEvent, processes: ProcessSet, count: int) -> bool:
    """Report an event of a child; return whether the child failed permanently."""
    match event:
        case ProcessExited(_, child, restart_in):
            reason = (
                "stopped as requested by a signal"
                if child.stop_requested
                else child.exit_description
            )
            if restart_in is not None:
                reason += f"; restarting it in {restart_in:g} s"
            running = sum(other.is_running for other in processes.children)
            _print_line(f"process {child.pid} {reason}; {running} of {count} running")
            return restart_in is None and not child.stop_requested and child.exit_code != 0
        case ProcessStartFailed(_, error, restart_in):
            _print_line(
                f"cannot start a process ({explain_open_error(error)}); retrying in "
                f"{restart_in:g} s"
            )
    return False


def _print_line(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)
