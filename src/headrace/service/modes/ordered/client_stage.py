"""Reader of a plan's client stage, over the elements that workers send (`plan.source.Reader`).

In ordered reading it opens one split after another; arriving elements are sorted by
`reorder_buffer`. In unordered reading it consumes elements as they arrive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.metadata import id_column
from headrace.errors import CancelledError, FailedPreconditionError
from headrace.execution.context import SplitReader, SplitSource
from headrace.execution.iterator import ElementIterator
from headrace.plan.source import Position
from headrace.process_metrics import count_delivered
from headrace.service.client.actions import ReceivedBatch, decode_batch
from headrace.service.client.read_session import ReadSession
from headrace.service.client.reader_runner import ReaderRunner
from headrace.service.client.request_scheduler import MAX_REQUESTS
from headrace.service.messages import LostSplits, OpenIterationReply
from headrace.service.modes.ordered.reorder_buffer import NextElements, ReorderBuffer
from headrace.transport import address as addresses

__all__ = ["NO_SPLITS", "ArrivingSplits", "ClientStageReader", "create_ordered_session"]

_log = logging.getLogger(__name__)

_MAX_BUFFERED_BYTES = 256 << 20
"""Limit for elements that arrived ahead of their turn, over all workers."""


class ClientStageReader:
    """Reads the client stage of a plan.

    Args:
        create_iterator: Creates its iterator when the first element is requested.
        position: Position to start from.
        close_input: Closes the input of the iterator.
        state_fields: Fields to add to each position so that other processes can resume there; None
            if positions are valid in this process only.
        on_end: Called at the end; may raise an error.
        earlier_loss: Error about elements lost in an earlier epoch of the same iterator, raised
            first.
    """

    def __init__(
        self,
        create_iterator: Callable[[], ElementIterator],
        position: Position,
        close_input: Callable[[], None] | None = None,
        state_fields: dict[str, Any] | None = None,
        on_end: Callable[[], None] | None = None,
        earlier_loss: Exception | None = None,
    ) -> None:
        self._earlier_loss = earlier_loss
        self._create_iterator, self._close_input, self._state_fields = (
            create_iterator,
            close_input,
            state_fields,
        )
        self._on_end = on_end
        self._position = position
        self._iterator: ElementIterator | None = None
        self._is_closed = False

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements, or None at the end."""
        if self._is_closed:
            return None
        earlier, self._earlier_loss = self._earlier_loss, None
        if earlier is not None:
            raise earlier
        if self._iterator is None:
            iterator = self._create_iterator()
            if self._position is not None:
                iterator.set_state(self._position)
            self._iterator = iterator
        chunk = self._iterator.next_chunk(limit)
        if chunk is None:
            on_end, self._on_end = self._on_end, None
            if on_end is not None:
                on_end()
            return None
        states = chunk.states
        return chunk.with_metadata(None).with_states(
            lambda index: self._make_position(states(index))
        )

    def get_position(self) -> Position:
        """Return the position before the next element."""
        if self._iterator is not None:
            return self._make_position(self._iterator.get_state())
        return None if self._position is None else self._make_position(self._position)

    def _make_position(self, position: Any) -> Position:
        return (
            position if self._state_fields is None else {"splits": position, **self._state_fields}
        )

    def close(self) -> None:
        """Close the iterator and its input."""
        self._is_closed = True
        if self._close_input is not None:
            # First, because a thread of the steps may be waiting there.
            self._close_input()
        if self._iterator is not None:
            self._iterator.close()


class ArrivingSplits:
    """Opens splits whose elements arrive in any order (`execution.context.SplitSource`).

    Args:
        session: Session of the iteration, which delivers all replies.
        create_runner: Creates the session's runner.
        open_iteration: Opens the iteration with the runner; returns the dispatcher's reply.
        num_splits: Number of splits, or INFINITE.
        lost_split_error: Makes the error to raise after the elements of a split that killed each
            worker; None raises none.
    """

    def __init__(
        self,
        session: ReadSession,
        create_runner: Callable[[ReadSession], ReaderRunner],
        open_iteration: Callable[[ReaderRunner], OpenIterationReply],
        num_splits: int,
        lost_split_error: Callable[[int], Exception] | None = None,
    ) -> None:
        self._lost_split_error = lost_split_error
        self._runner = create_runner(session)
        self._open_iteration = open_iteration
        self._is_joining = False
        self._num_remaining = num_splits
        self._lock = threading.Lock()
        self._reorder_buffer = ReorderBuffer(_MAX_BUFFERED_BYTES)
        #: Errors that belong to no split, to raise next.
        self._errors: list[Exception] = []
        #: Error of a reply that could not be decoded. Nothing is delivered after it, because the
        #: missing elements are unknown.
        self._decode_error: Exception | None = None
        #: Next ordinal of each open split.
        self._read_ordinals: dict[int, int] = {}
        #: Ranges of splits that no worker will deliver.
        self.abandoned_splits: tuple[tuple[int, int], ...] = ()
        #: Tasks that the dispatcher named for the awaited split.
        self._urgent_tasks: frozenset[int] = frozenset()
        #: Number of elements sent by each worker, by address.
        self._elements_by_worker: dict[str, int] = {}

    def open_iteration(self) -> OpenIterationReply:
        """Open the iteration."""
        self._is_joining = True
        reply = self._open_iteration(self._runner)
        self._runner.start(_nothing_consumed)
        return reply

    def open(self, split: int, first_ordinal: int) -> ArrivingSplit:
        """Return a reader of a split, starting at an ordinal.

        Raises:
            FailedPreconditionError: If the elements were read before; they are not sent again.
        """
        with self._lock:
            if (
                self._reorder_buffer.was_read(split)
                or self._read_ordinals.get(split, 0) > first_ordinal
            ):
                raise FailedPreconditionError(_READ_TWICE)
        return ArrivingSplit(self, split, first_ordinal)

    def record_read(self, split: int, ordinal: int | None) -> None:
        """Record that a split was read up to an ordinal, or None for its end."""
        if ordinal is None:
            self._read_ordinals.pop(split, None)
        else:
            self._read_ordinals[split] = ordinal

    def elements_by_worker(self) -> dict[str, int]:
        """Return the number of elements sent by each worker, by address."""
        return dict(self._elements_by_worker)

    @property
    def skipped(self) -> int:
        """Always 0: ordered streams are not shared by trainers."""
        return 0

    @property
    def losses(self) -> tuple[LostSplits, ...]:
        """Lost splits, once the iteration has ended."""
        return self._runner.losses

    @property
    def unreported_losses(self) -> tuple[LostSplits, ...]:
        """Lost splits for which no error was raised in their place."""
        losses = self.losses
        if self._lost_split_error is None:
            return losses
        return tuple(loss for loss in losses if not loss.abandoned)

    def find_loss(self, split: int) -> Exception | None:
        """Return the error to raise at the end of a split, if elements of it are missing."""
        is_lost = any(start <= split < stop for start, stop in self.abandoned_splits)
        return self._lost_split_error(split) if is_lost and self._lost_split_error else None

    def wait_for_next(self, split: int, ordinal: int, limit: int) -> NextElements:
        """Return the next elements of a split, after a wait if necessary.

        Raises:
            HeadraceError: If reading has failed.
            CancelledError: If the reader was closed.
        """
        has_waited = False
        with self._lock:
            while True:
                active_tasks = self._process_batches()
                if self._decode_error is not None:
                    raise self._decode_error.with_traceback(None)
                if self._errors:
                    raise self._errors.pop(0).with_traceback(None)
                elements = self._reorder_buffer.next_elements(split, ordinal, limit)
                awaited_split = split if elements is None else None
                allowed_tasks = self._reorder_buffer.tasks_to_request(
                    awaited_split, active_tasks, self._urgent_tasks
                )
                self._runner.restrict_requests(allowed_tasks, awaited_split)
                if elements is not None:
                    if has_waited:
                        self._runner.end_wait()
                    return elements
                has_waited = True
                if self._runner.wait_for_change():
                    continue
                if self._runner.failure is not None:
                    raise self._runner.failure.with_traceback(None)
                if self._runner.is_closing:
                    raise CancelledError("the iterator was closed")
                self._process_batches()
                # The iteration has ended, so missing elements are lost.
                self._reorder_buffer.abandon([(split, split + 1)])

    def read_whole_splits(
        self, split: int, max_splits: int, limit: int
    ) -> tuple[Chunk, int] | None:
        """Return consecutive complete splits that are buffered (`context.WholeSplitSource`)."""
        with self._lock:
            active_tasks = self._process_batches()
            has_error = self._errors or self._decode_error
            taken = (
                None if has_error else self._reorder_buffer.take_complete(split, max_splits, limit)
            )
            if taken is None:
                return None
            self._runner.restrict_requests(
                self._reorder_buffer.tasks_to_request(None, active_tasks), None
            )
        chunk, num_splits = taken
        count_delivered(chunk.size)
        self.splits_finished(num_splits)
        return taken

    def _process_batches(self) -> set[int]:
        """Process arrived batches; return the tasks that are being read."""
        active_tasks, abandoned, self._urgent_tasks = self._runner.read_status()
        for batch in self._runner.take_all():
            self._add_batch(batch)
        self._reorder_buffer.forget_tasks(self._reorder_buffer.tasks - active_tasks)
        if abandoned != self.abandoned_splits:
            self.abandoned_splits = abandoned
            self._reorder_buffer.abandon(abandoned)
            _log.warning("splits %s of the dataset were abandoned: %s", abandoned, _WORKERS_DIED)
        return active_tasks

    def _add_batch(self, batch: ReceivedBatch) -> None:
        task, reply = batch.task, batch.reply
        content: Chunk | Exception | None = None
        size = 0
        if isinstance(batch.payload, Exception):
            content = decode_batch(batch)
        elif batch.num_elements:
            size = sum(memoryview(buffer).nbytes for buffer in batch.payload)
            content = decode_batch(batch)
            if isinstance(content, Exception):
                self._decode_error = self._decode_error or content
                return
        if isinstance(content, Exception) and (reply is None or reply.element_ids.failed_split < 0):
            self._errors.append(content)
        if batch.num_elements:
            address = task.worker_address
            self._elements_by_worker[address] = (
                self._elements_by_worker.get(address, 0) + batch.num_elements
            )
        if reply is not None:
            self._reorder_buffer.add_reply(task.task_id, reply, content, size)

    def splits_finished(self, num_splits: int) -> None:
        """Record that splits were read to their ends."""
        self._num_remaining -= num_splits
        if self._num_remaining == 0 and not self._runner.is_closing:
            # Wait until the dispatcher has confirmed that nothing is missing.
            while self._runner.wait_for_change():
                self._runner.take_all()
            self._runner.end_wait()

    def close(self) -> None:
        """Close the runner and leave the iteration."""
        self._runner.close(_nothing_consumed, is_known=self._is_joining)


_READ_TWICE = (
    "the dataset reads the same elements a second time, but ordered reading delivers each element "
    "once. Put `cache` after `distribute`, so that this process caches the elements. A state of a "
    "step that holds elements (a window, buckets) can be restored only in a single process"
)
_WORKERS_DIED = "worker processes died while computing them"


def _nothing_consumed() -> None:
    """Report no partial consumption: everything that arrives counts as consumed."""
    return None


class ArrivingSplit:
    """Reads one split (`execution.context.SplitReader`)."""

    def __init__(self, source: ArrivingSplits, split: int, first_ordinal: int) -> None:
        self._source = source
        self._split, self._ordinal = split, first_ordinal
        self._elements: int | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        """Return the next elements with their ids, or None at the end."""
        if self._elements is not None:
            return None
        elements = self._source.wait_for_next(self._split, self._ordinal, limit)
        if elements.error is not None:
            raise elements.error.with_traceback(None)
        if elements.chunk is None:
            self._elements = elements.num_elements
            self._source.record_read(self._split, None)
            self._source.splits_finished(1)
            loss = self._source.find_loss(self._split)
            if loss is not None:
                raise loss
            return None
        size = elements.chunk.size
        count_delivered(size)
        ordinals = np.arange(elements.ordinal, elements.ordinal + size)
        self._ordinal = elements.ordinal + size
        self._source.record_read(self._split, self._ordinal)
        return elements.chunk.with_metadata(id_column(self._split, ordinals))

    @property
    def num_elements(self) -> int:
        """Number of elements of the split, once its end was read."""
        assert self._elements is not None
        return self._elements

    def close(self) -> None:
        """Do nothing: the source holds the elements."""


def create_ordered_session(
    client_id: str,
    dispatcher: str,
    max_outstanding: int | None,
    wait_timeout: float,
    codec: str,
) -> ReadSession:
    """Return the session of a client that reads in order."""
    return ReadSession(
        client_id,
        dispatcher,
        max_outstanding or MAX_REQUESTS,
        time.monotonic(),
        counts_elements=max_outstanding is not None,
        wait_timeout=wait_timeout,
        codec=codec,
        is_remote=lambda address: not addresses.is_local_host(addresses.split(address)[0]),
        assigns_splits=True,
        delivers_empty=True,
    )


class _NoSplits:
    """Split source of unordered reading, which opens no splits."""

    def open(self, split: int, first_ordinal: int) -> SplitReader:
        raise AssertionError(f"split {split} opened in unordered reading")


NO_SPLITS: SplitSource = _NoSplits()
