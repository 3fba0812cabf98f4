"""The producer of a task whose elements go to files: a thread that reads its iterator and writes.

Rule 1. Files are said to be whole (`Portion.files`) only where no unit is in them in part: at the
        end of a unit before which all others are whole. So what is lost with a worker can be
        dealt again, and is in the files once. Steps that hold elements of many units (a shuffle of
        values, a batch after a filter, an interleave) have such an end when they have run out.
Rule 2. That is done when the files have a good size, and where the dispatcher lets the task wait
        for units: others may wait for what this one holds. So it is where the steps were to give
        all that they hold (`GetSplitReply.flush`).
Rule 3. Any error ends the task, and with it the save: a dataset is saved whole or not at all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Protocol

from headrace import saved
from headrace.counts import count_user_function_error
from headrace.element.chunk import Chunk
from headrace.element.spec import described_spec
from headrace.element.wire import frame_bytes
from headrace.errors import CancelledError, UserFunctionError
from headrace.execution.iterator import ElementIterator
from headrace.saved.directory import SavedDirectory
from headrace.saved.writer import Patience
from headrace.service.messages import SaveDestination, SavedFile
from headrace.service.worker.failure import describe
from headrace.service.worker.feed import Outlet
from headrace.service.worker.opening import state_after, units_begun, units_given
from headrace.service.worker.portion import Portion
from headrace.service.worker.task_thread import TaskThread

__all__ = ["FileProducer", "FileSink"]

_log = logging.getLogger(__name__)

_MAX_ELEMENTS = 1 << 16
_DISK_FULL_SECONDS = 30.0


class FileSink(Outlet, Protocol):
    """Who hears which files are whole."""

    @property
    def is_told_to_wait(self) -> bool:
        """Whether units are waited for, and others are to have them first."""

    def pause(self, seconds: float) -> bool:
        """Wait for so long, or until the producer is to end; return whether it is to go on."""


class FileProducer(TaskThread[FileSink]):
    """Writes one task's elements on a thread of its own.

    Args:
        name: Of the task, for the thread and the log.
        open_plan: Makes the iterator, given what is to be called before units are waited for.
        outlet: Who hears which files are whole.
        destination: Where they are written.
        stream: Number of the stream of files.
        disk_full_seconds: Seconds for which a disk may be full.
    """

    def __init__(
        self,
        name: str,
        open_plan: Callable[[Callable[[], None]], ElementIterator],
        outlet: FileSink,
        *,
        destination: SaveDestination,
        stream: int,
        disk_full_seconds: float = _DISK_FULL_SECONDS,
    ) -> None:
        super().__init__(name, open_plan, outlet)
        self._disk_full_seconds = disk_full_seconds
        self._destination = destination
        self._stream = stream
        self._writer: saved.writer.StreamWriter | None = None
        #: What is read, while it is.
        self._iterator: ElementIterator | None = None
        #: Units that were dealt before the last pause, or the end.
        self._num_assigned = 0
        #: Bytes in no file that was said to be whole.
        self._uncommitted_bytes = 0
        #: Units that are whole with what was said.
        self._num_reported = 0
        self._failure: BaseException | None = None

    def hand_over(self) -> None:
        try:
            with self._hand:
                self._commit_assigned()
                self._commit_if_told_to_wait()
        except Exception as error:
            # The thread that reads raises it: this one may be the plan's own.
            self._failure = error

    def _give_up(self, error: BaseException) -> str:
        failure = describe(error)
        if isinstance(error, UserFunctionError):
            count_user_function_error()
        # A task that was called off has not failed.
        level = logging.DEBUG if isinstance(error, CancelledError) else logging.ERROR
        _log.log(level, "%s ends: %s", self._name, failure)
        return failure

    def _produce(self) -> str | None:
        directory, order = SavedDirectory(self._destination.path), self._destination
        spec = described_spec(json.loads(order.spec)) if order.spec else None
        self._chunk_bytes = order.chunk_bytes or saved.writer.CHUNK_BYTES
        writer = saved.writer.StreamWriter(
            directory,
            order.save_id,
            self._stream,
            spec=spec,
            # Cut at the end of a unit, unless one is very large.
            chunk_bytes=2 * self._chunk_bytes,
            patience=Patience(self._disk_full_seconds, self._outlet.pause),
        )
        try:
            iterator = self._open()
        except BaseException as error:
            return f"its plan cannot be opened: {describe(error)}"
        self._writer, self._iterator = writer, iterator
        try:
            return self._write_all(iterator, writer)
        finally:
            try:
                iterator.close()
            finally:
                with self._hand:
                    self._writer = self._iterator = None
                    writer.close()

    def _write_all(
        self, iterator: ElementIterator, writer: saved.writer.StreamWriter
    ) -> str | None:
        limit = 1
        while self._outlet.wait_for_room():
            chunk = iterator.next_chunk(limit)
            if self._failure is not None:
                raise self._failure
            if chunk is None:
                with self._hand:
                    self._commit_assigned()
                return None
            size = self._write(iterator, chunk, writer)
            # As many as make a batch, so that they are written from where they lie.
            affordable = writer.batch_bytes * chunk.size // (size + 1) + 1
            limit = min(2 * limit, affordable, _MAX_ELEMENTS)
        return None

    def _write(
        self, iterator: ElementIterator, chunk: Chunk, writer: saved.writer.StreamWriter
    ) -> int:
        """Write a chunk; return its bytes."""
        # Asked for without the lock: a state may have to wait for whoever holds another.
        state, begun_at_most = state_after(chunk), units_begun(iterator)
        size = frame_bytes(chunk)
        with self._hand:
            writer.append(chunk)
            self._uncommitted_bytes += size
            self._count(state, begun_at_most)
            if self._uncommitted_bytes >= self._chunk_bytes:
                self._commit_between_splits(writer)
            else:
                self._commit_if_told_to_wait()
        return size

    def _commit_assigned(self) -> None:
        """Say after a pause, and at the end, what is whole: the steps have come to their ends."""
        given = 0 if self._iterator is None else units_given(self._iterator)
        if given > self._num_assigned and self._writer is not None:
            self._num_assigned = self._units = self._touched = given
            self._commit(self._writer)

    def _commit_if_told_to_wait(self) -> None:
        if self._writer is not None and self._outlet.is_told_to_wait:
            self._commit_between_splits(self._writer)

    def _commit_between_splits(self, writer: saved.writer.StreamWriter) -> None:
        if self._units >= self._touched and (
            self._units > self._num_reported or self._uncommitted_bytes
        ):
            self._commit(writer)

    def _commit(self, writer: saved.writer.StreamWriter) -> None:
        """Say that all that was written is whole."""
        assert self._units >= self._touched, "a unit is written in part"
        writer.cut()
        files = tuple(
            SavedFile(record.number, record.elements, record.bytes, record.form)
            for record in writer.take_whole()
        )
        self._uncommitted_bytes = 0
        if not files and self._units == self._num_reported:
            return
        before, self._num_reported = self._num_reported, self._units
        self._outlet.put(
            Portion(
                first=0,  # No client reads it.
                count=sum(file.elements for file in files),
                size=sum(file.bytes for file in files),
                done_from=before,
                done_to=self._units,
                touched=self._units,
                files=files,
            )
        )
