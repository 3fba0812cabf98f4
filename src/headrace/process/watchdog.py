"""End this process when nothing of it can run Python any more.

A function in C that never returns the interpreter's lock leaves a process that answers pings and
does nothing. No thread of Python can end it, so a thread of `faulthandler` does, which needs no
lock: it prints where all threads are and exits. Whoever supervises the process starts another.
"""

from __future__ import annotations

import faulthandler
import threading

__all__ = ["exit_when_hung"]

_STDERR = 2
_LONGEST_INTERVAL = 10.0


def exit_when_hung(seconds: float) -> None:
    """Exit with code 1 when no thread could run Python code for so many seconds.

    Args:
        seconds: Longer than any function holds the interpreter's lock.
    """

    def rearm() -> None:
        pause = threading.Event()
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
            pause.wait(min(_LONGEST_INTERVAL, seconds / 10))

    threading.Thread(target=rearm, name="headrace-watchdog", daemon=True).start()
