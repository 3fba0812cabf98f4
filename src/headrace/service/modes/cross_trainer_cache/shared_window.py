"""Shared window delivery: each element is computed once, and every trainer reads all elements.

A delivery policy (`worker.delivery_policy`): a sliding window over an infinite dataset.

Rule 1. A batch is made when the fastest trainer requests it; if the window is full, the oldest
    batches are evicted. Nothing is made in advance.
Rule 2. Each trainer reads every batch in order. A trainer whose next elements were evicted resumes
    at the oldest in the window; the reply contains the number of skipped elements. A new trainer
    also starts at the oldest.
Rule 3. Clients that name the same trainer share its position: each batch goes to one of them. The
    position of a trainer is kept for the lifetime of the task, even without clients. Batches that
    were sent to a client and not consumed are not sent again.
Rule 4. An error in place of an element goes to one client and is not kept. An element larger than
    the window becomes such an error.
Rule 5. The dataset must be infinite. If it ends, each trainer receives an error after the last
    element. If the task was asked to stop, trainers read the remaining elements.
Rule 6. A client may hold two unacknowledged batches, or more up to `client_bytes`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from headrace.errors import AbortedError, CancelledError, HeadraceError, InvalidArgumentError
from headrace.service.messages import (
    GetElements,
    GetElementsReply,
    SkippedElements,
    TrainerActivity,
)
from headrace.service.ranges import Ranges, first_n
from headrace.service.worker.delivery_policy import (
    BufferedOutput,
    BufferLimits,
    DeliveryPolicy,
    DepartedClientOutput,
    UndeliveredOutput,
)
from headrace.service.worker.result_batch import BatchReply, ResultBatch
from headrace.serving.request_window import UnacknowledgedReplies

__all__ = ["BatchWindow", "SharedWindowDelivery", "WindowPosition", "slice_batch"]


R = TypeVar("R")

_MIN_BATCHES = 8

"""Minimum number of batches with several elements that fit into the window."""


@dataclass
class _Trainer:
    position: WindowPosition
    delivered: int = 0
    skipped: int = 0
    #: Number of skipped elements that no reply has reported.
    unreported_skips: int = 0
    #: Whether the trainer received the error of the end.
    has_end_error: bool = False


class SharedWindowDelivery(DeliveryPolicy[R]):
    """Delivers every batch to each trainer.

    Args:
        limits: Memory limits.
    """

    def __init__(self, limits: BufferLimits | None = None) -> None:
        self._limits = limits or BufferLimits()
        self._window = BatchWindow(self._limits.window_bytes)
        self._delivery: UnacknowledgedReplies[ResultBatch] = UnacknowledgedReplies()
        self._trainers: dict[str, _Trainer] = {}
        #: Trainer of each connected client.
        self._trainer_by_client: dict[str, _Trainer] = {}
        #: Waiting requests, longest wait first, each with its maximum number of elements.
        self._waiting_requests: dict[tuple[str, int], tuple[R, int]] = {}
        #: Errors in place of elements that were not sent yet.
        self._errors: deque[ResultBatch] = deque()
        #: The newest batch that was sent.
        self._newest_delivered: ResultBatch | None = None
        #: Ends of the splits with elements in the batches so far, and of those complete with them.
        self._delivered_end = self._done_to = 0
        self._num_batches = self._num_elements = 0
        self._is_exhausted = self._is_finished = False
        self._done_at_end = 0
        #: Error that each trainer receives after the last element; None for a regular end.
        self._end_error: HeadraceError | None = None
        self._last_error: HeadraceError | None = None
        self._departed_clients: set[str] = set()
        self._refusal: Exception | None = None

    # --- state ------------------------------------------------------------------------------------

    @property
    def max_batch_bytes(self) -> int | None:
        """An eighth of the window, so that evictions are small."""
        return max(1, self._limits.window_bytes // _MIN_BATCHES)

    @property
    def has_room(self) -> bool:
        """Whether a request waits for the next batch (rule 1)."""
        if self._is_exhausted or self._errors or self._refusal is not None:
            return False
        return any(
            self._window.is_at_end(self._trainer_by_client[client_id].position)
            and self._client_has_room(client_id)
            for client_id, _ in self._waiting_requests
        )

    @property
    def completed_splits(self) -> Ranges:
        """Splits that are complete and were sent to some trainer, in assignment order.

        Elements that a trainer missed when its worker died are not computed again, because other
        trainers received them.
        """
        if self.is_fully_acknowledged:
            return first_n(self._done_at_end)
        return first_n(0 if self._newest_delivered is None else self._newest_delivered.done_to)

    @property
    def can_finish(self) -> bool:
        """Whether nothing is left for any connected trainer."""
        return self._is_fully_read() and not self._delivery.num_unacknowledged

    @property
    def is_fully_acknowledged(self) -> bool:
        """Whether everything was delivered and acknowledged."""
        return self.can_finish

    @property
    def produced_elements(self) -> int:
        """Number of elements that were produced."""
        return self._num_elements

    @property
    def window_usage(self) -> tuple[int, int]:
        """Number of elements in the window, and their bytes."""
        return self._window.elements, self._window.bytes

    @property
    def buffered(self) -> BufferedOutput:
        """Contents of the window, and the progress of each trainer."""
        return BufferedOutput(len(self._window), self._window.bytes, tuple(self.trainer_activity()))

    def trainer_activity(self) -> list[TrainerActivity]:
        """Return the progress of each trainer."""
        return [
            TrainerActivity(
                trainer_id=trainer_id,
                delivered=trainer.delivered,
                skipped=trainer.skipped,
                lag=self._num_elements - trainer.position.element,
            )
            for trainer_id, trainer in self._trainers.items()
        ]

    def _is_fully_read(self) -> bool:
        return self._is_exhausted and all(
            self._window.is_at_end(trainer.position) and self._knows_end(trainer)
            for trainer in self._trainer_by_client.values()
        )

    def _knows_end(self, trainer: _Trainer) -> bool:
        return trainer.has_end_error or self._end_error is None

    # --- inputs -----------------------------------------------------------------------------------

    def request_received(
        self, request: R, message: GetElements, now: float
    ) -> list[tuple[R, BatchReply]]:
        """Handle a client's request."""
        client_id, number = message.client_id, message.request_number
        if client_id in self._departed_clients:
            return [(request, _departed_client_error(client_id))]
        if not message.trainer_id:
            return [(request, _missing_trainer_error(message))]
        self._delivery.acknowledge(client_id, message.acknowledged, now)
        earlier_reply = self._delivery.find(client_id, number)
        if earlier_reply is not None:
            return [(request, earlier_reply), *self._take_replies()]
        if self._delivery.is_acknowledged(client_id, number):
            duplicate = AbortedError(f"request {number} was already answered and acknowledged")
            return [(request, duplicate), *self._take_replies()]
        if self._refusal is not None:
            return [(request, self._refusal)]
        self._trainer_by_client[client_id] = self._find_trainer(message.trainer_id)
        repeated = self._waiting_requests.get((client_id, number))
        self._waiting_requests[client_id, number] = request, message.max_elements
        replies = self._take_replies()
        if repeated is not None:
            replies.append((repeated[0], AbortedError(f"request {number} was repeated")))
        return replies

    def _find_trainer(self, trainer_id: str) -> _Trainer:
        found = self._trainers.get(trainer_id)
        if found is None:
            found = self._trainers[trainer_id] = _Trainer(self._window.oldest_position())
        return found

    def add_batch(self, batch: ResultBatch) -> list[tuple[R, BatchReply]]:
        """Add the next batch."""
        assert not self._is_exhausted, "batch added after the end of the task"
        if batch.num_elements and not self._window.fits(batch):
            batch = replace(
                batch, num_elements=0, buffers=(), size=0, error=self._too_large_error(batch)
            )
        self._done_to = batch.done_to
        earlier_delivered_end, self._delivered_end = (
            self._delivered_end,
            max(batch.delivered_end, batch.done_to),
        )
        if self._refusal is not None:
            return []
        batch = replace(
            batch,
            earlier_delivered_end=earlier_delivered_end,
            index=self._num_batches,
            is_shared=True,
        )
        if batch.error is not None:
            self._errors.append(batch)
            self._last_error = _to_headrace_error(batch.error)
        else:
            self._num_batches += 1
            self._num_elements = batch.first_element + batch.num_elements
            self._window.add(batch)
        return self._take_replies()

    def _too_large_error(self, batch: ResultBatch) -> InvalidArgumentError:
        return InvalidArgumentError(
            "The element size is larger than cache size in bytes. Got element size: "
            f"{batch.size} and cache size: {self._limits.window_bytes}. Raise "
            "`cross_trainer_cache_size_bytes` of the worker"
        )

    def note_outcome(self, *, failed: bool, drained: bool) -> None:
        """Record the cause of the end (rule 5)."""
        if failed:
            # Trainers that have not received the error receive it, too.
            self._end_error = self._last_error
            self._errors.clear()
        elif not drained:
            self._end_error = InvalidArgumentError(
                "Cross-trainer caching requires the input dataset to be infinite. However, it "
                f"reached the end of sequence, after {self._num_elements} elements. End the "
                "dataset with `repeat()`, or read it without `cross_trainer_cache`"
            )

    def note_exhausted(self, splits: int = 0) -> list[tuple[R, BatchReply]]:
        """Record that no further batch will come; `splits` splits are complete with the end."""
        self._is_exhausted = True
        self._done_at_end = max(splits, self._done_to)
        return self._take_replies()

    def note_finished(self) -> list[tuple[R, BatchReply]]:
        """Record that the task is finished: clients receive the end."""
        self._is_finished = True
        return self._take_replies()

    def cancel(self, refusal: Exception) -> tuple[list[tuple[R, BatchReply]], UndeliveredOutput]:
        """Reject all further requests, except repeated requests for batches sent before."""
        newest = self._newest_delivered
        delivered_end = 0 if newest is None else max(newest.delivered_end, newest.done_to)
        undelivered = UndeliveredOutput(
            elements=0,
            unacknowledged=sum(batch.num_elements for batch in self._delivery.batches()),
            delivered_splits=first_n(self._done_at_end if self._is_exhausted else delivered_end),
        )
        self._refusal = refusal
        self._window.clear()
        waiting, self._waiting_requests = self._waiting_requests, {}
        return [(request, refusal) for request, _ in waiting.values()], undelivered

    def remove_client(
        self, client_id: str
    ) -> tuple[list[tuple[R, BatchReply]], DepartedClientOutput]:
        """Record that a client departed; none of its elements are reassigned. Idempotent."""
        self._departed_clients.add(client_id)
        self._trainer_by_client.pop(client_id, None)
        waiting = [
            request_key for request_key in self._waiting_requests if request_key[0] == client_id
        ]
        replies: list[tuple[R, BatchReply]] = [
            (self._waiting_requests.pop(request_key)[0], _departed_client_error(client_id))
            for request_key in waiting
        ]
        self._delivery.drop_client(client_id)
        return [*replies, *self._take_replies()], DepartedClientOutput(
            unacknowledged=(), possibly_lost=()
        )

    def forget_client(self, client_id: str) -> list[tuple[R, BatchReply]]:
        """Do nothing: the dispatcher's knowledge of a departed client has no effect here."""
        return []

    def drop_expired(self, now: float) -> tuple[list[tuple[R, BatchReply]], int]:
        """Drop batches held by silent clients; return replies and the number of lost elements.

        If their trainers return, they learn how many elements they missed.
        """
        unacknowledged = {
            client_id: self._delivery.unacknowledged_by(client_id)
            for client_id in self._trainer_by_client
        }
        lost = self._delivery.expire_clients(now, self._limits.client_timeout)
        if not lost:
            return [], 0
        for client_id, batches in unacknowledged.items():
            if batches and not self._delivery.unacknowledged_by(client_id):
                count = sum(batch.num_elements for batch in batches)
                self._trainer_by_client[client_id].unreported_skips += count
                self._trainer_by_client[client_id].skipped += count
        return self._take_replies(), sum(batch.num_elements for batch in lost)

    # --- rules ------------------------------------------------------------------------------------

    def _take_replies(self) -> list[tuple[R, BatchReply]]:
        replies: list[tuple[R, BatchReply]] = []
        for request_key in list(self._waiting_requests):
            reply = self._next_reply(request_key)
            if reply is None:
                continue
            request, _ = self._waiting_requests.pop(request_key)
            if isinstance(reply, ResultBatch):
                self._delivery.record(*request_key, reply, reply.size)
            replies.append((request, reply))
        return replies

    def _next_reply(self, request_key: tuple[str, int]) -> ResultBatch | GetElementsReply | None:
        """Return the reply to a request; None if it must wait."""
        client_id, _ = request_key
        trainer = self._trainer_by_client[client_id]
        skipped = self._window.catch_up(trainer.position)
        trainer.skipped += skipped
        trainer.unreported_skips += skipped
        if not self._window.is_at_end(trainer.position):
            return (
                self._take_batch(request_key, trainer) if self._client_has_room(client_id) else None
            )
        if self._errors and self._client_has_room(client_id):
            return self._errors.popleft()
        return self._end_reply(client_id, trainer) if self._is_exhausted else None

    def _take_batch(self, request_key: tuple[str, int], trainer: _Trainer) -> ResultBatch:
        batch = self._window.take(trainer.position, self._waiting_requests[request_key][1])
        trainer.delivered += batch.num_elements
        if trainer.unreported_skips:
            batch = replace(batch, mode_data=SkippedElements(count=trainer.unreported_skips))
            trainer.unreported_skips = 0
        if (
            self._newest_delivered is None
            or batch.first_element >= self._newest_delivered.first_element
        ):
            self._newest_delivered = batch
        return batch

    def _end_reply(
        self, client_id: str, trainer: _Trainer
    ) -> ResultBatch | GetElementsReply | None:
        """Return the reply to a client that has read everything; None if it must wait."""
        if not self._knows_end(trainer):
            trainer.has_end_error = True
            return ResultBatch(first_element=self._num_elements, error=self._end_error)
        unacknowledged, _ = self._delivery.count_unacknowledged(client_id)
        if not (unacknowledged or self._is_finished):
            return None
        return GetElementsReply(
            first_element=self._num_elements,
            num_elements=0,
            end_of_task=self._is_finished and not unacknowledged,
            done_from=self._done_to,
            done_to=self._done_at_end,
            delivered_end=max(self._delivered_end, self._done_at_end),
            earlier_delivered_end=self._delivered_end,
        )

    def _client_has_room(self, client_id: str) -> bool:
        batches, size = self._delivery.count_unacknowledged(client_id)
        return batches < 2 or size < self._limits.client_bytes


def _to_headrace_error(error: Exception) -> HeadraceError:
    return error if isinstance(error, HeadraceError) else HeadraceError(str(error))


def _missing_trainer_error(message: GetElements) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"client {message.client_id} sent no trainer_id, but the task has a cross-trainer cache: "
        "set `cross_trainer_cache=CrossTrainerCache(trainer_id)`"
    )


def _departed_client_error(client_id: str) -> CancelledError:
    return CancelledError(
        f"client {client_id} closed its iteration, or its lease expired; iterate over the dataset "
        "again"
    )


# --------------------------------------------------------------------------------------------------
# The sliding window of a task that trainers share: the newest batches, up to a number of bytes

# Positions in the window are batch numbers counted from the first batch of the task. A reader's
# position may fall behind the start of the window, and is then moved there.

_MAX_BATCHES = 1 << 18

"""Limits memory use: the metadata of a batch takes about a kilobyte, however small its elements."""


@dataclass
class WindowPosition:
    """Position of a reader."""

    index: int = 0
    """Number of the next batch."""
    row: int = 0
    """Number of elements already taken from that batch."""
    element: int = 0
    """The task's number of the next element."""


class BatchWindow:
    """The newest batches of a task.

    Args:
        max_bytes: Maximum total bytes.
        max_batches: Maximum number of batches.
    """

    def __init__(self, max_bytes: int, max_batches: int = _MAX_BATCHES) -> None:
        self._max_bytes, self._max_batches = max_bytes, max_batches
        self._batches: deque[ResultBatch] = deque()
        #: Total bytes of the batches.
        self.bytes: int = 0
        #: Numbers of the oldest batch in the window and of its first element.
        self._start = 0
        self._start_element = 0
        #: The task's number of the element after the last one.
        self._end_element = 0

    @property
    def elements(self) -> int:
        """Number of elements in the window."""
        return self._end_element - self._start_element

    def __len__(self) -> int:
        return len(self._batches)

    def fits(self, batch: ResultBatch) -> bool:
        """Return whether a batch fits into the window at all."""
        return batch.size <= self._max_bytes

    def add(self, batch: ResultBatch) -> None:
        """Add the next batch, and evict the oldest ones as necessary."""
        assert batch.num_elements, "batch without elements"
        while self._batches and (
            self.bytes + batch.size > self._max_bytes or len(self._batches) >= self._max_batches
        ):
            evicted = self._batches.popleft()
            self.bytes -= evicted.size
            self._start += 1
            self._start_element = evicted.first_element + evicted.num_elements
        if not self._batches:
            self._start_element = batch.first_element
        self._batches.append(batch)
        self.bytes += batch.size
        self._end_element = batch.first_element + batch.num_elements

    def clear(self) -> None:
        """Remove all batches."""
        self._start += len(self._batches)
        self._start_element = self._end_element
        self._batches.clear()
        self.bytes = 0

    # --- readers ----------------------------------------------------------------------------------

    def oldest_position(self) -> WindowPosition:
        """Return the position of a new reader, the oldest element in the window."""
        return WindowPosition(index=self._start, element=self._start_element)

    def is_at_end(self, position: WindowPosition) -> bool:
        """Return whether the next element of a position has not been produced."""
        return position.index >= self._start + len(self._batches)

    def catch_up(self, position: WindowPosition) -> int:
        """Move a position behind the window to its start; return the number of skipped elements."""
        if position.index >= self._start:
            return 0
        skipped = self._start_element - position.element
        position.index, position.row, position.element = self._start, 0, self._start_element
        return skipped

    def take(self, position: WindowPosition, max_elements: int) -> ResultBatch:
        """Return the next elements of a position that is not at the end, and advance it.

        Args:
            position: A position within the window.
            max_elements: Maximum number of elements; 0 for the rest of the batch.
        """
        batch = self._batches[position.index - self._start]
        remaining = batch.num_elements - position.row
        count = min(remaining, max_elements) if max_elements else remaining
        taken = slice_batch(batch, position.row, position.row + count)
        position.element = taken.first_element + taken.num_elements
        if count == remaining:
            position.index, position.row = position.index + 1, 0
        else:
            position.row += count
        return taken


def slice_batch(batch: ResultBatch, start: int, stop: int) -> ResultBatch:
    """Return elements `start` to `stop` - 1 of a batch, which is sliced when it is sent."""
    if (start, stop) == (0, batch.num_elements):
        return batch
    is_last = stop == batch.num_elements
    return ResultBatch(
        first_element=batch.first_element + start,
        num_elements=stop - start,
        buffers=batch.buffers,
        size=max(1, batch.size * (stop - start) // batch.num_elements),
        done_from=batch.done_from,
        done_to=batch.done_to if is_last else batch.done_from,
        delivered_end=batch.delivered_end,
        earlier_delivered_end=batch.earlier_delivered_end,
        index=batch.index,
        row_range=(start, stop),
        is_shared=batch.is_shared,
    )
