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

from headrace.cli.asking import Asking, Look
from headrace.cli.commands import Keys
from headrace.cli.inspect import WIDTH_WITHOUT_TERMINAL, Address, Timeout, render_look
from headrace.cli.running import STOP_SIGNALS, Signals
from headrace.cli.tables import duration
from headrace.errors import HeadraceError

__all__ = ["show_top"]

_ENTER = "\x1b[?1049h\x1b[?25l"
"""The other screen, so that what was there is there again afterwards; and no cursor."""
_LEAVE = "\x1b[?25h\x1b[?1049l"
_LEAVING = b"qQ\x03\x04"
"""Keys: q, and Ctrl-C and Ctrl-D where the terminal hands them on."""
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


def show_top(
    address: Address,
    keys: Keys = None,
    timeout: Timeout = 5.0,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a dispatcher, a coordinator or a parameter server; q leaves.

    Of a dispatcher: jobs, workers, rates, who waits for whom. Of a coordinator: functions, what
    each worker runs, what parameter servers keep and do.

    Without a terminal it prints one frame and ends.
    """
    if not interval > 0:
        raise typer.BadParameter(f"--interval {interval:g} must be above 0")
    with Asking(address, keys, timeout) as asking:
        look = asking.look()
        if not (sys.stdout.isatty() and sys.stdin.isatty()):
            sys.stdout.write(render_look(look, None, WIDTH_WITHOUT_TERMINAL))
            return
        with _screen(), Signals() as signals:
            _watch(asking, look, signals, timeout, interval)


def _watch(
    asking: Asking,
    look: Look,
    signals: Signals,
    timeout: float,
    interval: float,
) -> None:
    previous: Look | None = None
    answered, problem = time.monotonic(), ""
    while True:
        size = shutil.get_terminal_size()
        lines = render_look(look, previous, size.columns).splitlines()
        if problem:
            silence = duration(time.monotonic() - answered)
            lines.insert(0, f"no answer for {silence}: {problem}"[: size.columns])
        shown = f"{_REST_OF_LINE}\n".join(lines[: size.lines - 1])
        sys.stdout.write(f"{_HOME}{shown}{_REST_OF_LINE}{_REST}")
        sys.stdout.flush()
        if _is_over(signals, interval):
            return
        try:
            previous, look = look, asking.look(min(timeout, 2.0))
            answered, problem = time.monotonic(), ""
        except HeadraceError as error:
            problem = str(error)


def _is_over(signals: Signals, seconds: float) -> bool:
    """Wait so long; return whether somebody wants to leave."""
    until, had_nothing = time.monotonic() + seconds, False
    while (left := until - time.monotonic()) > 0:
        if signals.wait(left, readable=[sys.stdin]) & STOP_SIGNALS:
            return True
        if not select.select([sys.stdin], [], [], 0)[0]:
            continue
        # A key, or the end of the terminal; nothing at all where Ctrl-C or Ctrl-Z has thrown away
        # a key before it could be read.
        keys = os.read(sys.stdin.fileno(), 64)
        if any(key in _LEAVING for key in keys):
            return True
        if not keys:
            if had_nothing:
                return True
            had_nothing = True
    return False


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Take the terminal over, and give it back as it was."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        mode = termios.tcgetattr(sys.stdin)
        # Reading never waits: `select` may have seen a key that is gone by then.
        mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
