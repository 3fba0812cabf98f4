"""A disk that is full: waited for as long as somebody may make room, and named.

What was written stays as it is meanwhile: the write goes on where it stopped.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from headrace.errors import UnavailableError

__all__ = ["IMPATIENT", "Patience", "PatientFile"]

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Patience:
    """How long to try again where a disk is full.

    Attributes:
        seconds: For so long; 0: not at all.
        pause: Waits for so many seconds; returns whether to go on.
    """

    seconds: float
    pause: Callable[[float], bool]

    def until_there_is_room(self, act: Callable[[], T], path: str) -> T:
        """Return what `act` returns, which is tried again while the disk is full.

        Raises:
            UnavailableError: It is full all the time; the message says how much is free.
        """
        since: float | None = None
        while True:
            try:
                return act()
            except (OSError, UnavailableError) as error:
                if not _is_full(error):
                    raise
                now = time.monotonic()
                since = now if since is None else since
                if now - since >= self.seconds or not self.pause(_LOOK_SECONDS):
                    raise UnavailableError(_words(path, now - since)) from error


IMPATIENT = Patience(0.0, lambda seconds: False)
"""For whoever is there to see the error."""


class PatientFile:
    """A file that is written, perhaps after a wait for room.

    Args:
        file: Open for writing, without a buffer.
        path: Of the file, for messages.
        patience: How long to wait.
    """

    def __init__(self, file: BinaryIO, path: str, patience: Patience) -> None:
        self._file = file
        self._path = path
        self._patience = patience

    def write(self, data: Any) -> int:
        """Write some of the bytes; return how many."""
        return self._patience.until_there_is_room(lambda: self._file.write(data), self._path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) and error.errno else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _FULL


def _words(path: str, seconds: float) -> str:
    words = f"{path!r} cannot be written: {os.strerror(errno.ENOSPC)}"
    if seconds >= 1:
        words += f", for {seconds:.0f} s"
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        space = shutil.disk_usage(folder)
        words += f" ({space.free:,} of {space.total:,} bytes are free there)"
    return words
