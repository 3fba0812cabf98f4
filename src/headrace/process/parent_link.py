"""The child's end of the link to its parent process: a socket in place of standard input.

The parent closes the link to ask the child to stop. The child writes lines of text: that it is
ready, and that a signal asked it to stop.

A child that is useless without its parent also has a lifeline: a pipe that is never written to and
closes only when the parent has ended. The kernel then kills the child, which may be inside a
function that holds the GIL and would never read the link.

A child that hangs is ended, so that its supervisor restarts it: a C function that never releases
the GIL leaves a process that answers pings and does nothing else. No Python thread can end it; a
thread of `faulthandler` can, because it does not need the GIL: it prints the stacks of all threads
and exits. A worker detects other hangs itself and reports them with `report_hang`.

The parent tells a child that copies much data which copies should bypass the caches. A
store to memory that is not cached first reads the old contents. The GNU C library avoids that in
copies that are large compared with the last-level cache, since version 2.38 from a quarter of it
on. But it asks the processor for the size of the cache, and some virtual machines report ten times
the real size. The threshold can only be set when a process starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import platform
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.forks import call_in_children

__all__ = [
    "LAST_LEVEL_CACHE_SIZE",
    "READY",
    "STOPPING",
    "bind_forked_children",
    "die_with_parent",
    "exit_when_hung",
    "large_copy_tunables",
    "on_sigterm",
    "report_hang",
    "report_ready",
    "report_stopping",
    "set_when_stopped",
    "wait_for_stop",
]


READY = "ready"
STOPPING = "stopping"

_LINK = 0
_BLOCK = 4096


def report_ready(text: str = "", log_to: int | None = None) -> None:
    """Tell the parent that this process is ready.

    Args:
        text: Information for the parent, such as an address; no line feeds.
        log_to: Descriptor that replaces standard output and error from now on, as given on the
            process's command line.
    """
    _send_line(f"{READY} {text}")
    if log_to is not None:
        os.dup2(log_to, 1)
        os.dup2(log_to, 2)
        os.close(log_to)


def report_stopping() -> None:
    """Tell the parent that a signal asked this process to stop."""
    _send_line(STOPPING)


def on_sigterm(stop: Callable[[], None]) -> None:
    """Handle SIGTERM: tell the parent that this process was asked to stop, then call `stop`.

    Processes that a user's function forks keep the former handler. Must be called on the main
    thread.
    """

    def asked(number: int, frame: FrameType | None) -> None:
        report_stopping()
        stop()

    before = signal.signal(signal.SIGTERM, asked)
    call_in_children(lambda: _set_handler(before))


def _set_handler(handler: Any) -> None:
    signal.signal(signal.SIGTERM, handler)


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends, if the kernel supports it.

    Args:
        lifeline: Descriptor of the pipe, as given on the process's command line.
    """
    set_signal = getattr(fcntl, "F_SETSIG", None)
    if set_signal is not None:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, set_signal, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        # The parent may have ended before the kernel was asked.
        if select.select([lifeline], [], [], 0.0)[0]:
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def bind_forked_children() -> Iterator[None]:
    """Have the kernel kill processes forked inside this context, and their children, when it ends.

    User functions that fork need no cleanup of their own. Other programs that they start are not
    affected.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        yield
        return
    lifeline = os.pipe()

    def bind() -> None:
        nonlocal lifeline
        reader, writer = lifeline
        os.close(writer)
        # The process to kill is recorded in the open file description, which a fork shares, so the
        # pipe is opened again.
        mine = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_NONBLOCK)
        os.close(reader)
        lifeline = os.pipe()
        die_with_parent(mine)

    end = call_in_children(bind)
    try:
        yield
    finally:
        end()
        for descriptor in lifeline:
            os.close(descriptor)


def wait_for_stop() -> None:
    """Wait until the parent closes the link or ends."""
    with contextlib.suppress(OSError):
        while os.read(_LINK, _BLOCK):
            pass


def set_when_stopped(stopped: threading.Event, seconds: float) -> None:
    """Start a thread that sets `stopped` when the parent closes the link or ends.

    Args:
        stopped: Event for which the main thread waits.
        seconds: Seconds after which the process then exits in any case: a user's function that does
            not return must not keep it running.
    """

    def watch() -> None:
        wait_for_stop()
        stopped.set()
        threading.Event().wait(seconds)
        os._exit(1)

    threading.Thread(target=watch, name="headrace-watch-parent", daemon=True).start()


def _send_line(line: str) -> None:
    # The parent may have ended; the closed link then tells this process to stop.
    with contextlib.suppress(OSError):
        os.write(_LINK, f"{line}\n".encode())


_STDERR = 2
_MAX_INTERVAL_SECONDS = 10.0
_is_armed = threading.Event()


def exit_when_hung(seconds: float) -> None:
    """Exit with code 1 when a hang is reported, or no thread could run Python code for `seconds`.

    Args:
        seconds: Longer than any function holds the GIL.
    """

    def rearm() -> None:
        pause = threading.Event()
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
            pause.wait(min(_MAX_INTERVAL_SECONDS, seconds / 10))

    _is_armed.set()
    threading.Thread(target=rearm, name="headrace-watchdog", daemon=True).start()


def report_hang(log: logging.Logger, message: str) -> None:
    """Log an error, and exit with code 1 if `exit_when_hung` was called.

    Args:
        log: Logger of the caller.
        message: What hangs, and where.
    """
    if not _is_armed.is_set():
        log.error("%s", message)
        return
    # Logging and printing may block on a lock that the hung thread holds.
    faulthandler.dump_traceback_later(_MAX_INTERVAL_SECONDS, exit=True, file=_STDERR)
    try:
        log.error("%s; exiting, so that the supervisor starts another process", message)
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(1)


LAST_LEVEL_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
"""File in which the kernel reports the size of the last-level cache, such as "32768K"."""
_TUNABLES = "GLIBC_TUNABLES"


def large_copy_tunables(
    variables: Mapping[str, str], cache: Path = LAST_LEVEL_CACHE_SIZE
) -> dict[str, str]:
    """Return variables to add to a child's environment; none if the user has set the tunables.

    Args:
        variables: The environment so far.
        cache: File with the size of the last-level cache.
    """
    if _TUNABLES in variables or platform.machine() != "x86_64":
        return {}
    try:
        kibibytes = int(cache.read_text().strip().removesuffix("K"))
    except (OSError, ValueError):
        return {}
    return {_TUNABLES: f"glibc.cpu.x86_non_temporal_threshold={kibibytes * 1024 // 4:#x}"}
