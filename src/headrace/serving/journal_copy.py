"""Reader of a journal that another process may be writing: opens a copy, never the files.

The owner keeps the file locked and appends to SQLite's log; from time to time it moves the log into
the file and restarts the log. A copy of both is consistent if neither the file nor the log's header
changed during the copy; SQLite ignores an incomplete last record.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from headrace.serving.journal import JournalFormat

__all__ = ["JournalCopy"]

F = TypeVar("F")
S = TypeVar("S")
T = TypeVar("T")

_MAX_ATTEMPTS = 20
_LOG_HEADER = 32


class JournalCopy(Generic[F, S]):
    """Recent contents of a journal. A context manager.

    Args:
        directory: Directory of the journal.
        format: Contents of the journal.

    Raises:
        NotFoundError: If there is no journal.
        FailedPreconditionError: If another version of Headrace wrote it.
        UnavailableError: If it changes too fast to be copied.
        DataLossError: If it is damaged.
    """

    def __init__(self, directory: Path, format: JournalFormat[F, S]) -> None:
        self._format = format
        self.path: Path = directory / format.file_name
        if not self.path.is_file():
            raise NotFoundError(
                f"no journal in {directory}: the file {format.file_name} does not exist"
            )
        self._resources = contextlib.ExitStack()
        try:
            folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="headrace-"))
            copied = Path(folder) / format.file_name
            _copy(self.path, copied)
            self._database = sqlite3.connect(copied, isolation_level=None)
            self._resources.callback(self._database.close)
            with self._damage_reported():
                (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version != format.number:
                raise FailedPreconditionError(
                    f"journal {self.path} has format {version}, but this version of Headrace "
                    f"reads format {format.number}: use the version that wrote it"
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> JournalCopy[F, S]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def first_state(self) -> tuple[int, S]:
        """Return the number and state of the snapshot before the stored events."""
        with self._damage_reported():
            row = self._database.execute("SELECT number, body, checksum FROM snapshot").fetchone()
        if row is None:
            return 0, self._format.initial_state()
        return row[0], self._read(self._format.decode_state, *row)

    def records(self) -> Iterator[tuple[int, list[F]]]:
        """Yield the number and events of each record after the snapshot."""
        cursor = self._database.cursor()
        with self._damage_reported():
            cursor.execute("SELECT number, body, checksum FROM events ORDER BY number")
        while True:
            with self._damage_reported():
                row = cursor.fetchone()
            if row is None:
                return
            yield row[0], self._read(self._format.decode_events, *row)

    def close(self) -> None:
        """Delete the copy. Idempotent."""
        self._resources.close()

    def _read(self, decode: Callable[[bytes], T], number: int, body: Any, checksum: int) -> T:
        if isinstance(body, bytes) and zlib.crc32(body) == checksum:
            with contextlib.suppress(msgspec.DecodeError):
                return decode(body)
        raise DataLossError(f"journal {self.path} is damaged: record {number}")

    @contextlib.contextmanager
    def _damage_reported(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise DataLossError(f"journal {self.path} is damaged: {error}") from error


def _copy(source: Path, target: Path) -> None:
    """Copy a consistent pair of database and log."""
    log, copied_log = (path.with_name(f"{path.name}-wal") for path in (source, target))
    for _ in range(_MAX_ATTEMPTS):
        before = _version(source, log)
        copied_log.unlink(missing_ok=True)
        # The log first: records moved into the file after that are in both.
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(log, copied_log)
        shutil.copyfile(source, target)
        if _version(source, log) == before:
            return
    raise UnavailableError(
        f"cannot copy journal {source} consistently, because it is written too fast; try again"
    )


def _version(source: Path, log: Path) -> object:
    status = source.stat()
    header = b""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        header = file.read(_LOG_HEADER)
    return status.st_mtime_ns, status.st_size, header
