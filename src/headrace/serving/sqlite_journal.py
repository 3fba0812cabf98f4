"""A journal in an SQLite file, which survives a kill at any instant (`journal`).

Rule 1. A directory has one owner: whoever opens the journal keeps the file locked.
Rule 2. A forked child leaves the file alone. SQLite would take itself for its owner there, and
        tidy away the log that the parent goes on writing.
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
from headrace.serving.blobs import BlobPart, BlobPlace
from headrace.serving.high_water import HighWaterMark
from headrace.serving.journal import COMPACT_AFTER, Format, Journal

__all__ = ["SqliteJournal"]

_log = logging.getLogger(__name__)

F = TypeVar("F")
S = TypeVar("S")
T = TypeVar("T")

_SCHEMA = """
CREATE TABLE facts (number INTEGER PRIMARY KEY, body BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE snapshot (number INTEGER NOT NULL, body BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE blobs (
    key BLOB, start INTEGER, body BLOB NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (key, start)
);
PRAGMA user_version = {number};
"""

#: What the file system says no with, apart from what the file holds.
_REFUSED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)

_encode = msgspec.msgpack.Encoder().encode


class SqliteJournal(Journal[F, S]):
    """Keeps everything in one SQLite file of a directory, which is made if need be.

    Beside it are SQLite's own log (`-wal`), which belongs to it, and a mark (`-mark`) that tells
    whether facts are missing at its end.

    Args:
        directory: Where.
        format: What it holds.
        compact_after: Facts after which `compact` writes a snapshot.

    Raises:
        FailedPreconditionError: Another process uses the directory, another version of Headrace
            wrote the file, or there can be no such directory.
        DataLossError: The file is damaged.
    """

    def __init__(
        self, directory: Path, format: Format[F, S], *, compact_after: int = COMPACT_AFTER
    ) -> None:
        _make(directory, format.owner)
        self.path = directory / format.file_name
        self._format = format
        self._compact_after = compact_after
        self._since_snapshot = 0
        self._last = 0
        self._is_the_parents = False
        #: SQLite's log as it was found, until all of it was read: SQLite writes over a damaged one.
        self._log_found = self._read_log()
        # The server hands it from its wire thread to its timer thread, under its lock.
        with self._damage_reported():
            self._database = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=0.0
            )
        try:
            self._open()
            # Not before the file is locked: the mark is its owner's.
            self._mark = HighWaterMark(self.path.with_name(f"{self.path.name}-mark"))
        except DataLossError as error:
            damage = self._with_log(error)
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
                # Before the first access: the lock is taken then and kept until `close`.
                execute("PRAGMA locking_mode = EXCLUSIVE")
                execute("PRAGMA journal_mode = WAL")
                execute("PRAGMA synchronous = FULL")
                execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                raise FailedPreconditionError(
                    f"another {self._format.owner} uses the journal {self.path}: stop it first, or "
                    f"choose another directory than {self.path.parent}"
                ) from None
            (version,) = execute("PRAGMA user_version").fetchone()
            (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and tables == 0:
                for statement in _SCHEMA.format(number=self._format.number).split(";\n"):
                    execute(statement)
            elif version != self._format.number:
                execute("ROLLBACK")
                raise FailedPreconditionError(
                    f"the journal {self.path} has format {version}, this version of Headrace "
                    f"reads format {self._format.number}: use the version that wrote it, or "
                    f"{self._format.fresh_start}"
                )
            execute("COMMIT")

    def replay(self) -> S:
        try:
            state = self._replay()
        except DataLossError as error:
            raise self._with_log(error) from error
        self._log_found = b""
        return state

    def _replay(self) -> S:
        state, last = self._format.first_state(), 0
        self._since_snapshot = 0
        with self._damage_reported():
            # Checksums tell of records that changed; this tells of records that are gone.
            for table in ("facts", "snapshot"):
                (found,) = self._database.execute(f"PRAGMA quick_check({table})").fetchone()
                if found != "ok":
                    raise self._damage(found)
            for number, body, checksum in self._database.execute(
                "SELECT number, body, checksum FROM snapshot"
            ):
                state = self._read(self._format.decode_state, "snapshot", number, body, checksum)
                last = number
            for number, body, checksum in self._database.execute(
                "SELECT number, body, checksum FROM facts ORDER BY number"
            ):
                if number != last + 1:
                    raise self._damage(f"record {last + 1} is missing")
                facts = self._read(self._format.decode_facts, "record", number, body, checksum)
                last = number
                self._since_snapshot += len(facts)
                for fact in facts:
                    self._format.apply(state, fact)
        kept = self._mark.read()
        if kept is not None and kept > last:
            raise self._damage(
                f"records up to {kept} were kept, and those after {last} are gone",
                f", or go on without them (also after restoring an older copy): delete "
                f"{self._mark.path}",
            )
        if kept is None and last:
            _log.warning(
                "the journal %s has no high-water mark that can be read, as copies have none: "
                "whether records are missing after %d, nobody can tell",
                self.path,
                last,
            )
        if kept != last:
            self._mark.write(last)
        self._last = last
        return state

    def append(self, facts: Sequence[F], blobs: Sequence[BlobPart] = ()) -> None:
        if not facts and not blobs:
            return
        with self._transaction():
            for key, offset, part in blobs:
                if offset == 0:
                    self._database.execute("DELETE FROM blobs WHERE key = ?", (key,))
                self._database.execute(
                    "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?)",
                    (key, offset, part, zlib.crc32(part)),
                )
            if facts:
                body = _encode(facts)
                self._database.execute(
                    "INSERT INTO facts VALUES (?, ?, ?)", (self._last + 1, body, zlib.crc32(body))
                )
        if facts:
            self._last += 1
            self._since_snapshot += len(facts)
            self._mark.write(self._last)

    def read_blob(self, place: BlobPlace) -> bytes:
        with self._damage_reported():
            row = self._database.execute(
                "SELECT start, body, checksum FROM blobs WHERE key = ? AND start <= ? "
                "ORDER BY start DESC LIMIT 1",
                place,
            ).fetchone()
        found = "missing" if row is None else "damaged"
        if row is not None and isinstance(row[1], bytes) and zlib.crc32(row[1]) == row[2]:
            part: bytes = row[1][place.offset - row[0] :]
            if part:
                return part
        raise self._damage(f"the blob {place.key.hex()} is {found} at byte {place.offset}")

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
                "INSERT INTO snapshot VALUES (?, ?, ?)", (self._last, body, zlib.crc32(body))
            )
            self._database.execute("DELETE FROM facts")
        self._since_snapshot = 0

    def close(self) -> None:
        if self._is_the_parents:
            return
        self._database.close()
        self._mark.close()

    def leave_to_parent(self) -> None:
        """Let go of nothing, ever; called in a process that was just forked."""
        self._is_the_parents = True
        # Not even at the end of this process, when everything that can be freed is.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._database))

    def _damage(self, found: object, else_do: str = "") -> DataLossError:
        return DataLossError(
            f"the journal {self.path} is damaged: {found}. Restore it from a copy, or "
            f"{self._format.fresh_start}{else_do}"
        )

    def _read_log(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self.path.with_name(f"{self.path.name}-wal").read_bytes()
        return b""

    def _with_log(self, error: DataLossError) -> DataLossError:
        """Keep SQLite's log as it was found, and return the error that says where.

        SQLite takes a damaged log for a short one, and deletes it when the file is closed.
        """
        kept = self.path.with_name(f"{self.path.name}-wal-damaged")
        if self._log_found:
            earlier = kept
            for number in itertools.count(2):
                if not kept.exists():
                    break
                kept = earlier.with_name(f"{earlier.name}-{number}")
            try:
                kept.write_bytes(self._log_found)
            except OSError as failure:
                return DataLossError(f"{error}. SQLite's log cannot be kept: {failure}")
        elif not kept.exists():  # by an earlier start
            return error
        return DataLossError(f"{error}. SQLite's log as it was found is kept in {kept}")

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
                f"the journal {self.path} cannot be written: {error}; nothing was changed. Make "
                "room on the disk, or see why it refuses"
            ) from error

    def _read(
        self, decode: Callable[[bytes], T], what: str, number: int, body: bytes, checksum: int
    ) -> T:
        if isinstance(body, bytes) and zlib.crc32(body) == checksum:
            with contextlib.suppress(msgspec.DecodeError):
                return decode(body)
        raise self._damage(f"{what} {number}")

    @contextlib.contextmanager
    def _damage_reported(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            # A UnicodeDecodeError is SQLite quoting what it found in a damaged schema.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _NO_ROOM:
                raise UnavailableError(
                    f"the journal {self.path} cannot be read or written: {error}; make room on the "
                    "disk, or see whether it is sound"
                ) from error
            if code in _REFUSED:
                raise FailedPreconditionError(
                    f"the journal {self.path} cannot be used: {error}; see who may write there"
                ) from error
            raise self._damage(error) from error


def _make(directory: Path, owner: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise FailedPreconditionError(
            f"{directory} is a file and cannot hold the {owner}'s journal: name a directory"
        ) from None
    except OSError as error:
        raise FailedPreconditionError(
            f"the directory {directory} for the {owner}'s journal cannot be made "
            f"({error.strerror}): name another, or see who may write there"
        ) from error


#: Those of this process, which a fork must not share.
_open_journals: weakref.WeakSet[SqliteJournal[Any, Any]] = weakref.WeakSet()


def _leave_journals_to_the_parent() -> None:
    for journal in list(_open_journals):
        journal.leave_to_parent()


os.register_at_fork(after_in_child=_leave_journals_to_the_parent)
