"""A journal keeps facts and blobs: here what one promises, and one that is kept in memory.

Rule 1. What `append` returned from is kept: facts of one call all or not at all. Where it was
        kept, and is gone all the same, `replay` refuses to go on.
Rule 2. The journal never looks into a fact. A snapshot is what the facts before it add up to, put
        in their place at once, so that starting again takes bounded time.
Rule 3. A blob is kept in the parts that it arrived in. Its first part takes the place of whatever
        was kept under its key before.

`sqlite_journal` keeps these promises through a kill at any instant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from headrace.serving.blobs import BlobPart, BlobPlace

__all__ = ["COMPACT_AFTER", "Format", "Journal", "MemoryJournal"]

F = TypeVar("F")
S = TypeVar("S")

COMPACT_AFTER = 50_000
"""Facts after which a snapshot takes their place: about half a second's work to apply again."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Format(Generic[F, S]):
    """What a journal holds, and whose it is."""

    number: int
    """Another one for each change after which older files cannot be read."""
    file_name: str
    owner: str
    """Who keeps a journal, for errors: "dispatcher"."""
    fresh_start: str
    """How to do without it, for errors: "start with an empty work_dir ..."."""
    decode_facts: Callable[[bytes], list[F]]
    """From msgpack, as is the state."""
    decode_state: Callable[[bytes], S]
    first_state: Callable[[], S]
    """Before any fact."""
    apply: Callable[[S, F], None]


class Journal(ABC, Generic[F, S]):
    """Where facts and blobs are kept. For one thread at a time."""

    @abstractmethod
    def replay(self) -> S:
        """Return what all facts that were ever appended add up to.

        Raises:
            DataLossError: What was kept is damaged or gone; the message names the file.
        """

    @abstractmethod
    def append(self, facts: Sequence[F], blobs: Sequence[BlobPart] = ()) -> None:
        """Keep facts and parts of blobs, all or none of them.

        Raises:
            UnavailableError: They cannot be kept now; none of them was.
        """

    @abstractmethod
    def read_blob(self, place: BlobPlace) -> bytes:
        """Return a blob's bytes from a place on, to the end of a part.

        Raises:
            DataLossError: They are not there, or are damaged.
        """

    @abstractmethod
    def drop_blobs(self, except_for: Container[bytes]) -> None:
        """Forget all blobs but those with these keys."""

    @abstractmethod
    def compact(self, state: S) -> None:
        """Put `state`, what all facts add up to, in the place of facts that have become many."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file. May be called twice."""


class MemoryJournal(Journal[F, S]):
    """Keeps facts and blobs while the process lives: a restart begins with nothing.

    Args:
        format: What it holds.
        compact_after: Facts after which `compact` makes a snapshot.
    """

    def __init__(self, format: Format[F, S], *, compact_after: int = COMPACT_AFTER) -> None:
        self._format = format
        self._compact_after = compact_after
        self._snapshot: bytes | None = None
        self._facts: list[F] = []
        self._blobs: dict[bytes, dict[int, bytes]] = {}

    def replay(self) -> S:
        if self._snapshot is None:
            state = self._format.first_state()
        else:
            state = self._format.decode_state(self._snapshot)
        for fact in self._facts:
            self._format.apply(state, fact)
        return state

    def append(self, facts: Sequence[F], blobs: Sequence[BlobPart] = ()) -> None:
        for key, offset, part in blobs:
            kept = self._blobs.setdefault(key, {})
            if offset == 0:
                kept.clear()
            kept[offset] = part
        self._facts += facts

    def read_blob(self, place: BlobPlace) -> bytes:
        parts = self._blobs[place.key]
        start = max(offset for offset in parts if offset <= place.offset)
        return parts[start][place.offset - start :]

    def drop_blobs(self, except_for: Container[bytes]) -> None:
        self._blobs = {key: parts for key, parts in self._blobs.items() if key in except_for}

    def compact(self, state: S) -> None:
        if len(self._facts) >= self._compact_after:
            self._snapshot = _encode(state)
            self._facts.clear()

    def close(self) -> None:
        self._facts.clear()
        self._blobs.clear()
