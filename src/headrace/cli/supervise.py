"""Child processes of one command: started together, replaced when they end, stopped together.

A child's standard input is a socket: the child sees it close when this process is gone, and says on
it that it is ready (`say_ready`). One that was ready once can run, so it is started again however
it ended, unless a signal asked it to leave (`LEFT_CODE`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from headrace.cli.signals import STOP_SIGNALS, Signals
from headrace.service.local_worker import restart_delay
from headrace.service.worker.server import LEFT_CODE

__all__ = ["run_children", "say_ready"]

_STOP_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_OWN_CODES = (0, 1, 2)
"""What a command of ours ends with before it is ready: done, failed with a message, wrongly
called."""
_READY = b"ready"


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
    this process be killed, the children see their stdin close and stop.

    Args:
        commands: The arguments of each.
        environment: Of the children; None: that of this process.
        patience: Seconds that a child may take to deliver what it has.

    Returns:
        The exit code: 0, or 1 if a child failed.
    """
    children: list[_Child] = []
    with Signals(children=True) as signals:
        try:
            children.extend(_Child(command, environment) for command in commands)
            for child in children:
                child.start()
            failed = _watch(children, signals)
        finally:
            killed = _stop(children, signals, patience)
    if killed:
        pids = ", ".join(str(child.pid) for child in killed)
        print(f"headrace: did not stop in time and was killed: process {pids}", file=sys.stderr)
    return int(failed or bool(killed))


def say_ready() -> None:
    """Tell the process that started this one as a child that it is ready."""
    # Whoever started it by hand has given it another kind of standard input.
    with contextlib.suppress(OSError):
        os.write(0, _READY)


class _Child:
    """One command, and the process that runs it now."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        self._command = command
        self._environment = environment
        self._crashes = 0
        self._link: socket.socket | None = None
        self._was_ready = False
        self.process: subprocess.Popen[bytes] | None = None
        #: When it is to be started again, if it is.
        self.due: float | None = None

    def start(self) -> None:
        self.due = None
        self._link, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace.cli.main", *self._command],
                stdin=theirs.fileno(),
                env=None if self._environment is None else dict(self._environment),
            )

    def release(self) -> None:
        """Close its stdin, with which it stops."""
        if self._link is not None:
            self._link.close()
            self._link = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def is_to_start_again(self, code: int) -> bool:
        """Whether a process of its that ended by itself, with this code, is to be replaced."""
        if self._link is not None:
            self._link.setblocking(False)
            with contextlib.suppress(OSError):
                self._was_ready = self._was_ready or bool(self._link.recv(len(_READY)))
        return code != LEFT_CODE and (self._was_ready or code not in _OWN_CODES)

    def delay(self) -> float:
        """Return the seconds until it is started again after it ended once more."""
        self._crashes += 1
        return restart_delay(self._crashes)


def _watch(children: Sequence[_Child], signals: Signals) -> bool:
    """Wait for a stop signal, or the end of all children; return whether one failed."""
    failed = False
    while any(child.process is not None or child.due is not None for child in children):
        now = time.monotonic()
        for child in children:
            if child.due is not None and child.due <= now:
                child.start()
        waits = [child.due - now for child in children if child.due is not None]
        if STOP_SIGNALS & signals.wait(max(0.0, min(waits)) if waits else None):
            break
        for child in children:
            if child.process is not None and not child.is_running:
                ended, child.process = child.process, None
                code = ended.returncode
                words = _ending(code)
                starts_again = child.is_to_start_again(code)
                child.release()
                if not starts_again:
                    failed = failed or code not in (0, LEFT_CODE)
                else:
                    delay = child.delay()
                    child.due = time.monotonic() + delay
                    words += f" and is started again in {delay:g} s"
                left = sum(other.is_running for other in children)
                print(
                    f"headrace: process {ended.pid} {words}; {left} of {len(children)} are left",
                    file=sys.stderr,
                    flush=True,
                )
    return failed


def _stop(
    children: Sequence[_Child], signals: Signals, patience: float
) -> list[subprocess.Popen[bytes]]:
    """Stop all children; return those that had to be killed."""
    left = [child.process for child in children if child.process is not None]
    for child in children:
        # Closing stdin says the same as SIGTERM, and also to a child that is still starting.
        child.release()
    deadline = time.monotonic() + patience + _STOP_SECONDS
    asked_again = False
    while (left := [process for process in left if process.poll() is None]) and (
        remaining := deadline - time.monotonic()
    ) > 0:
        if STOP_SIGNALS & signals.wait(min(remaining, _LOOK_SECONDS)) and not asked_again:
            asked_again = True
            deadline = min(deadline, time.monotonic() + _STOP_SECONDS)
            for process in left:
                process.terminate()
    for process in left:
        process.kill()
        process.wait()
    return left


def _ending(code: int) -> str:
    if code == LEFT_CODE:
        return "left when a signal asked it to"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
