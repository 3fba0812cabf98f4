"""What to say where no more files can be opened, and how to find out before it hurts."""

from __future__ import annotations

import contextlib
import errno
import os

__all__ = ["check_room", "in_words"]

_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_ADVICE = "raise the limit (ulimit -n 4096)"


def in_words(error: Exception) -> str:
    """Return what an error says, and what would do if it is that no file can be opened."""
    words = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        words = error.strerror  # without its number
    if getattr(error, "errno", None) in _NONE_LEFT and "ulimit" not in words:
        words += f"; {_ADVICE}"
    return words


def check_room(count: int) -> None:
    """Check that `count` more files can be opened.

    Raises:
        OSError: They cannot.
    """
    with contextlib.ExitStack() as stack:
        opened = 0
        try:
            for opened in range(count):  # noqa: B007 - read after it
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in _NONE_LEFT:
                raise
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: {count} more are needed, and {opened} can be opened; "
                f"{_ADVICE}",
            ) from None
