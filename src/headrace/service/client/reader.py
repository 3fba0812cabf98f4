"""Reader: returns the elements of an iteration to the consumer, in chunks of the requested size.

Elements are consumed, and acknowledged, when the consumer requests the next ones. They are retained
until they cannot be requested again (`replay`). The consumer may be interrupted at any instruction:
`read` may stop anywhere, and `rewind` recovers from there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.execution.delivered_elements import DeliveredElements
from headrace.plan.source import Position
from headrace.process_metrics import count_delivered
from headrace.service.client.actions import ReceivedBatch, decode_batch
from headrace.service.client.data_loss import report_loss
from headrace.service.client.delivery_progress import DeliveryProgress
from headrace.service.client.exhausted_jobs import ExhaustedJobCheck
from headrace.service.client.iteration_opening import (
    GATHER_SECONDS,
    gather_positions,
    open_iteration,
)
from headrace.service.client.read_session import ReadSession
from headrace.service.client.reader_runner import ReaderRunner
from headrace.service.client.replay import ReplayBuffer, ReplayEntry, ReplayRegistry
from headrace.service.client.request_scheduler import MAX_REQUESTS
from headrace.service.client.task_selector import TaskSelector
from headrace.service.config import STATIC_POLICIES, ShardingPolicy
from headrace.service.messages import LostSplits, OpenIteration, TaskAddress
from headrace.service.modes.coordinated_reads.coordinated_session import CoordinatedReadSession
from headrace.service.stub import DispatcherStub
from headrace.transport import address as addresses
from headrace.transport.channel import Channel

__all__ = ["RemoteReader"]

_log = logging.getLogger(__name__)


class RemoteReader:
    """Reads one iteration of the data service (`plan.source.Reader`).

    Args:
        open_request: Request to open the iteration when the first element is requested.
        dispatcher: Address of the dispatcher, for messages.
        open_stub: Opens a connection to the dispatcher, for one call at a time.
        connect_dispatcher: Opens a channel to the dispatcher.
        connect_worker: Opens a channel to the worker of a task.
        max_outstanding_requests: Maximum number of elements that are requested, in flight or not
            consumed; None sends a few requests to each worker without counting elements.
        wait_timeout: Seconds without a worker that could deliver, after which reading fails.
        task_selector: Selects the tasks to read; None selects all.
        replay_registry: Registry of readers that may be reopened after an interrupt.
        trainer_id: Trainer that this client reads for, with a cross-trainer cache.
        cost_fn: Pickled plan of the job's cost function; empty if there is none.
        codec: Codec for compressed replies over slow networks; empty disables compression.
        base: Elements delivered before, if positions are portable; None if they are not.
        job_check: Records whether the job is exhausted; None disables the check.
        on_loss: Receives the error about missing elements at the end; None logs a warning.
        earlier_loss: Error about elements lost in an earlier epoch of the same iterator, raised
            first.
    """

    def __init__(
        self,
        open_request: OpenIteration,
        *,
        dispatcher: str,
        open_stub: Callable[[], DispatcherStub],
        connect_dispatcher: Callable[[], Channel],
        connect_worker: Callable[[TaskAddress], Channel],
        max_outstanding_requests: int | None,
        wait_timeout: float = 3600.0,
        task_selector: TaskSelector | None = None,
        replay_registry: ReplayRegistry | None = None,
        trainer_id: str = "",
        cost_fn: bytes = b"",
        codec: str = "",
        base: DeliveredElements | None = None,
        job_check: ExhaustedJobCheck | None = None,
        on_loss: Callable[[Exception], None] | None = None,
        earlier_loss: Exception | None = None,
    ) -> None:
        self._on_loss, self._earlier_loss = on_loss, earlier_loss
        self._job_check = job_check or ExhaustedJobCheck()
        self._open_request = open_request
        self._cost_fn = cost_fn
        self._dispatcher = dispatcher
        self._open_stub = open_stub
        self._wait_timeout = wait_timeout
        self._task_selector = task_selector or TaskSelector()
        self._pid = os.getpid()
        session = _create_session(
            open_request, dispatcher, max_outstanding_requests, wait_timeout, trainer_id, codec
        )
        self._runner = ReaderRunner(
            session,
            dispatcher=dispatcher,
            connect_dispatcher=connect_dispatcher,
            connect_worker=connect_worker,
            reports_consumption=open_request.job_name is not None and not trainer_id,
            task_selector=self._task_selector,
        )
        self.name, self.epoch = open_request.client_id, open_request.epoch
        #: Whether the dispatcher may know this client, and whether it has sent the tasks.
        self._is_joining = self._is_open = False
        self._is_at_end = False
        self._loss_reported = False
        self._replay_registry = replay_registry
        self._is_replayable = replay_registry is not None and replay_registry.has_iterators
        #: Delivered elements by position; None if positions are valid for this reader only.
        self._progress = None if base is None or not self._is_replayable else DeliveryProgress(base)
        self._has_base = bool(base)
        self._seed = open_request.seed
        self._replay_buffer = ReplayBuffer()
        #: Batches to replay.
        self._replay_entries: list[ReplayEntry] = []
        #: The batch being delivered.
        self._current: ReplayEntry | None = None
        #: Number of elements and errors delivered, and its maximum, which a rewind does not reduce.
        self._received_count = self._counted_to = 0
        #: Position at which the consumer stopped, maybe before the last delivered element; None
        #: while open.
        self._consumed_to: int | None = None
        self._elements_by_worker: dict[str, int] = {}
        if replay_registry is not None:
            replay_registry.add(self)

    # --- reading ----------------------------------------------------------------------------------

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements, or None at the end (`plan.source.Reader`).

        Raises:
            FailedPreconditionError: If only local workers may be read and there are none; or if the
                lease of this client has expired.
            UnavailableError: If the dispatcher did not reply, or no worker could deliver, for
                `wait_timeout`.
        """
        self._check_process()
        earlier_loss, self._earlier_loss = self._earlier_loss, None
        if earlier_loss is not None:
            raise earlier_loss
        if not self._is_open and not self._runner.is_closing:
            self._open_iteration()
        self._runner.start(self._partly_consumed)
        while True:
            entry = self._current
            if entry is not None:
                if self._received_count < entry.stop:
                    if not self._runner.renew_lease():
                        self._report_end()
                    return self._take_chunk(entry, limit)
                self._runner.consume(entry.batch)
                self._current = None
            entry = self._next_entry()
            if entry is None:
                self._report_end()
                self._job_check.iteration_ended()
                self._is_at_end = True
                return None
            self._job_check.element_received()
            self._current = entry

    @property
    def available_elements(self) -> int:
        """Number of buffered elements (`ElementIterator.available_elements`)."""
        entry = self._current
        if entry is not None and self._received_count < entry.stop:
            return entry.stop - self._received_count
        if self._replay_entries:
            return self._replay_entries[0].size
        return self._runner.available_elements

    def _open_iteration(self) -> None:
        """Open the iteration. A repetition after an interrupt uses the same client ID."""
        self._is_joining = True
        reply = open_iteration(
            self._open_request,
            self._open_stub,
            dispatcher=self._dispatcher,
            wait_timeout=self._wait_timeout,
            task_selector=self._task_selector,
            keep_channel=self._runner.channel_handover.put,
            job_check=self._job_check,
            cost_fn=self._cost_fn,
        )
        if (
            self._open_request.start_position_id
            and reply.seed != self._open_request.seed
            and not reply.finished
        ):
            raise FailedPreconditionError(
                f"job {reply.job_name!r} already reads this epoch with another seed than that of "
                "the state; use another job_name"
            )
        self._seed = reply.seed
        self._runner.iteration_opened(reply)
        self._is_open = True

    def _next_entry(self) -> ReplayEntry | None:
        """Return the next batch, either replayed or new."""
        if self._replay_entries:
            return self._replay_entries.pop(0)
        batch = self._runner.wait_for_batch()
        if batch is None:
            return None
        content = decode_batch(batch)
        size = 1 if isinstance(content, Exception) else content.size
        entry = ReplayEntry(batch, content, self._received_count, size, _count_bytes(batch))
        if not self._is_replayable:
            self._replay_buffer.forget(self._received_count)
        if self._progress is not None and batch.reply is not None:
            self._progress.add(batch.task.task_id, batch.reply, self._received_count, size)
        # Retained before it is taken, so that an interrupt loses nothing: `rewind` finds it.
        self._replay_buffer.add(entry)
        self._runner.take(batch)
        return entry

    def _take_chunk(self, entry: ReplayEntry, limit: int) -> Chunk:
        if isinstance(entry.content, Exception):
            self._received_count = entry.stop
            raise entry.content.with_traceback(None)
        start = self._received_count - entry.start
        chunk = entry.content.slice(start, start + limit)
        position = self._received_count
        self._received_count += chunk.size
        num_new = self._received_count - max(self._counted_to, position)
        if num_new > 0:
            self._counted_to = self._received_count
            count_delivered(num_new)
            address = entry.batch.task.worker_address
            self._elements_by_worker[address] = self._elements_by_worker.get(address, 0) + num_new
        if self._progress is None:
            return chunk
        return chunk.with_states(lambda index: self._position(position + index))

    def _partly_consumed(self) -> tuple[ReceivedBatch, int] | None:
        """Return the batch that is partly consumed, and the number of its consumed elements."""
        current = self._current
        if current is None:
            return None
        stop = (
            self._received_count
            if self._consumed_to is None
            else min(self._consumed_to, self._received_count)
        )
        return current.batch, max(0, stop - current.start)

    def _report_end(self) -> None:
        """Report losses at the end, or raise the error that ended the reading."""
        failure = self._runner.failure
        if failure is not None:
            # No more elements can arrive. The reader is closed here, because the consumer may keep
            # the error, whose traceback keeps the iterator alive.
            self.close()
            raise failure.with_traceback(None)
        if not self._loss_reported:
            self._loss_reported = True
            report_loss(self._runner.losses, self._on_loss)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise FailedPreconditionError(
                "an iterator over the data service can be used only in the process that opened it; "
                "create a new iterator in the forked process, or start it with the spawn method"
            )

    # --- positions --------------------------------------------------------------------------------

    def get_position(self) -> Position:
        """Return the position of this reader, for `rewind` in this process."""
        return self._position(self._received_count)

    def _position(self, received: int) -> Position:
        return {
            "epoch": list(self._open_request.epoch),
            "received": received,
            "reader": self.name,
        }

    def portable_position(self, received: int) -> Position:
        """Return a position that other processes can resume; None is the start.

        Raises:
            FailedPreconditionError: If the position is no longer known.
        """
        if self._progress is None:
            raise FailedPreconditionError(
                "the position of this reader is valid only in this process; save the state of the "
                "iterator over the dataset instead"
            )
        if not (received or self._has_base or (self._open_request.job_name and self._is_open)):
            return None
        delivered = self._progress.delivered_before(received)
        if self._open_request.job_name is not None and self._is_open:
            delivered = gather_positions(
                delivered,
                self.name,
                self._open_stub,
                dispatcher=self._dispatcher,
                timeout=min(GATHER_SECONDS, self._wait_timeout),
            )
        return {"positions": delivered.to_json(), "seed": self._seed}

    @property
    def is_full(self) -> bool:
        """Whether the replay buffer is full."""
        return self._is_replayable and self._replay_buffer.is_full

    def forget(self, before: int) -> None:
        """Discard what was delivered before a position."""
        self._replay_buffer.forget(before)
        if self._progress is not None:
            self._progress.forget(before)

    def stop_at(self, position: int) -> None:
        """Record that no element after `position` was consumed."""
        self._consumed_to = position

    def rewind(self, received: int) -> bool:
        """Replay the elements after `received`; return False if closed or discarded."""
        is_usable = self._is_at_end or not self._runner.is_closing
        entries = self._replay_buffer.entries_since(received) if is_usable else None
        last = self._replay_buffer.last
        if entries is None or (last is None and received != self._received_count):
            return False
        if last is not None:
            self._runner.take(last.batch)
        if self._current is not None:
            # The batch is acknowledged, and retained here.
            self._runner.consume(self._current.batch)
            self._current = None
        self._replay_entries, self._received_count = entries, received
        return True

    # --- reports ----------------------------------------------------------------------------------

    def elements_by_worker(self) -> dict[str, int]:
        """Return the number of elements delivered so far by each worker, by address."""
        return dict(self._elements_by_worker)

    @property
    def skipped(self) -> int:
        """Number of elements that left the cache window before this client read them."""
        return self._runner.skipped

    @property
    def losses(self) -> tuple[LostSplits, ...]:
        """Losses with workers; known at the end of the iteration."""
        return self._runner.losses

    # --- closing ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close, unless the registry retains the reader so that it can be reopened."""
        if self._pid != os.getpid():
            return  # it belongs to the parent process, before a fork
        if self._is_at_end and self._is_replayable and self._replay_registry is not None:
            # The steps above may not have reached its end.
            self._replay_registry.add_ended(self)
        elif (
            not self._runner.is_closing
            and self._replay_registry is not None
            and self._replay_registry.retain(self)
        ):
            # It may be reopened at its position. A thread of the steps above that waits here now is
            # not the one that will continue reading.
            self._runner.interrupt_waiters()
            return
        self.close_for_good()

    def close_for_good(self) -> None:
        """Close, even if the reader could be reopened."""
        self._runner.close(self._partly_consumed, is_known=self._is_joining)
        self._current = None
        self._replay_entries = []


def _create_session(
    open_request: OpenIteration,
    dispatcher: str,
    max_elements: int | None,
    wait_timeout: float,
    trainer_id: str,
    codec: str,
) -> ReadSession | CoordinatedReadSession:
    """Return the session of a client, or of one of several consumers."""
    client_id, now = open_request.client_id, time.monotonic()
    max_outstanding = max_elements or MAX_REQUESTS
    if open_request.options.num_consumers is None or open_request.consumer_index is None:
        return ReadSession(
            client_id,
            dispatcher,
            max_outstanding,
            now,
            counts_elements=max_elements is not None,
            wait_timeout=wait_timeout,
            trainer_id=trainer_id,
            codec=codec,
            is_remote=lambda address: not addresses.is_local_host(addresses.split(address)[0]),
            has_shards=open_request.options.processing_mode in STATIC_POLICIES,
            assigns_splits=open_request.options.processing_mode == ShardingPolicy.DYNAMIC,
        )
    return CoordinatedReadSession(
        client_id,
        dispatcher,
        max_outstanding,
        now,
        consumer=open_request.consumer_index,
        num_consumers=open_request.options.num_consumers,
        wait_timeout=wait_timeout,
    )


def _count_bytes(batch: ReceivedBatch) -> int:
    if isinstance(batch.payload, Exception):
        return 0
    return sum([memoryview(buffer).nbytes for buffer in batch.payload])
