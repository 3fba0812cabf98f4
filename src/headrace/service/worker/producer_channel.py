"""Channel between a producer and the core: waits for room and splits, passes on batches.

Lock order: `_request_lock` (held by the thread that waits for splits), the producer's lock (for its
buffered elements), the core's lock, `_changed`. The owner of the core calls the channel under the
core's lock, so the holder of that lock takes neither of the first two, and a producer never holds
`_changed` while it calls the owner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from headrace.errors import CancelledError
from headrace.service.element_sets import ElementIdRun
from headrace.service.messages import WAITING_FOR_CLIENTS, WAITING_FOR_SPLITS
from headrace.service.worker.assignment_order import AssignmentOrder
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.task_metrics import TaskMetrics

__all__ = ["ProducerChannel", "ProducerListener", "ResultSink"]


class ProducerListener(Protocol):
    """Receiver of a producer's output."""

    def batch_produced(self, producer: int, batch: ResultBatch) -> None:
        """Handle a batch."""

    def splits_needed(self, producer: int) -> None:
        """Handle a producer's wait for splits."""

    def producer_ended(self, producer: int, failure: str | None) -> None:
        """Handle the end of a producer."""


class ProducerChannel:
    """Channel of one producer (`ResultSink`).

    Args:
        producer: Number of the producer.
        listener: Receiver of the producer's output.
        metrics: Counters of the producer's work.
    """

    def __init__(
        self, producer: int, listener: ProducerListener, metrics: TaskMetrics | None = None
    ) -> None:
        self._producer = producer
        self._listener = listener
        self._metrics = metrics or TaskMetrics(0)
        self._changed = threading.Condition()
        #: Serializes split requests; a plan may read ahead on several threads.
        self._request_lock = threading.Lock()
        self._has_room = True
        self._max_elements: int | None = None
        self._pending_grant: SplitGrant | None = None
        #: Assignments that ids may refer to, and the number of splits done at the last grant.
        self._assignment_order, self._num_done = AssignmentOrder(), 0
        self._is_exhausted = False
        self._is_stopped = False
        self._is_closed = False
        self._delivers_at_once = False
        self._is_waiting_for_splits = False
        self._is_deferred = False

    # --- owner ------------------------------------------------------------------------------------

    def resume(self, max_elements: int | None = None) -> None:
        """Let the producer make one more batch, of at most `max_elements` elements."""
        with self._changed:
            self._has_room, self._max_elements = True, max_elements
            self._changed.notify_all()

    def grant(self, grant: SplitGrant) -> None:
        """Pass splits to the producer, the end of splits, or a pause."""
        with self._changed:
            self._pending_grant = grant
            if grant.splits is not None:
                # Ends of splits may be reported late, but no later than one grant after they are
                # done.
                self._assignment_order.forget(self._num_done)
                self._assignment_order.assign(*grant.splits, grant.ordinals)
                self._num_done = grant.num_done
            self._changed.notify_all()

    def defer(self) -> None:
        """Tell the producer to wait for splits, because other tasks have priority."""
        with self._changed:
            self._is_deferred = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop the producer from making more batches."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the producer at its next check, because its output is no longer needed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # --- producer ---------------------------------------------------------------------------------

    def wait_for_room(self) -> bool:
        """Wait until another batch may be made; return False if none is needed."""
        with self._changed:
            if not (self._has_room or self._is_stopped or self._is_closed):
                with self._metrics.track_wait(WAITING_FOR_CLIENTS):
                    while not (self._has_room or self._is_stopped or self._is_closed):
                        self._changed.wait()
            return not (self._is_stopped or self._is_closed)

    def sleep(self, seconds: float) -> bool:
        """Wait `seconds`, or until the channel is closed; return whether to continue."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._is_closed, seconds)

    @property
    def max_elements(self) -> int | None:
        """Maximum number of elements of the next batch; None for the default."""
        return self._max_elements

    @property
    def delivers_at_once(self) -> bool:
        """Whether elements must not be held back.

        This is so if workers died with these splits, or if a thread waits for splits.
        """
        return self._delivers_at_once or self._is_waiting_for_splits

    @property
    def is_deferred(self) -> bool:
        """Whether the producer waits for splits while other tasks have priority."""
        return self._is_deferred

    def next_splits(self, flush: Callable[[], None]) -> SplitGrant | None:
        """Return the next splits, after a wait if necessary; None after the last ones.

        Args:
            flush: Delivers the producer's buffered elements. It is called before a wait for splits,
                on the thread that waits, so that finished elements do not wait as well.

        Raises:
            CancelledError: If the task was cancelled.
        """
        with self._request_lock:
            if self._is_exhausted:
                return None
            if not self._is_closed:
                self._listener.splits_needed(self._producer)
            self._is_waiting_for_splits = self._metrics.is_requesting_splits = True
            try:
                flush()
                if self._wait_for_grant_or_deferral():
                    flush()
                return self._wait_for_splits()
            finally:
                self._is_waiting_for_splits = self._is_deferred = False
                self._metrics.is_requesting_splits = False

    def _wait_for_grant_or_deferral(self) -> bool:
        """Wait until splits are granted or deferred; return whether they are deferred."""
        with self._changed:
            while self._pending_grant is None and not (self._is_closed or self._is_deferred):
                self._changed.wait()
            return self._is_deferred

    def _wait_for_splits(self) -> SplitGrant | None:
        with self._changed:
            if self._pending_grant is None and not self._is_closed:
                with self._metrics.track_wait(WAITING_FOR_SPLITS):
                    while self._pending_grant is None and not self._is_closed:
                        self._changed.wait()
            if self._pending_grant is None:
                raise CancelledError("the task was cancelled")
            grant, self._pending_grant = self._pending_grant, None
            self._metrics.add_assignment(grant.splits)
            self._delivers_at_once = grant.deliver_at_once
            self._is_exhausted = grant.splits is None and not grant.is_pause
            return None if self._is_exhausted else grant

    def element_ids(
        self, runs: Iterable[ElementIdRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[ElementIdRun, ...]:
        """Return element ids in assignment order (`AssignmentOrder.element_ids`)."""
        with self._changed:
            return self._assignment_order.element_ids(runs, ended)

    def put(self, batch: ResultBatch) -> None:
        """Pass on a batch."""
        with self._changed:
            self._has_room = False
        self._metrics.add_batch(batch.num_elements, batch.size)
        self._listener.batch_produced(self._producer, batch)

    def end(self, failure: str | None) -> None:
        """Report that no batch will follow, and the reason if the task failed."""
        self._listener.producer_ended(self._producer, failure)


# --- interface of the receiver of a producer's batches --------------------------------------------


class ResultSink(Protocol):
    """Receiver of a producer's batches."""

    @property
    def delivers_at_once(self) -> bool:
        """Whether to deliver each yielded element before requesting more."""

    @property
    def max_elements(self) -> int | None:
        """Maximum number of elements of the next batch; None for the default."""

    def wait_for_room(self) -> bool:
        """Wait until another batch may be made; return False if none is needed."""

    def element_ids(
        self, runs: Iterable[ElementIdRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[ElementIdRun, ...]:
        """Return element ids in assignment order, given ids by split of the stream."""

    def put(self, batch: ResultBatch) -> None:
        """Handle a batch."""

    def end(self, failure: str | None) -> None:
        """Record that no batch will follow, and the reason if the task failed."""
