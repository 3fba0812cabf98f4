"""Producer of a task whose elements go to files: a thread that reads its iterator and writes.

Rule 1. Files are reported as finished (`ResultBatch.files`) only if they contain no split in part:
        at the end of a split before which all others are complete. So the splits of a lost worker
        can be assigned again and are in the files once. Steps that hold elements of many splits (a
        shuffle of values, a batch after a filter, an interleave) reach such an end when they are
        exhausted.
Rule 2. That happens when the files have their target size, and when the dispatcher lets the task
        wait for splits: other tasks may wait for what this one holds. It also happens after the
        steps were flushed (`GetSplitReply.flush`).
Rule 3. Any error ends the task, and with it the save: a dataset is saved completely or not at all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Protocol

from headrace import saved
from headrace.element.chunk import Chunk
from headrace.element.spec import parse_spec
from headrace.element.wire import frame_bytes
from headrace.errors import CancelledError, UserFunctionError
from headrace.execution.iterator import ElementIterator
from headrace.process_metrics import count_user_function_error
from headrace.saved.directory import SavedDirectory
from headrace.saved.writer import DiskFullRetry
from headrace.service.messages import SaveDestination, SavedFile
from headrace.service.worker.client_errors import format_error
from headrace.service.worker.producer_channel import ResultSink
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.task_iterator import (
    count_yielded_splits,
    max_started_splits,
    state_after,
)
from headrace.service.worker.task_thread import TaskThread

__all__ = ["FileProducer", "FileSink"]

_log = logging.getLogger(__name__)

_MAX_ELEMENTS = 1 << 16
_DISK_FULL_SECONDS = 30.0


class FileSink(ResultSink, Protocol):
    """Sink that receives the finished files."""

    @property
    def is_deferred(self) -> bool:
        """Whether the task waits for splits while other tasks may take them first."""

    def sleep(self, seconds: float) -> bool:
        """Wait for this time or until the producer must end; return whether it should continue."""


class FileProducer(TaskThread[FileSink]):
    """Writes one task's elements on its own thread.

    Args:
        name: Name of the task, for the thread and the log.
        open_plan: Creates the iterator, given a function to call before it waits for splits.
        sink: Sink that receives the finished files.
        destination: Directory and format of the files.
        stream: Number of the stream of files.
        disk_full_seconds: Seconds to retry while the disk is full.
    """

    def __init__(
        self,
        name: str,
        open_plan: Callable[[Callable[[], None]], ElementIterator],
        sink: FileSink,
        *,
        destination: SaveDestination,
        stream: int,
        disk_full_seconds: float = _DISK_FULL_SECONDS,
    ) -> None:
        super().__init__(name, open_plan, sink)
        self._disk_full_seconds = disk_full_seconds
        self._destination = destination
        self._stream = stream
        self._writer: saved.writer.StreamWriter | None = None
        #: The iterator while it is open.
        self._iterator: ElementIterator | None = None
        #: Splits that were assigned before the last pause, or the end.
        self._num_assigned = 0
        #: Number of bytes that are not in a reported file.
        self._uncommitted_bytes = 0
        #: Number of splits that are complete with the reported files.
        self._num_reported = 0
        self._failure: BaseException | None = None

    def flush(self) -> None:
        try:
            with self._put_lock:
                self._commit_assigned()
                self._commit_if_deferred()
        except Exception as error:
            # The reading thread raises it; this thread may belong to the plan.
            self._failure = error

    def _fail(self, error: BaseException) -> str:
        failure = format_error(error)
        if isinstance(error, UserFunctionError):
            count_user_function_error()
        # A cancelled task has not failed.
        level = logging.DEBUG if isinstance(error, CancelledError) else logging.ERROR
        _log.log(level, "%s ended: %s", self._name, failure)
        return failure

    def _produce(self) -> str | None:
        directory, destination = SavedDirectory(self._destination.path), self._destination
        spec = parse_spec(json.loads(destination.spec)) if destination.spec else None
        self._chunk_bytes = destination.chunk_bytes or saved.writer.CHUNK_BYTES
        writer = saved.writer.StreamWriter(
            directory,
            destination.save_id,
            self._stream,
            spec=spec,
            # The file ends between splits, unless one is very large.
            chunk_bytes=2 * self._chunk_bytes,
            disk_full_retry=DiskFullRetry(self._disk_full_seconds, self._sink.sleep),
        )
        try:
            iterator = self._open_iterator()
        except BaseException as error:
            return f"its plan cannot be opened: {format_error(error)}"
        self._writer, self._iterator = writer, iterator
        try:
            return self._write_all(iterator, writer)
        finally:
            try:
                iterator.close()
            finally:
                with self._put_lock:
                    self._writer = self._iterator = None
                    writer.close()

    def _write_all(
        self, iterator: ElementIterator, writer: saved.writer.StreamWriter
    ) -> str | None:
        limit = 1
        while self._sink.wait_for_room():
            chunk = iterator.next_chunk(limit)
            if self._failure is not None:
                raise self._failure
            if chunk is None:
                with self._put_lock:
                    self._commit_assigned()
                return None
            size = self._write(iterator, chunk, writer)
            # As many elements as make a batch, so that they are written without a copy.
            max_elements = writer.batch_bytes * chunk.size // (size + 1) + 1
            limit = min(2 * limit, max_elements, _MAX_ELEMENTS)
        return None

    def _write(
        self, iterator: ElementIterator, chunk: Chunk, writer: saved.writer.StreamWriter
    ) -> int:
        """Write a chunk; return its size in bytes."""
        # Outside the lock: reading a state may wait for a thread that holds another lock.
        state, begun_at_most = state_after(chunk), max_started_splits(iterator)
        size = frame_bytes(chunk)
        with self._put_lock:
            writer.append(chunk)
            self._uncommitted_bytes += size
            self._count_splits(state, begun_at_most)
            if self._uncommitted_bytes >= self._chunk_bytes:
                self._commit_between_splits(writer)
            else:
                self._commit_if_deferred()
        return size

    def _commit_assigned(self) -> None:
        """Report after a pause, or at the end, that all splits are complete."""
        num_yielded = 0 if self._iterator is None else count_yielded_splits(self._iterator)
        if num_yielded > self._num_assigned and self._writer is not None:
            self._num_assigned = self._done_to = self._delivered_end = num_yielded
            self._commit(self._writer)

    def _commit_if_deferred(self) -> None:
        if self._writer is not None and self._sink.is_deferred:
            self._commit_between_splits(self._writer)

    def _commit_between_splits(self, writer: saved.writer.StreamWriter) -> None:
        if self._done_to >= self._delivered_end and (
            self._done_to > self._num_reported or self._uncommitted_bytes
        ):
            self._commit(writer)

    def _commit(self, writer: saved.writer.StreamWriter) -> None:
        """Report that everything written is complete."""
        assert self._done_to >= self._delivered_end, "a split is only partly written"
        writer.finish_file()
        files = tuple(
            SavedFile(record.number, record.elements, record.bytes, record.schema)
            for record in writer.take_finished_files()
        )
        self._uncommitted_bytes = 0
        if not files and self._done_to == self._num_reported:
            return
        previously_reported, self._num_reported = self._num_reported, self._done_to
        self._sink.put(
            ResultBatch(
                first_element=0,  # No client reads it.
                num_elements=sum(file.elements for file in files),
                size=sum(file.bytes for file in files),
                done_from=previously_reported,
                done_to=self._done_to,
                delivered_end=self._done_to,
                files=files,
            )
        )
