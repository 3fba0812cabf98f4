"""The high-water mark: a small file beside a journal that says how many records were kept.

A log that is read up to the first record that does not fit looks complete where it was cut, and
where it was damaged in the middle or taken away. The mark knows better.

Rule 1. The mark is written after the record is durable, with one write into the page cache. It is
        never flushed: so it may fall behind when the machine loses power, and never runs ahead. It
        survives the end of the process in any case, since the kernel has it.
Rule 2. So a record beyond the mark is good, and a mark beyond the last record means loss.
Rule 3. A mark that is missing or cannot be read is no error: copies are made without it, and after
        a power cut it may be empty. One that cannot be written is none either: what it is about
        is kept, and it only falls behind.
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
    """The number of the last record that was kept.

    Args:
        path: Its file, which is made if need be. For one process at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._has_complained = False
        with self._complaining():
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> int | None:
        """Return the number, or None where the mark is new or cannot be read."""
        found = b""
        if self._file is not None:
            with self._complaining():
                found = os.pread(self._file, _WHOLE.size, 0)
        if len(found) != _WHOLE.size:
            return None
        magic, number, checksum = _WHOLE.unpack(found)
        if magic != _MAGIC or zlib.crc32(found[: _BODY.size]) != checksum:
            return None
        return int(number)

    def write(self, number: int) -> None:
        """Say that all records up to this one are durable."""
        if self._file is not None:
            body = _BODY.pack(_MAGIC, number)
            with self._complaining():
                os.pwrite(self._file, body + zlib.crc32(body).to_bytes(4, "little"), 0)

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                _log.warning(
                    "the high-water mark %s cannot be used (%s): should records be missing at the "
                    "journal's end when it is read again, nobody would notice",
                    self.path,
                    error,
                )
