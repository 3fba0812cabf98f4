"""The `headrace` command, also as `python -m headrace`.

Signals come first: what the commands need takes a while to import, and Ctrl-C may come meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_INTERRUPTED = 130
"""Exit code of what Ctrl-C ended, as shells have it."""


def _leave_quietly(number: int, frame: FrameType | None) -> None:
    # At once: an exception would be reported by whatever is being imported, or torn down.
    os._exit(_INTERRUPTED)


def main() -> None:
    """Run the command that the arguments name."""
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


#: Whether Ctrl-C is for this process: one that was started in the background may ignore it.
_is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _is_heeded:
    signal.signal(signal.SIGINT, _leave_quietly)

if __name__ == "__main__":
    main()
