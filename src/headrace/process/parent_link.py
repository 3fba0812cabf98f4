"""The child's end of the link to whoever started it: a socket in place of standard input.

The parent says one thing, by closing it: leave. The child writes lines of text: that it is ready,
and that somebody else has asked it to leave, by a signal.

A child that is of no use without its parent has a lifeline, too: a pipe that nobody writes to and
that closes only when the parent is gone. The kernel then kills the child, which may be inside a
function that holds the interpreter's lock and would never look at the link.

A child that hangs is ended, so that its supervisor starts another: a function in C that never
releases the interpreter's lock leaves a process that answers pings and does nothing. No thread of
Python can end it; a thread of `faulthandler` does, which needs no lock: it prints where all threads
are and exits. A worker finds other hangs itself and reports them with `report_hang`.

A child that copies much for others is told from which size on its copies write past the caches. A
store to memory that is not cached first reads what it overwrites. The GNU C library avoids that in
copies that are large beside the outer cache, from a quarter of it on since version 2.38. But it
asks the processor for the size of the cache, and some virtual machines claim ten times what there
is. Only the start of a process can set it.
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

from headrace.forks import in_each_child

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
        text: What the parent is to know, such as an address; no line feeds.
        log_to: Descriptor that takes over from standard output and error from now on, as the
            process's command named it.
    """
    _send_line(f"{READY} {text}")
    if log_to is not None:
        os.dup2(log_to, 1)
        os.dup2(log_to, 2)
        os.close(log_to)


def report_stopping() -> None:
    """Tell the parent that this process was asked to leave by somebody else."""
    _send_line(STOPPING)


def on_sigterm(stop: Callable[[], None]) -> None:
    """Have SIGTERM tell the parent that this process was asked to leave, and then call `stop`.

    A process that a user's function forks is not this one, and ends by SIGTERM as others do. To be
    called on the main thread.
    """

    def asked(number: int, frame: FrameType | None) -> None:
        report_stopping()
        stop()

    before = signal.signal(signal.SIGTERM, asked)
    in_each_child(lambda: _set_handler(before))


def _set_handler(handler: Any) -> None:
    signal.signal(signal.SIGTERM, handler)


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent is gone, where it can do that.

    Args:
        lifeline: Descriptor of the pipe, as the process's command named it.
    """
    set_signal = getattr(fcntl, "F_SETSIG", None)
    if set_signal is not None:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, set_signal, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        # It may have gone before the kernel was asked.
        if select.select([lifeline], [], [], 0.0)[0]:
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def bind_forked_children() -> Iterator[None]:
    """Have the kernel kill processes that are forked within this when it ends, and theirs.

    A function of a user's that forks is not asked to look after that; one that starts another
    program is left alone.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        yield
        return
    lifeline = os.pipe()

    def bind() -> None:
        nonlocal lifeline
        reader, writer = lifeline
        os.close(writer)
        # Whom the kernel is to kill is written at the open file, which a fork shares: so it is
        # opened again.
        mine = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_NONBLOCK)
        os.close(reader)
        lifeline = os.pipe()
        die_with_parent(mine)

    end = in_each_child(bind)
    try:
        yield
    finally:
        end()
        for descriptor in lifeline:
            os.close(descriptor)


def wait_for_stop() -> None:
    """Wait until the parent closes the link, or is gone."""
    with contextlib.suppress(OSError):
        while os.read(_LINK, _BLOCK):
            pass


def set_when_stopped(stopped: threading.Event, seconds: float) -> None:
    """Have a thread set `stopped` when the parent closes the link, or is gone.

    Args:
        stopped: For which the main thread waits.
        seconds: After so many more the process ends, whatever it does: a function of the user's
            that does not return must not keep it.
    """

    def watch() -> None:
        wait_for_stop()
        stopped.set()
        threading.Event().wait(seconds)
        os._exit(1)

    threading.Thread(target=watch, name="headrace-watch-parent", daemon=True).start()


def _send_line(line: str) -> None:
    # The parent may be gone; its end of the link then says all there is to say.
    with contextlib.suppress(OSError):
        os.write(_LINK, f"{line}\n".encode())


_STDERR = 2
_MAX_INTERVAL_SECONDS = 10.0
_is_armed = threading.Event()


def exit_when_hung(seconds: float) -> None:
    """Exit with code 1 when a hang is reported, or no thread could run Python code for so long.

    Args:
        seconds: Longer than any function holds the interpreter's lock.
    """

    def rearm() -> None:
        pause = threading.Event()
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
            pause.wait(min(_MAX_INTERVAL_SECONDS, seconds / 10))

    _is_armed.set()
    threading.Thread(target=rearm, name="headrace-watchdog", daemon=True).start()


def report_hang(log: logging.Logger, message: str) -> None:
    """Log an error, and exit with code 1 where `exit_when_hung` was called.

    Args:
        log: The logger of the caller.
        message: The message: what hangs, and where.
    """
    if not _is_armed.is_set():
        log.error("%s", message)
        return
    # Logging and printing may wait for a lock that the hung thread holds.
    faulthandler.dump_traceback_later(_MAX_INTERVAL_SECONDS, exit=True, file=_STDERR)
    try:
        log.error("%s; this process ends, so that its supervisor starts another", message)
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(1)


LAST_LEVEL_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
"""Where the kernel says how large the outer cache is: "32768K"."""
_TUNABLES = "GLIBC_TUNABLES"


def large_copy_tunables(
    variables: Mapping[str, str], cache: Path = LAST_LEVEL_CACHE_SIZE
) -> dict[str, str]:
    """Return what to add to a child's environment; nothing where the user has tuned the library.

    Args:
        variables: The environment so far.
        cache: Where the size of the outer cache is.
    """
    if _TUNABLES in variables or platform.machine() != "x86_64":
        return {}
    try:
        kibibytes = int(cache.read_text().strip().removesuffix("K"))
    except (OSError, ValueError):
        return {}
    return {_TUNABLES: f"glibc.cpu.x86_non_temporal_threshold={kibibytes * 1024 // 4:#x}"}
