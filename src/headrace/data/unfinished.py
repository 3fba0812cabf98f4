"""Saved datasets that are read while they are being saved.

Rule 1. Chunk files come in their order, which is that of the finished dataset: each is waited for.
        So a position is the same before and after the dataset is finished.
Rule 2. It is a source of its own kind, also of a directory that is finished by now: whether a
        saved state fits does not depend on when it is restored.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace import saved
from headrace.element.chunk import Chunk
from headrace.element.spec import Spec
from headrace.errors import (
    AbortedError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
)
from headrace.execution.threads import LongWait
from headrace.plan.source import Position, Reader, Source, check_limit, check_range
from headrace.saved.directory import SavedDirectory, Standing
from headrace.saved.format import ChunkRecord

__all__ = ["WAIT_SECONDS", "Patience", "UnfinishedSource", "Watch", "failed"]

WAIT_SECONDS = 3600.0
"""How long something new is waited for."""

_FIRST_LOOK = 0.02
_LONGEST = {True: 0.5, False: 5.0}
"""Seconds between two looks at a directory: on a local disk, and elsewhere."""


@dataclass(frozen=True, eq=False)
class UnfinishedSource(Source):
    """The elements of a dataset that may still be saved; it is one index, read to its end.

    Args:
        path: The directory.
        save: Id of the save.
        stream: The only stream whose elements these are; None: those of all.
        spec: Spec of the elements; None where it is not known.
        wait_timeout: Seconds without anything new after which it is waited for no more.
    """

    speed_only: ClassVar[tuple[str, ...]] = ("path", "spec", "wait_timeout")

    path: str
    save: str
    stream: int | None
    spec: Spec | None
    wait_timeout: float = WAIT_SECONDS

    @property
    def size(self) -> int:
        """1: how many chunk files there will be is not known yet."""
        return 1

    @property
    def element_spec(self) -> Spec | None:
        """Spec of one element."""
        return self.spec

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        """Return a reader that waits for chunk files."""
        check_range(start, stop, self.size)
        return _UnfinishedReader(self, stop - start, position)


class _UnfinishedReader:
    """Reads a dataset while it is being saved.

    Its position is `[file, elements]`: how many files were read, and elements of the next one.
    """

    def __init__(self, source: UnfinishedSource, indices: int, position: Position) -> None:
        self._number, self._row = _checked(position)
        self._source = source
        self._is_at_end = not indices
        self._file: saved.chunk_file.ChunkFile | None = None
        self._watch = Watch(SavedDirectory(source.path), source.save, source.stream)
        self._closing = threading.Event()

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._closing.is_set():
            raise FailedPreconditionError("this reader is closed; open another one")
        while not self._is_at_end:
            try:
                file = self._file = self._file or self._next_file()
                if file is None:
                    self._is_at_end = True
                    break
                chunk = file.read(self._row, limit) if self._row < file.size else None
            except DataLossError:
                self._pass_file()
                raise
            except (AbortedError, FailedPreconditionError, NotFoundError, DeadlineExceededError):
                self._is_at_end = True
                raise
            if chunk is None:
                self._pass_file()
                continue
            self._row += chunk.size
            if self._row == file.size:
                self._pass_file()
            return chunk
        return None

    def _next_file(self) -> saved.chunk_file.ChunkFile | None:
        """Wait for the file that comes next and open it; None: there are no more."""
        watch = self._watch
        patience = Patience(watch.directory, self._closing, self._source.wait_timeout)
        while self._number >= len(watch.chunks()):
            if watch.is_finished:
                return None
            patience.wait(
                f"more of the saved dataset {self._source.path!r}, which is not finished "
                f"({len(watch.chunks())} chunk files so far)"
            )
            watch.look()
        chunk = watch.chunks()[self._number]
        return saved.chunk_file.ChunkFile(watch.directory.folder, chunk, self._source.save)

    def _pass_file(self) -> None:
        self._file, self._number, self._row = None, self._number + 1, 0

    def get_position(self) -> Position:
        return [self._number, self._row]

    def close(self) -> None:
        self._closing.set()
        self._file = None


class Watch:
    """What is known of a directory that is being filled. A look takes a few reads of its store.

    Args:
        directory: The directory.
        save: Id of the save that is expected there.
        stream: The only stream whose files count; None: all do.

    Attributes:
        is_finished: Whether there will be no more files.
    """

    def __init__(self, directory: SavedDirectory, save: str, stream: int | None = None) -> None:
        self.directory = directory
        self._save = save
        self._stream = stream
        self._chunks: Sequence[ChunkRecord] = ()
        self.is_finished = False
        self._has_looked = False

    def chunks(self) -> Sequence[ChunkRecord]:
        """Return the files that are known, in order."""
        if not self._has_looked:
            self.look()
        return self._chunks

    def look(self) -> None:
        """Find out what is there now.

        Raises:
            FailedPreconditionError: The save failed.
            AbortedError: Another save was begun.
            NotFoundError: It was removed.
        """
        self._has_looked = True
        standing = self.directory.look()
        url = self.directory.url
        if standing.begun is None:
            raise NotFoundError(f"the saved dataset {url!r} was removed while it was read")
        if standing.begun.save != self._save:
            raise AbortedError(
                f"the dataset in {url!r} was saved again while it was read; load it again"
            )
        if standing.error is not None:
            raise failed(url, standing)
        known: Sequence[ChunkRecord] | None = standing.chunks
        self.is_finished = known is not None
        if known is None:
            known = self.directory.published(self._save)
        self._chunks = [chunk for chunk in known if self._stream in (None, chunk.stream)]


class Patience:
    """Waits between looks at a directory, ever longer; says what for once it has lasted long.

    Args:
        directory: The directory.
        closing: Ends the wait when it is set.
        timeout: Seconds without anything new after which it ends.
    """

    def __init__(self, directory: SavedDirectory, closing: threading.Event, timeout: float) -> None:
        self._timeout = timeout
        self._until = math.inf
        self._longest = _LONGEST[directory.folder.is_local]
        self._closing = closing
        self._delay = _FIRST_LOOK
        self._wait: LongWait | None = None
        self._awaited = ""

    def wait(self, awaited: str) -> None:
        """Wait a moment.

        Raises:
            CancelledError: It was closed meanwhile.
            DeadlineExceededError: Nothing new has come for too long.
        """
        now = time.monotonic()
        if self._wait is None or awaited != self._awaited:
            self._wait, self._awaited, self._delay = LongWait(awaited), awaited, _FIRST_LOOK
            self._until = now + self._timeout
        if now >= self._until:
            raise DeadlineExceededError(
                f"waited {self._timeout:g} s in vain for {awaited}: has whoever saves it died? "
                "Save it again, or load it with a longer `wait_timeout`"
            )
        if self._closing.wait(min(self._delay, self._until - now)):
            raise CancelledError(f"closed while waiting for {awaited}")
        self._wait.look()
        self._delay = min(self._delay * 1.5, self._longest)


def failed(url: str, standing: Standing) -> FailedPreconditionError:
    """Return the error of a save that failed."""
    return FailedPreconditionError(
        f"the dataset in {url!r} is not whole: mend what its save failed with, and save it again. "
        f"It failed with {standing.error}"
    )


def _checked(position: Any) -> tuple[int, int]:
    if position is None:
        return 0, 0
    if (
        not isinstance(position, list | tuple)
        or len(position) != 2
        or not all(type(value) is int and value >= 0 for value in position)
    ):
        raise ValueError(f"position must be [file, elements], got {position!r}")
    number, row = position
    return number, row
