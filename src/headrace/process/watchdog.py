"""End this process when it hangs, so that its supervisor starts another.

A function in C that never returns the interpreter's lock leaves a process that answers pings and
does nothing. No thread of Python can end it, so a thread of `faulthandler` does, which needs no
lock: it prints where all threads are and exits. A worker finds other hangs itself and
reports them with `report_hang`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading

__all__ = ["exit_when_hung", "report_hang"]

_STDERR = 2
_LONGEST_INTERVAL = 10.0
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
            pause.wait(min(_LONGEST_INTERVAL, seconds / 10))

    _is_armed.set()
    threading.Thread(target=rearm, name="headrace-watchdog", daemon=True).start()


def report_hang(log: logging.Logger, words: str) -> None:
    """Log an error, and exit with code 1 where `exit_when_hung` was called.

    Args:
        log: The logger of the caller.
        words: The message: what hangs, and where.
    """
    if not _is_armed.is_set():
        log.error("%s", words)
        return
    # Logging and printing may wait for a lock that the hung thread holds.
    faulthandler.dump_traceback_later(_LONGEST_INTERVAL, exit=True, file=_STDERR)
    try:
        log.error("%s; this process ends, so that its supervisor starts another", words)
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(1)
