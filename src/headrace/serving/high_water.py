"""High-water mark: a small file beside a journal that records how many records were written.

A log that is read up to the first invalid record looks complete even if it was truncated, damaged
in the middle or removed. The mark detects that.

Rule 1. The mark is written after the record is durable, with one write into the page cache. It is
        never flushed, so it may fall behind after a power failure, but is never ahead. It survives
        the end of the process, since the kernel holds it.
Rule 2. So a record beyond the mark is valid, and a mark beyond the last record means data loss.
Rule 3. A missing or unreadable mark is no error: copies are made without it, and after a power
        failure it may be empty. Nor is a mark that cannot be written: its records are durable, and
        it only falls behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HighWaterMark"]

_log = logging.getLogger(__name__)

_MAGIC = b"headrace"
_BODY = struct.Struct("<8sQ")
_WHOLE = struct.Struct("<8sQI")


class HighWaterMark:
    """Number of the last durable record.

    Args:
        path: File of the mark, created if missing. For one process at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._has_logged = False
        with self._log_errors():
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> int | None:
        """Return the number, or None if the mark is new or unreadable."""
        found = b""
        if self._file is not None:
            with self._log_errors():
                found = os.pread(self._file, _WHOLE.size, 0)
        if len(found) != _WHOLE.size:
            return None
        magic, number, checksum = _WHOLE.unpack(found)
        if magic != _MAGIC or zlib.crc32(found[: _BODY.size]) != checksum:
            return None
        return int(number)

    def write(self, number: int) -> None:
        """Record that all records up to this one are durable."""
        if self._file is not None:
            body = _BODY.pack(_MAGIC, number)
            with self._log_errors():
                os.pwrite(self._file, body + zlib.crc32(body).to_bytes(4, "little"), 0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @contextlib.contextmanager
    def _log_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_logged:
                self._has_logged = True
                _log.warning(
                    "cannot use the high-water mark %s (%s): records missing at the end of the "
                    "journal would not be detected when it is read again",
                    self.path,
                    error,
                )
