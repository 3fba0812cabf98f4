"""Journal in an SQLite file, which survives a kill at any instant (`journal`).

Rule 1. A directory has one owner: an open journal keeps its file locked.
Rule 2. A forked child does not touch the file. SQLite would take the child for the owner, and
        remove the log that the parent is writing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import sqlite3
import weakref
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    JournalUnavailableError,
    UnavailableError,
)
from headrace.serving.blobs import BlobPart, BlobPosition
from headrace.serving.high_water import HighWaterMark
from headrace.serving.journal import COMPACT_AFTER, Journal, JournalFormat

__all__ = ["SqliteJournal"]

_log = logging.getLogger(__name__)

F = TypeVar("F")
S = TypeVar("S")
T = TypeVar("T")

_SCHEMA = """
CREATE TABLE events (number INTEGER PRIMARY KEY, body BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE snapshot (number INTEGER NOT NULL, body BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE blobs (
    key BLOB, start INTEGER, body BLOB NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (key, start)
);
PRAGMA user_version = {number};
"""

#: SQLite errors that come from the file system, not from the contents of the file.
_ACCESS_ERRORS = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY)
_DISK_ERRORS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)

_encode = msgspec.msgpack.Encoder().encode


class SqliteJournal(Journal[F, S]):
    """Journal in one SQLite file of a directory, which is created if missing.

    Beside the file are SQLite's own log (`-wal`), which is part of it, and a high-water mark
    (`-mark`) that reveals missing events at its end.

    Args:
        directory: Directory of the journal.
        format: Contents of the journal.
        compact_after: Number of events after which `compact` writes a snapshot.

    Raises:
        FailedPreconditionError: If another process uses the directory, another version of Headrace
            wrote the file, or the directory cannot be created.
        DataLossError: If the file is damaged.
    """

    def __init__(
        self, directory: Path, format: JournalFormat[F, S], *, compact_after: int = COMPACT_AFTER
    ) -> None:
        _make(directory, format.owner)
        self.path: Path = directory / format.file_name
        self._format = format
        self._compact_after = compact_after
        self._since_snapshot = 0
        self._last_record = 0
        self._is_forked = False
        #: SQLite's log as found, until it was read completely: SQLite overwrites a damaged one.
        self._initial_log = self._read_log()
        # The server passes it from its I/O thread to its timer thread, under its lock.
        with self._damage_reported():
            self._database = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=0.0
            )
        try:
            self._open()
            # Only after the file is locked: the mark belongs to the owner.
            self._mark = HighWaterMark(self.path.with_name(f"{self.path.name}-mark"))
        except DataLossError as error:
            damage = self._keep_log(error)
            self._database.close()
            raise damage from error
        except BaseException:
            self._database.close()
            raise
        _open_journals.add(self)

    def _open(self) -> None:
        execute = self._database.execute
        with self._damage_reported():
            try:
                # Before the first access, which takes the lock; it is held until `close`.
                execute("PRAGMA locking_mode = EXCLUSIVE")
                execute("PRAGMA journal_mode = WAL")
                execute("PRAGMA synchronous = FULL")
                execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                raise FailedPreconditionError(
                    f"journal {self.path} is in use by another {self._format.owner}: stop it "
                    f"first, or choose another directory than {self.path.parent}"
                ) from None
            (version,) = execute("PRAGMA user_version").fetchone()
            (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and tables == 0:
                for statement in _SCHEMA.format(number=self._format.number).split(";\n"):
                    execute(statement)
            elif version != self._format.number:
                execute("ROLLBACK")
                raise FailedPreconditionError(
                    f"journal {self.path} has format {version}, but this version of Headrace "
                    f"reads format {self._format.number}: use the version that wrote it, or "
                    f"{self._format.fresh_start}"
                )
            execute("COMMIT")

    def replay(self) -> S:
        try:
            state = self._replay()
        except DataLossError as error:
            raise self._keep_log(error) from error
        self._initial_log = b""
        return state

    def _replay(self) -> S:
        state, last = self._format.initial_state(), 0
        self._since_snapshot = 0
        with self._damage_reported():
            # Checksums detect changed records; this check detects missing ones.
            for table in ("events", "snapshot"):
                (found,) = self._database.execute(f"PRAGMA quick_check({table})").fetchone()
                if found != "ok":
                    raise self._damage_error(found)
            for number, body, checksum in self._database.execute(
                "SELECT number, body, checksum FROM snapshot"
            ):
                state = self._read(self._format.decode_state, "snapshot", number, body, checksum)
                last = number
            for number, body, checksum in self._database.execute(
                "SELECT number, body, checksum FROM events ORDER BY number"
            ):
                if number != last + 1:
                    raise self._damage_error(f"record {last + 1} is missing")
                events = self._read(self._format.decode_events, "record", number, body, checksum)
                last = number
                self._since_snapshot += len(events)
                for event in events:
                    self._format.apply(state, event)
        mark = self._mark.read()
        if mark is not None and mark > last:
            raise self._damage_error(
                f"records up to {mark} were written, but those after {last} are missing",
                ", or continue without them (also after restoring an older copy): delete "
                f"{self._mark.path}",
            )
        if mark is None and last:
            _log.warning(
                "journal %s has no readable high-water mark (copies have none): cannot "
                "detect whether records after %d are missing",
                self.path,
                last,
            )
        if mark != last:
            self._mark.write(last)
        self._last_record = last
        return state

    def append(self, events: Sequence[F], blobs: Sequence[BlobPart] = ()) -> None:
        if not events and not blobs:
            return
        with self._transaction():
            for key, offset, part in blobs:
                if offset == 0:
                    self._database.execute("DELETE FROM blobs WHERE key = ?", (key,))
                self._database.execute(
                    "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?)",
                    (key, offset, part, zlib.crc32(part)),
                )
            if events:
                body = _encode(events)
                self._database.execute(
                    "INSERT INTO events VALUES (?, ?, ?)",
                    (self._last_record + 1, body, zlib.crc32(body)),
                )
        if events:
            self._last_record += 1
            self._since_snapshot += len(events)
            self._mark.write(self._last_record)

    def read_blob(self, position: BlobPosition) -> bytes:
        with self._damage_reported():
            row = self._database.execute(
                "SELECT start, body, checksum FROM blobs WHERE key = ? AND start <= ? "
                "ORDER BY start DESC LIMIT 1",
                position,
            ).fetchone()
        found = "missing" if row is None else "damaged"
        if row is not None and isinstance(row[1], bytes) and zlib.crc32(row[1]) == row[2]:
            part: bytes = row[1][position.offset - row[0] :]
            if part:
                return part
        raise self._damage_error(f"blob {position.key.hex()} is {found} at byte {position.offset}")

    def drop_blobs(self, except_for: Container[bytes]) -> None:
        with self._damage_reported():
            keys = self._database.execute("SELECT DISTINCT key FROM blobs").fetchall()
        with self._transaction():
            self._database.executemany(
                "DELETE FROM blobs WHERE key = ?",
                [row for row in keys if row[0] not in except_for],
            )

    def compact(self, state: S) -> None:
        if self._since_snapshot < self._compact_after:
            return
        body = _encode(state)
        with self._transaction():
            self._database.execute("DELETE FROM snapshot")
            self._database.execute(
                "INSERT INTO snapshot VALUES (?, ?, ?)", (self._last_record, body, zlib.crc32(body))
            )
            self._database.execute("DELETE FROM events")
        self._since_snapshot = 0

    def close(self) -> None:
        if self._is_forked:
            return
        self._database.close()
        self._mark.close()

    def after_fork_in_child(self) -> None:
        """Keep everything open; called in a forked child."""
        self._is_forked = True
        # Not even at exit, when Python frees all objects.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._database))

    def _damage_error(self, found: object, else_do: str = "") -> DataLossError:
        return DataLossError(
            f"journal {self.path} is damaged: {found}. Restore it from a copy, or "
            f"{self._format.fresh_start}{else_do}"
        )

    def _read_log(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self.path.with_name(f"{self.path.name}-wal").read_bytes()
        return b""

    def _keep_log(self, error: DataLossError) -> DataLossError:
        """Save a copy of SQLite's log as found, and return the error with its path.

        SQLite takes a damaged log for a short one, and deletes it when the file is closed.
        """
        saved_path = self.path.with_name(f"{self.path.name}-wal-damaged")
        if self._initial_log:
            first_path = saved_path
            for number in itertools.count(2):
                if not saved_path.exists():
                    break
                saved_path = first_path.with_name(f"{first_path.name}-{number}")
            try:
                saved_path.write_bytes(self._initial_log)
            except OSError as failure:
                return DataLossError(f"{error}. Cannot save SQLite's log: {failure}")
        elif not saved_path.exists():  # saved by an earlier start
            return error
        return DataLossError(f"{error}. SQLite's log was saved in {saved_path}")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            yield
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise JournalUnavailableError(
                f"cannot write journal {self.path}: {error}; nothing was changed. Free disk "
                "space, or check why the disk refuses writes"
            ) from error

    def _read(
        self, decode: Callable[[bytes], T], kind: str, number: int, body: bytes, checksum: int
    ) -> T:
        if isinstance(body, bytes) and zlib.crc32(body) == checksum:
            with contextlib.suppress(msgspec.DecodeError):
                return decode(body)
        raise self._damage_error(f"{kind} {number}")

    @contextlib.contextmanager
    def _damage_reported(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            # A UnicodeDecodeError comes from SQLite quoting a damaged schema.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _DISK_ERRORS:
                raise UnavailableError(
                    f"cannot read or write journal {self.path}: {error}; free disk space, or "
                    "check the disk for errors"
                ) from error
            if code in _ACCESS_ERRORS:
                raise FailedPreconditionError(
                    f"cannot use journal {self.path}: {error}; check its permissions"
                ) from error
            raise self._damage_error(error) from error


def _make(directory: Path, owner: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise FailedPreconditionError(
            f"{directory} is a file, but the {owner}'s journal requires a directory"
        ) from None
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot create the directory {directory} of the {owner}'s journal "
            f"({error.strerror}): choose another one, or check the permissions"
        ) from error


#: Open journals of this process, which a forked child must not use.
_open_journals: weakref.WeakSet[SqliteJournal[Any, Any]] = weakref.WeakSet()


def _leave_journals_to_parent() -> None:
    for journal in list(_open_journals):
        journal.after_fork_in_child()


os.register_at_fork(after_in_child=_leave_journals_to_parent)
