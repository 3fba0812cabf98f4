"""`headrace top`: a live view of a dispatcher, coordinator or parameter server, until q."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Annotated

import typer

from headrace.cli.commands import Keys
from headrace.cli.formatting import format_duration
from headrace.cli.inspect import WIDTH_WITHOUT_TERMINAL, Address, Timeout, render_snapshot
from headrace.cli.run_server import STOP_SIGNALS, Signals
from headrace.cli.status_client import StatusClient, StatusSnapshot
from headrace.errors import HeadraceError

__all__ = ["show_top"]

_ENTER = "\x1b[?1049h\x1b[?25l"
"""Switch to the alternate screen, which preserves the previous contents, and hide the cursor."""
_LEAVE = "\x1b[?25h\x1b[?1049l"
_QUIT_KEYS = b"qQ\x03\x04"
"""Keys: q, and Ctrl-C and Ctrl-D if the terminal passes them on."""
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


def show_top(
    address: Address,
    keys: Keys = None,
    timeout: Timeout = 5.0,
    interval: Annotated[float, typer.Option(help="Seconds between updates.")] = 1.0,
) -> None:
    """Show a live view of a dispatcher, coordinator or parameter server; q quits.

    For a dispatcher: jobs, workers, rates and the bottleneck of each epoch. For a coordinator:
    queued and running functions, and the load of the parameter servers.

    Without a terminal, print one frame and exit.
    """
    if not interval > 0:
        raise typer.BadParameter(f"--interval {interval:g} must be greater than 0")
    with StatusClient(address, keys, timeout) as client:
        snapshot = client.fetch()
        if not (sys.stdout.isatty() and sys.stdin.isatty()):
            sys.stdout.write(render_snapshot(snapshot, None, WIDTH_WITHOUT_TERMINAL))
            return
        with _open_screen(), Signals() as signals:
            _watch(client, snapshot, signals, timeout, interval)


def _watch(
    client: StatusClient,
    snapshot: StatusSnapshot,
    signals: Signals,
    timeout: float,
    interval: float,
) -> None:
    previous: StatusSnapshot | None = None
    last_reply_at, problem = time.monotonic(), ""
    while True:
        size = shutil.get_terminal_size()
        lines = render_snapshot(snapshot, previous, size.columns).splitlines()
        if problem:
            silence = format_duration(time.monotonic() - last_reply_at)
            lines.insert(0, f"no reply for {silence}: {problem}"[: size.columns])
        shown = f"{_REST_OF_LINE}\n".join(lines[: size.lines - 1])
        sys.stdout.write(f"{_HOME}{shown}{_REST_OF_LINE}{_REST}")
        sys.stdout.flush()
        if _wait_for_quit(signals, interval):
            return
        try:
            previous, snapshot = snapshot, client.fetch(min(timeout, 2.0))
            last_reply_at, problem = time.monotonic(), ""
        except HeadraceError as error:
            problem = str(error)


def _wait_for_quit(signals: Signals, seconds: float) -> bool:
    """Wait for `seconds`; return whether the user wants to quit."""
    deadline, had_nothing = time.monotonic() + seconds, False
    while (remaining := deadline - time.monotonic()) > 0:
        if signals.wait(remaining, readable=[sys.stdin]) & STOP_SIGNALS:
            return True
        if not select.select([sys.stdin], [], [], 0)[0]:
            continue
        # A key, or the end of the terminal; empty if Ctrl-C or Ctrl-Z has discarded a key before it
        # could be read.
        keys = os.read(sys.stdin.fileno(), 64)
        if any(key in _QUIT_KEYS for key in keys):
            return True
        if not keys:
            if had_nothing:
                return True
            had_nothing = True
    return False


@contextlib.contextmanager
def _open_screen() -> Iterator[None]:
    """Configure the terminal, and restore it afterwards."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        mode = termios.tcgetattr(sys.stdin)
        # Reading must not block: a key that `select` reported may no longer be available.
        mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
