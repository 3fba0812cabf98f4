"""Writer of one stream of chunk files.

Rule 1. A file ends when it has `chunk_bytes`, when `finish_file` is called, and before an element
        that does not fit its schema.
Rule 2. Complete files are returned by `take_finished_files` for publication by the caller. A writer
        of one of several streams first reports which elements they contain.
Rule 3. A writer is used by one thread at a time. Appended chunks must not be modified until they
are
        written.

On a full disk the writer warns, and waits as long as `DiskFullRetry` allows. The write then
continues where it stopped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from headrace.element.chunk import Chunk, concatenate
from headrace.element.spec import Spec
from headrace.element.structure import flatten
from headrace.element.wire import frame_bytes
from headrace.errors import UnavailableError
from headrace.saved.arrow import ArrowWriter, LoneSurrogatesError
from headrace.saved.directory import SavedDirectory
from headrace.saved.format import ChunkRecord
from headrace.saved.schema import FileSchema, Values, infer_schema

__all__ = ["CHUNK_BYTES", "NO_RETRY", "DiskFullRetry", "RetryingFile", "StreamWriter"]


T = TypeVar("T")

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_RETRY_SECONDS = 0.25


@dataclass(frozen=True)
class DiskFullRetry:
    """Retry policy for writes to a full disk.

    Attributes:
        timeout: Seconds to retry; 0 disables retries.
        pause: Function that sleeps for a number of seconds, and returns whether to continue.
    """

    timeout: float
    pause: Callable[[float], bool]

    def run(self, operation: Callable[[], T], path: str) -> T:
        """Return the result of `operation`, which is retried while the disk is full.

        Raises:
            UnavailableError: If the disk stays full; the message has the free space.
        """
        since: float | None = None
        while True:
            try:
                return operation()
            except (OSError, UnavailableError) as error:
                if not _is_disk_full(error):
                    raise
                now = time.monotonic()
                since = now if since is None else since
                if now - since >= self.timeout or not self.pause(_RETRY_SECONDS):
                    raise UnavailableError(_disk_full_message(path, now - since)) from error


NO_RETRY = DiskFullRetry(0.0, lambda seconds: False)
"""Raises the error at once, for callers that report it to the user."""


class RetryingFile:
    """An open file whose writes wait for space on a full disk.

    Args:
        file: Unbuffered file, open for writing.
        path: Path of the file, for messages.
        retry: Retry policy.
    """

    def __init__(self, file: BinaryIO, path: str, retry: DiskFullRetry) -> None:
        self._file = file
        self._path = path
        self._retry = retry

    def write(self, data: Any) -> int:
        """Write some of the bytes; return their number."""
        return self._retry.run(lambda: self._file.write(data), self._path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_disk_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) and error.errno else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _DISK_FULL_ERRNOS


def _disk_full_message(path: str, seconds: float) -> str:
    message = f"cannot write {path!r}: {os.strerror(errno.ENOSPC)}"
    if seconds >= 1:
        message += f", for {seconds:.0f} s"
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        space = shutil.disk_usage(folder)
        message += f" ({space.free:,} of {space.total:,} bytes are free there)"
    return message


CHUNK_BYTES = 64 << 20
"""Default size of chunk files: large enough for any store, small enough to be used as splits."""

_BATCH_BYTES = 4 << 20


class StreamWriter:
    """Writes elements to the chunk files of one stream.

    Args:
        directory: Directory in which the save was started.
        save_id: ID of the save.
        stream: Number of the stream, which no other writer may use.
        spec: Spec to check the elements against; None accepts the first elements' structure.
        number: Number of the first chunk file: how many files the stream already has.
        chunk_bytes: Approximate size of chunk files; the last element may exceed it.
        batch_bytes: Size of a batch in a file, which is buffered in memory and has a checksum.
        disk_full_retry: Retry policy for a full disk.

    Attributes:
        batch_bytes: Size of a batch in a file.
        elements: Number of elements appended.
    """

    def __init__(
        self,
        directory: SavedDirectory,
        save_id: str,
        stream: int,
        *,
        spec: Spec | None = None,
        number: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        batch_bytes: int = _BATCH_BYTES,
        disk_full_retry: DiskFullRetry = NO_RETRY,
    ) -> None:
        self._folder = directory.folder
        self._save_id = save_id
        self._stream = stream
        self._disk_full_retry = disk_full_retry
        self._spec = spec
        self._number = number
        self._chunk_bytes = chunk_bytes
        self.batch_bytes: int = min(batch_bytes, chunk_bytes)
        self._schema: FileSchema | None = None
        #: With a spec, the structure of all streams, so that keys have the same order.
        self._structure = None if spec is None else flatten(spec)[1]
        self._file: _OpenFile | None = None
        self._buffered: list[Chunk] = []
        self._buffered_bytes = 0
        self._finished_files: list[ChunkRecord] = []
        self.elements: int = 0
        self._written = 0

    def append(self, chunk: Chunk) -> None:
        """Append elements.

        Raises:
            InvalidElementError: If an element cannot be saved; the message names the component.
            UnavailableError: If the elements cannot be written.
        """
        size = frame_bytes(chunk)
        most = max(1, self.batch_bytes * chunk.size // size if size else chunk.size)
        for start in range(0, chunk.size, most):
            part = chunk.slice(start, start + most)
            self._buffered.append(part)
            self._buffered_bytes += size * part.size // chunk.size
            self.elements += part.size
            # Add a constant, because elements may have no bytes.
            if self._buffered_bytes + len(self._buffered) * 64 >= self.batch_bytes:
                self._write_buffered()

    def finish_file(self) -> None:
        """Complete the current file, however small; do nothing if there are no elements."""
        self._write_buffered()
        self._close_file()

    def take_finished_files(self) -> list[ChunkRecord]:
        """Return the files completed since the last call. They are not published yet."""
        whole, self._finished_files = self._finished_files, []
        return whole

    def close(self) -> None:
        """Stop writing, and discard elements that are not in a complete file. Idempotent."""
        self._buffered, self._buffered_bytes = [], 0
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
            self._folder.remove(file.name)

    def _write_buffered(self) -> None:
        if not self._buffered:
            return
        chunk = concatenate(self._buffered)
        self._buffered, self._buffered_bytes = [], 0
        form, values = infer_schema(chunk, self._written, self._structure)
        self._structure = form.structure
        if self._schema is not None:
            form = self._schema.merge(form, self._written)
        while True:
            self._open_file(form)
            assert self._file is not None
            try:
                self._file.write(values, chunk.size)
                break
            except LoneSurrogatesError as error:
                form = form.allow_surrogates(error.index)
        self._written += chunk.size
        if self._file.bytes >= self._chunk_bytes:
            self._close_file()

    def _open_file(self, schema: FileSchema) -> None:
        """Ensure that the open file has this schema."""
        if self._file is not None and schema == self._schema:
            return
        if self._spec is not None:
            schema.check(self._spec)
        self._close_file()
        self._schema = schema
        name = ChunkRecord(self._stream, self._number).name(self._save_id)
        path = self._folder.path(name)
        file = self._disk_full_retry.run(lambda: self._folder.create(name), path)
        self._file = _OpenFile(RetryingFile(file, path, self._disk_full_retry), name, path, schema)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if not file.elements:
            file.abandon()
            self._folder.remove(file.name)
            return
        file.finish()
        record = ChunkRecord(
            self._stream, self._number, file.elements, file.bytes, file.schema.describe()
        )
        self._finished_files.append(record)
        self._number += 1


class _OpenFile:
    """A chunk file that is being written."""

    def __init__(self, file: RetryingFile, name: str, path: str, schema: FileSchema) -> None:
        self.name = name
        self._path = path
        self.schema = schema
        self.elements = 0
        self._file = file
        with self._convert_errors():
            self._arrow = ArrowWriter(file, schema)

    @property
    def bytes(self) -> int:
        return self._arrow.bytes_written

    def write(self, values: list[Values], size: int) -> None:
        with self._convert_errors():
            self._arrow.write(values, size)
        self.elements += size

    def finish(self) -> None:
        with self._convert_errors():
            self._arrow.close()
            self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except UnavailableError:
            raise  # already has a message
        except OSError as error:
            raise UnavailableError(f"cannot write {self._path!r}: {error}") from error
