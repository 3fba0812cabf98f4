"""The `headrace` command, also as `python -m headrace`.

Signal handling is set up first: imports take a while, and Ctrl-C may come during them.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


def _leave_quietly(number: int, frame: FrameType | None) -> None:
    # Exit at once: an exception would be reported by code that is being imported or torn down.
    os._exit(_INTERRUPTED)


def main() -> None:
    """Run the command given by the arguments."""
    from headrace.cli.main import app  # noqa: PLC0415 - after signals are seen to

    try:
        if _is_heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app(prog_name="headrace")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        if _is_heeded:
            signal.signal(signal.SIGINT, _leave_quietly)


#: Whether this process handles Ctrl-C: one started in the background may ignore it.
_is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _is_heeded:
    signal.signal(signal.SIGINT, _leave_quietly)

if __name__ == "__main__":
    main()
