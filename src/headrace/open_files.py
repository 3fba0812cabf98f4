"""Error messages for exhausted file descriptors, and a check for available ones."""

from __future__ import annotations

import contextlib
import errno
import os

__all__ = ["check_available", "explain_open_error"]

_LIMIT_ERRORS = (errno.EMFILE, errno.ENFILE)
_ADVICE = "raise the limit (ulimit -n 4096)"


def explain_open_error(error: Exception) -> str:
    """Return an error's message, with advice if the limit of open files was reached."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        message = error.strerror  # without its number
    if getattr(error, "errno", None) in _LIMIT_ERRORS and "ulimit" not in message:
        message += f"; {_ADVICE}"
    return message


def check_available(count: int) -> None:
    """Check that `count` more files can be opened.

    Raises:
        OSError: If they cannot.
    """
    with contextlib.ExitStack() as stack:
        opened = 0
        try:
            for opened in range(count):  # noqa: B007 - read after it
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in _LIMIT_ERRORS:
                raise
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: {count} more are required, but only {opened} "
                f"can be opened; {_ADVICE}",
            ) from None
