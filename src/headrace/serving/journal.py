"""Interface of journals, which store events and blobs, and a journal in memory.

Rule 1. When `append` returns, its events are durable, all of them or none. If durable events were
        lost, `replay` raises an error.
Rule 2. Events are opaque to the journal. A snapshot replaces the events before it by the state that
        results from them, in one step, so that a restart takes bounded time.
Rule 3. A blob is stored in the parts in which it arrived. Its first part replaces any earlier blob
        of its key.

`sqlite_journal` keeps these guarantees if the process is killed at any instant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from headrace.serving.blobs import BlobPart, BlobPosition

__all__ = ["COMPACT_AFTER", "Journal", "JournalFormat", "MemoryJournal"]

F = TypeVar("F")
S = TypeVar("S")

COMPACT_AFTER = 50_000
"""Number of events after which a snapshot replaces them; replaying them takes about 0.5 s."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class JournalFormat(Generic[F, S]):
    """Contents and owner of a journal."""

    number: int
    """Format version; changes if older files can no longer be read."""
    file_name: str
    owner: str
    """Kind of server that owns the journal, for errors: "dispatcher"."""
    fresh_start: str
    """How to start without the journal, for errors: "start with an empty work_dir ..."."""
    decode_events: Callable[[bytes], list[F]]
    """Decodes msgpack, as does `decode_state`."""
    decode_state: Callable[[bytes], S]
    initial_state: Callable[[], S]
    """Returns the state before any event."""
    apply: Callable[[S, F], None]


class Journal(ABC, Generic[F, S]):
    """Storage for events and blobs. For one thread at a time."""

    @abstractmethod
    def replay(self) -> S:
        """Return the state that results from all appended events.

        Raises:
            DataLossError: If the journal is damaged or incomplete; the message names the file.
        """

    @abstractmethod
    def append(self, events: Sequence[F], blobs: Sequence[BlobPart] = ()) -> None:
        """Store events and parts of blobs, all or none of them.

        Raises:
            UnavailableError: If they cannot be stored now; none of them was.
        """

    @abstractmethod
    def read_blob(self, position: BlobPosition) -> bytes:
        """Return a blob's bytes from a position to the end of the stored part.

        Raises:
            DataLossError: If they are missing or damaged.
        """

    @abstractmethod
    def drop_blobs(self, except_for: Container[bytes]) -> None:
        """Delete all blobs except those with these keys."""

    @abstractmethod
    def compact(self, state: S) -> None:
        """Replace the events by a snapshot of the resulting `state`, if there are many."""

    @abstractmethod
    def close(self) -> None:
        """Close the file. Idempotent."""


class MemoryJournal(Journal[F, S]):
    """Journal in memory: a restart starts empty.

    Args:
        format: Contents of the journal.
        compact_after: Number of events after which `compact` creates a snapshot.
    """

    def __init__(self, format: JournalFormat[F, S], *, compact_after: int = COMPACT_AFTER) -> None:
        self._format = format
        self._compact_after = compact_after
        self._snapshot: bytes | None = None
        self._events: list[F] = []
        self._blobs: dict[bytes, dict[int, bytes]] = {}

    def replay(self) -> S:
        if self._snapshot is None:
            state = self._format.initial_state()
        else:
            state = self._format.decode_state(self._snapshot)
        for event in self._events:
            self._format.apply(state, event)
        return state

    def append(self, events: Sequence[F], blobs: Sequence[BlobPart] = ()) -> None:
        for key, offset, part in blobs:
            stored = self._blobs.setdefault(key, {})
            if offset == 0:
                stored.clear()
            stored[offset] = part
        self._events += events

    def read_blob(self, position: BlobPosition) -> bytes:
        parts = self._blobs[position.key]
        start = max(offset for offset in parts if offset <= position.offset)
        return parts[start][position.offset - start :]

    def drop_blobs(self, except_for: Container[bytes]) -> None:
        self._blobs = {key: parts for key, parts in self._blobs.items() if key in except_for}

    def compact(self, state: S) -> None:
        if len(self._events) >= self._compact_after:
            self._snapshot = _encode(state)
            self._events.clear()

    def close(self) -> None:
        self._events.clear()
        self._blobs.clear()
