"""Keeps facts and plans: in memory, or in an SQLite file that survives a kill at any instant.

Rule 1. What `append` returned from is kept: facts of one call all or not at all.
Rule 2. The journal never looks into a fact. A snapshot is what the facts before it add up to, put
        in their place in one transaction, so that starting again takes bounded time.
Rule 3. A work directory has one dispatcher: whoever opens the journal keeps the file locked.
Rule 4. A plan is kept in the parts that it arrived in. Its first part takes the place of whatever
        was kept under its digest before.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.errors import DataLossError, FailedPreconditionError, UnavailableError
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.decision import PlanPart, PlanPlace
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update

__all__ = ["Journal", "MemoryJournal", "SqliteJournal"]

FILE_NAME = "dispatcher.sqlite"
FORMAT = 2
COMPACT_AFTER = 50_000
"""Facts after which a snapshot takes their place: about half a second's work to apply again."""

_SCHEMA = f"""
CREATE TABLE facts (number INTEGER PRIMARY KEY, body BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE snapshot (number INTEGER NOT NULL, body BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE plans (
    digest BLOB, start INTEGER, body BLOB NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (digest, start)
);
PRAGMA user_version = {FORMAT};
"""

_CURE = "Restore it from a copy, or start with an empty work_dir and register everything again"

#: What the file system says no with, apart from what the file holds.
_REFUSED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY)

_T = TypeVar("_T")
_encode = msgspec.msgpack.Encoder().encode
_decode_facts = msgspec.msgpack.Decoder(list[Update]).decode
_decode_state = msgspec.msgpack.Decoder(DispatcherState).decode


class Journal(ABC):
    """Where facts and plans are kept. For one thread at a time."""

    @abstractmethod
    def replay(self) -> DispatcherState:
        """Return what all facts that were ever appended add up to.

        Raises:
            DataLossError: What was kept is damaged; the message names the file.
        """

    @abstractmethod
    def append(self, facts: Sequence[Update], parts: Sequence[PlanPart] = ()) -> None:
        """Keep facts and parts of plans, all or none of them.

        Raises:
            UnavailableError: They cannot be kept now; none of them was.
        """

    @abstractmethod
    def read_plan(self, place: PlanPlace) -> bytes:
        """Return a plan's bytes from a place on, to the end of a part.

        Raises:
            DataLossError: They are not there, or are damaged.
        """

    @abstractmethod
    def drop_plans(self, except_for: Container[bytes]) -> None:
        """Forget the plans that never arrived whole."""

    @abstractmethod
    def compact(self, state: DispatcherState) -> None:
        """Put `state`, what all facts add up to, in the place of facts that have become many."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file. May be called twice."""


class MemoryJournal(Journal):
    """Keeps facts and plans while the process lives: a restart begins with nothing.

    Args:
        compact_after: Facts after which `compact` makes a snapshot.
    """

    def __init__(self, *, compact_after: int = COMPACT_AFTER) -> None:
        self._compact_after = compact_after
        self._snapshot: bytes | None = None
        self._facts: list[Update] = []
        self._plans: dict[bytes, dict[int, bytes]] = {}

    def replay(self) -> DispatcherState:
        state = DispatcherState() if self._snapshot is None else _decode_state(self._snapshot)
        for fact in self._facts:
            apply(state, fact)
        return state

    def append(self, facts: Sequence[Update], parts: Sequence[PlanPart] = ()) -> None:
        for digest, offset, part in parts:
            kept = self._plans.setdefault(digest, {})
            if offset == 0:
                kept.clear()
            kept[offset] = part
        self._facts += facts

    def read_plan(self, place: PlanPlace) -> bytes:
        parts = self._plans[place.digest]
        start = max(offset for offset in parts if offset <= place.offset)
        return parts[start][place.offset - start :]

    def drop_plans(self, except_for: Container[bytes]) -> None:
        self._plans = {key: parts for key, parts in self._plans.items() if key in except_for}

    def compact(self, state: DispatcherState) -> None:
        if len(self._facts) >= self._compact_after:
            self._snapshot = _encode(state)
            self._facts.clear()

    def close(self) -> None:
        self._facts.clear()
        self._plans.clear()


class SqliteJournal(Journal):
    """Keeps everything in one SQLite file of a directory, which is made if need be.

    Args:
        work_dir: The directory.
        compact_after: Facts after which `compact` writes a snapshot.

    Raises:
        FailedPreconditionError: Another dispatcher uses the directory, or another version of
            Headrace wrote the file.
        DataLossError: The file is damaged.
    """

    def __init__(self, work_dir: Path, *, compact_after: int = COMPACT_AFTER) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        self.path = work_dir / FILE_NAME
        self._compact_after = compact_after
        self._since_snapshot = 0
        self._last = 0
        # The server hands it from its wire thread to its timer thread, under its lock.
        with self._damage_reported():
            self._database = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=0.0
            )
        try:
            self._open()
        except BaseException:
            self._database.close()
            raise

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
                    f"another dispatcher uses the journal {self.path}: stop it first, or give this "
                    "one a work_dir of its own"
                ) from None
            (version,) = execute("PRAGMA user_version").fetchone()
            (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and tables == 0:
                for statement in _SCHEMA.split(";\n"):
                    execute(statement)
            elif version != FORMAT:
                execute("ROLLBACK")
                raise FailedPreconditionError(
                    f"the journal {self.path} has format {version}, this version of Headrace "
                    f"reads format {FORMAT}: use the version that wrote it, or another work_dir "
                    "and register everything again"
                )
            execute("COMMIT")

    def replay(self) -> DispatcherState:
        state, last = DispatcherState(), 0
        self._since_snapshot = 0
        with self._damage_reported():
            # Checksums tell of records that changed; this tells of records that are gone.
            for table in ("facts", "snapshot"):
                (found,) = self._database.execute(f"PRAGMA quick_check({table})").fetchone()
                if found != "ok":
                    raise DataLossError(f"the journal {self.path} is damaged: {found}. {_CURE}")
            for number, body, checksum in self._database.execute(
                "SELECT number, body, checksum FROM snapshot"
            ):
                state = self._read(_decode_state, "snapshot", number, body, checksum)
                last = number
            for number, body, checksum in self._database.execute(
                "SELECT number, body, checksum FROM facts ORDER BY number"
            ):
                if number != last + 1:
                    raise DataLossError(
                        f"the journal {self.path} is damaged: record {last + 1} is missing. {_CURE}"
                    )
                facts = self._read(_decode_facts, "record", number, body, checksum)
                last = number
                self._since_snapshot += len(facts)
                for fact in facts:
                    apply(state, fact)
        self._last = last
        return state

    def append(self, facts: Sequence[Update], parts: Sequence[PlanPart] = ()) -> None:
        if not facts and not parts:
            return
        with self._transaction():
            for digest, offset, part in parts:
                if offset == 0:
                    self._database.execute("DELETE FROM plans WHERE digest = ?", (digest,))
                self._database.execute(
                    "INSERT OR REPLACE INTO plans VALUES (?, ?, ?, ?)",
                    (digest, offset, part, zlib.crc32(part)),
                )
            if facts:
                body = _encode(facts)
                self._database.execute(
                    "INSERT INTO facts VALUES (?, ?, ?)", (self._last + 1, body, zlib.crc32(body))
                )
        self._last += bool(facts)
        self._since_snapshot += len(facts)

    def read_plan(self, place: PlanPlace) -> bytes:
        with self._damage_reported():
            row = self._database.execute(
                "SELECT start, body, checksum FROM plans WHERE digest = ? AND start <= ? "
                "ORDER BY start DESC LIMIT 1",
                place,
            ).fetchone()
        found = "missing" if row is None else "damaged"
        if row is not None and isinstance(row[1], bytes) and zlib.crc32(row[1]) == row[2]:
            part: bytes = row[1][place.offset - row[0] :]
            if part:
                return part
        raise DataLossError(
            f"the plan {place.digest.hex()} in {self.path} is {found} at byte {place.offset}. "
            f"{_CURE}"
        )

    def drop_plans(self, except_for: Container[bytes]) -> None:
        with self._damage_reported():
            digests = self._database.execute("SELECT DISTINCT digest FROM plans").fetchall()
        with self._transaction():
            self._database.executemany(
                "DELETE FROM plans WHERE digest = ?",
                [row for row in digests if row[0] not in except_for],
            )

    def compact(self, state: DispatcherState) -> None:
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
        self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            yield
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise UnavailableError(
                f"the journal {self.path} cannot be written: {error}; nothing was changed. Make "
                "room on the disk, or see why it refuses"
            ) from error

    def _read(
        self, decode: Callable[[bytes], _T], what: str, number: int, body: bytes, checksum: int
    ) -> _T:
        if isinstance(body, bytes) and zlib.crc32(body) == checksum:
            with contextlib.suppress(msgspec.DecodeError):
                return decode(body)
        raise DataLossError(f"the journal {self.path} is damaged: {what} {number}. {_CURE}")

    @contextlib.contextmanager
    def _damage_reported(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            # A UnicodeDecodeError is SQLite quoting what it found in a damaged schema.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED:
                raise FailedPreconditionError(
                    f"the journal {self.path} cannot be used: {error}; see who may write there"
                ) from error
            raise DataLossError(f"the journal {self.path} is damaged: {error}. {_CURE}") from error
