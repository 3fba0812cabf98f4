"""The child's end of the link to its parent process: a socket in place of standard input.

The parent closes the link to ask the child to stop. The child writes lines of text: that it is
ready, and that a signal asked it to stop.

A child that must not outlive its parent also has a lifeline: a pipe without data, which closes only
when the parent has ended. The kernel then kills the child (`die_with_parent`), even inside a
function that holds the GIL and so never reads the link.

A hung child exits, so that its supervisor restarts it (`exit_when_hung`). If a C function never
releases the GIL, the process still answers pings of the transport but runs no Python code. No
Python thread can end it, but the watchdog thread of `faulthandler` can, because it does not need
the GIL: it prints the stacks of all threads and exits. A worker detects other hangs itself and
reports them with `report_hang`.

`large_copy_tunables` sets the minimum size of copies that bypass a child's CPU caches. A cached
store to uncached memory first reads the old contents; non-temporal stores avoid that. The GNU C
library uses them for copies above a threshold: since version 2.38, a quarter of the last-level
cache. But it asks the processor for the cache size, and some virtual machines report ten times the
real size. The threshold can be set only when a process starts.
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
_READ_BYTES = 4096


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
    """Install a handler of SIGTERM that reports to the parent and then calls `stop`.

    In processes that a user's function forks, the previous handler is restored. Must be called on
    the main thread.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        report_stopping()
        stop()

    previous_handler = signal.signal(signal.SIGTERM, handle)
    call_in_children(lambda: _set_handler(previous_handler))


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

    So user functions that fork need not clean up. Programs started with `exec` are not affected.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        yield
        return
    lifeline = os.pipe()

    def bind() -> None:
        nonlocal lifeline
        reader, writer = lifeline
        os.close(writer)
        # The kernel stores the process to kill in the open file description, which a forked process
        # shares with its parent, so this process opens the pipe again.
        reopened = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_NONBLOCK)
        os.close(reader)
        lifeline = os.pipe()
        die_with_parent(reopened)

    unregister = call_in_children(bind)
    try:
        yield
    finally:
        unregister()
        for descriptor in lifeline:
            os.close(descriptor)


def wait_for_stop() -> None:
    """Wait until the parent closes the link or ends."""
    with contextlib.suppress(OSError):
        while os.read(_LINK, _READ_BYTES):
            pass


def set_when_stopped(stopped: threading.Event, seconds: float) -> None:
    """Start a thread that sets `stopped` when the parent closes the link or ends.

    Args:
        stopped: Event that the main thread waits for.
        seconds: Grace period in seconds; after it the process exits even if a user's function has
            not returned.
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
    """Exit with code 1 when a hang is reported, or if no Python code could run for `seconds`.

    Args:
        seconds: Timeout in seconds; must exceed the longest time that a function holds the GIL.
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
        message: Description of the hung function or thread.
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
