"""One stream of chunk files, as it is written.

Rule 1. A file is cut when it holds `chunk_bytes`, when `cut` is called, and when an element does
        not fit its form.
Rule 2. Files that are whole wait in `take_whole` for whoever publishes them: whoever writes one of
        several streams first says elsewhere which elements they hold.
Rule 3. A writer belongs to one thread at a time. Chunks that were appended are not changed by
        anybody until they are written.

A full disk is waited for as long as somebody may make room, and named. The write goes on where it
stopped.
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
from headrace.saved.form import Form, Values, measure
from headrace.saved.format import ChunkRecord

__all__ = ["CHUNK_BYTES", "IMPATIENT", "Patience", "PatientFile", "StreamWriter"]


T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Patience:
    """How long to try again where a disk is full.

    Attributes:
        seconds: For so long; 0: not at all.
        pause: Waits for so many seconds; returns whether to go on.
    """

    seconds: float
    pause: Callable[[float], bool]

    def until_there_is_room(self, act: Callable[[], T], path: str) -> T:
        """Return what `act` returns, which is tried again while the disk is full.

        Raises:
            UnavailableError: It is full all the time; the message says how much is free.
        """
        since: float | None = None
        while True:
            try:
                return act()
            except (OSError, UnavailableError) as error:
                if not _is_full(error):
                    raise
                now = time.monotonic()
                since = now if since is None else since
                if now - since >= self.seconds or not self.pause(_LOOK_SECONDS):
                    raise UnavailableError(_words(path, now - since)) from error


IMPATIENT = Patience(0.0, lambda seconds: False)
"""For whoever is there to see the error."""


class PatientFile:
    """A file that is written, perhaps after a wait for room.

    Args:
        file: Open for writing, without a buffer.
        path: Of the file, for messages.
        patience: How long to wait.
    """

    def __init__(self, file: BinaryIO, path: str, patience: Patience) -> None:
        self._file = file
        self._path = path
        self._patience = patience

    def write(self, data: Any) -> int:
        """Write some of the bytes; return how many."""
        return self._patience.until_there_is_room(lambda: self._file.write(data), self._path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) and error.errno else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _FULL


def _words(path: str, seconds: float) -> str:
    words = f"{path!r} cannot be written: {os.strerror(errno.ENOSPC)}"
    if seconds >= 1:
        words += f", for {seconds:.0f} s"
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        space = shutil.disk_usage(folder)
        words += f" ({space.free:,} of {space.total:,} bytes are free there)"
    return words


CHUNK_BYTES = 64 << 20
"""How large chunk files are: large enough for any store, small enough to be dealt out."""

_BATCH_BYTES = 4 << 20


class StreamWriter:
    """Writes elements into the chunk files of one stream.

    Args:
        directory: Where; a save was begun there.
        save: Id of the save.
        stream: Number of the stream. No other writer may have it.
        spec: Spec of the elements, which are checked; None: whatever the first ones are.
        number: Number of the first chunk file: how many of the stream there are already.
        chunk_bytes: How large chunk files are to be; one element more may make them larger.
        batch_bytes: How large a batch in a file is: what is held in memory, and verified at once.
        patience: How long to wait for room on a full disk.

    Attributes:
        batch_bytes: How large a batch in a file is.
        elements: How many elements were appended.
    """

    def __init__(
        self,
        directory: SavedDirectory,
        save: str,
        stream: int,
        *,
        spec: Spec | None = None,
        number: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        batch_bytes: int = _BATCH_BYTES,
        patience: Patience = IMPATIENT,
    ) -> None:
        self._folder = directory.folder
        self._save = save
        self._stream = stream
        self._patience = patience
        self._spec = spec
        self._number = number
        self._chunk_bytes = chunk_bytes
        self.batch_bytes = min(batch_bytes, chunk_bytes)
        self._form: Form | None = None
        #: That of all streams where there is a spec: keys have one order then.
        self._structure = None if spec is None else flatten(spec)[1]
        self._file: _OpenFile | None = None
        self._held: list[Chunk] = []
        self._held_bytes = 0
        self._whole: list[ChunkRecord] = []
        self.elements = 0
        self._written = 0

    def append(self, chunk: Chunk) -> None:
        """Add elements.

        Raises:
            InvalidElementError: One cannot be saved; the message names the component.
            UnavailableError: They cannot be written.
        """
        size = frame_bytes(chunk)
        most = max(1, self.batch_bytes * chunk.size // size if size else chunk.size)
        for start in range(0, chunk.size, most):
            part = chunk.slice(start, start + most)
            self._held.append(part)
            self._held_bytes += size * part.size // chunk.size
            self.elements += part.size
            # Elements without bytes count for something, too.
            if self._held_bytes + len(self._held) * 64 >= self.batch_bytes:
                self._write_held()

    def cut(self) -> None:
        """Make what was appended a whole file, however small; nothing if there is nothing."""
        self._write_held()
        self._close_file()

    def take_whole(self) -> list[ChunkRecord]:
        """Return the files that are whole since the last call; none of them is published."""
        whole, self._whole = self._whole, []
        return whole

    def close(self) -> None:
        """Leave off, and let go of what is not in a whole file. May be called twice."""
        self._held, self._held_bytes = [], 0
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
            self._folder.remove(file.name)

    def _write_held(self) -> None:
        if not self._held:
            return
        chunk = concatenate(self._held)
        self._held, self._held_bytes = [], 0
        form, values = measure(chunk, self._written, self._structure)
        self._structure = form.structure
        if self._form is not None:
            form = self._form.joined(form, self._written)
        while True:
            self._use(form)
            assert self._file is not None
            try:
                self._file.write(values, chunk.size)
                break
            except LoneSurrogatesError as error:
                form = form.with_surrogates(error.index)
        self._written += chunk.size
        if self._file.bytes >= self._chunk_bytes:
            self._close_file()

    def _use(self, form: Form) -> None:
        """Make the open file one of this form."""
        if self._file is not None and form == self._form:
            return
        if self._spec is not None:
            form.check(self._spec)
        self._close_file()
        self._form = form
        name = ChunkRecord(self._stream, self._number).name(self._save)
        path = self._folder.path(name)
        file = self._patience.until_there_is_room(lambda: self._folder.create(name), path)
        self._file = _OpenFile(PatientFile(file, path, self._patience), name, path, form)

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
            self._stream, self._number, file.elements, file.bytes, file.form.describe()
        )
        self._whole.append(record)
        self._number += 1


class _OpenFile:
    """A chunk file that is being written."""

    def __init__(self, file: PatientFile, name: str, path: str, form: Form) -> None:
        self.name = name
        self._path = path
        self.form = form
        self.elements = 0
        self._file = file
        with self._explained():
            self._arrow = ArrowWriter(file, form)

    @property
    def bytes(self) -> int:
        return self._arrow.bytes

    def write(self, values: list[Values], size: int) -> None:
        with self._explained():
            self._arrow.write(values, size)
        self.elements += size

    def finish(self) -> None:
        with self._explained():
            self._arrow.close()
            self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UnavailableError:
            raise  # it says so itself
        except OSError as error:
            raise UnavailableError(f"{self._path!r} cannot be written: {error}") from error
