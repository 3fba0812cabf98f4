"""Sources of datasets that are read while they are being saved.

Rule 1. Chunk files are read in the order of the finished dataset, and each one is waited for. So a
        position is the same before and after the dataset is finished.
Rule 2. A directory that is finished by now is read by the same kind of source, so that the validity
        of a saved state does not depend on when it is restored.
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
from headrace.execution.threads import WaitWarning
from headrace.plan.source import Position, Reader, Source, check_limit, check_range
from headrace.saved.directory import DirectoryStatus, SavedDirectory
from headrace.saved.format import ChunkRecord

__all__ = [
    "WAIT_SECONDS",
    "DirectoryPoller",
    "DirectoryWatcher",
    "UnfinishedSource",
    "save_failed_error",
]

WAIT_SECONDS = 3600.0
"""Seconds to wait for new data."""

_FIRST_POLL_SECONDS = 0.02
_MAX_POLL_SECONDS = {True: 0.5, False: 5.0}
"""Largest number of seconds between polls of a directory: on a local disk (True), and elsewhere."""


@dataclass(frozen=True, eq=False)
class UnfinishedSource(Source):
    """A source of one index: a dataset that may still be written, read to its end.

    Args:
        path: The directory.
        save_id: ID of the save.
        stream: The only stream to read; None reads all streams.
        spec: Spec of the elements; None if it is unknown.
        wait_timeout: Seconds to wait for new data.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("path", "spec", "wait_timeout")

    path: str
    save_id: str
    stream: int | None
    spec: Spec | None
    wait_timeout: float = WAIT_SECONDS

    @property
    def size(self) -> int:
        """Always 1, since the number of chunk files is not known yet."""
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

    Its position is `[file, elements]`: the number of files read, and of elements in the next one.
    """

    def __init__(self, source: UnfinishedSource, indices: int, position: Position) -> None:
        self._number, self._row = _check_position(position)
        self._source = source
        self._is_at_end = not indices
        self._file: saved.chunk_file.ChunkFile | None = None
        self._watcher = DirectoryWatcher(SavedDirectory(source.path), source.save_id, source.stream)
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
                self._finish_file()
                raise
            except (AbortedError, FailedPreconditionError, NotFoundError, DeadlineExceededError):
                self._is_at_end = True
                raise
            if chunk is None:
                self._finish_file()
                continue
            self._row += chunk.size
            if self._row == file.size:
                self._finish_file()
            return chunk
        return None

    def _next_file(self) -> saved.chunk_file.ChunkFile | None:
        """Wait for the next file and open it; return None after the last file."""
        watch = self._watcher
        poller = DirectoryPoller(watch.directory, self._closing, self._source.wait_timeout)
        while self._number >= len(watch.chunks()):
            if watch.is_finished:
                return None
            poller.wait(
                f"more of the saved dataset {self._source.path!r}, which is not finished "
                f"({len(watch.chunks())} chunk files so far)"
            )
            watch.refresh()
        chunk = watch.chunks()[self._number]
        return saved.chunk_file.ChunkFile(watch.directory.folder, chunk, self._source.save_id)

    def _finish_file(self) -> None:
        self._file, self._number, self._row = None, self._number + 1, 0

    def get_position(self) -> Position:
        return [self._number, self._row]

    def close(self) -> None:
        self._closing.set()
        self._file = None


class DirectoryWatcher:
    """Known contents of a directory that is being written; a refresh costs a few reads.

    Args:
        directory: The directory.
        save_id: ID of the save that is expected there.
        stream: The only stream whose files count; None counts all.

    Attributes:
        is_finished: Whether all files are known.
    """

    def __init__(self, directory: SavedDirectory, save_id: str, stream: int | None = None) -> None:
        self.directory = directory
        self._save_id = save_id
        self._stream = stream
        self._chunks: Sequence[ChunkRecord] = ()
        self.is_finished: bool = False
        self._is_refreshed = False

    def chunks(self) -> Sequence[ChunkRecord]:
        """Return the known files, in order."""
        if not self._is_refreshed:
            self.refresh()
        return self._chunks

    def refresh(self) -> None:
        """Read the current contents of the directory.

        Raises:
            FailedPreconditionError: If the save failed.
            AbortedError: If another save has started.
            NotFoundError: If the directory was removed.
        """
        self._is_refreshed = True
        standing = self.directory.read_status()
        url = self.directory.url
        if standing.header is None:
            raise NotFoundError(f"the saved dataset {url!r} was removed while it was read")
        if standing.header.save_id != self._save_id:
            raise AbortedError(
                f"the dataset in {url!r} was saved again while it was read; load it again"
            )
        if standing.error is not None:
            raise save_failed_error(url, standing)
        known: Sequence[ChunkRecord] | None = standing.chunks
        self.is_finished = known is not None
        if known is None:
            known = self.directory.list_published(self._save_id)
        self._chunks = [chunk for chunk in known if self._stream in (None, chunk.stream)]


class DirectoryPoller:
    """Waits between polls of a directory, with increasing delays, and warns after a long wait.

    Args:
        directory: The directory.
        closing: Event that ends the wait.
        timeout: Seconds to wait for new data.
    """

    def __init__(self, directory: SavedDirectory, closing: threading.Event, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = math.inf
        self._max_delay = _MAX_POLL_SECONDS[directory.folder.is_local]
        self._closing = closing
        self._delay = _FIRST_POLL_SECONDS
        self._wait_warning: WaitWarning | None = None
        self._awaited = ""

    def wait(self, awaited: str) -> None:
        """Wait until the next poll.

        Raises:
            CancelledError: If `closing` was set.
            DeadlineExceededError: If there was no new data within the timeout.
        """
        now = time.monotonic()
        if self._wait_warning is None or awaited != self._awaited:
            self._wait_warning, self._awaited = WaitWarning(awaited), awaited
            self._delay = _FIRST_POLL_SECONDS
            self._deadline = now + self._timeout
        if now >= self._deadline:
            raise DeadlineExceededError(
                f"waited {self._timeout:g} s for {awaited}, and nothing was written; check the "
                "saving process and save again, or load with a longer `wait_timeout`"
            )
        if self._closing.wait(min(self._delay, self._deadline - now)):
            raise CancelledError(f"closed while waiting for {awaited}")
        self._wait_warning.warn_if_due()
        self._delay = min(self._delay * 1.5, self._max_delay)


def save_failed_error(url: str, status: DirectoryStatus) -> FailedPreconditionError:
    """Return the error for a failed save."""
    return FailedPreconditionError(
        f"the dataset in {url!r} is incomplete, because saving it failed. Fix the cause and save "
        f"it again: {status.error}"
    )


def _check_position(position: Any) -> tuple[int, int]:
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
