"""FIFO delivery: requests receive result batches in the order of their arrival.

A delivery policy (`delivery_policy`).

Rule 1. Batches are sent in order, each to the request that has waited longest, of a client with
    room: a client that holds `client_bytes` unacknowledged waits until it acknowledges some, and
    all clients wait while `total_bytes` are unacknowledged. Two batches are always allowed per
    client (one while `total_bytes` are exceeded), so that no client waits forever.
Rule 2. Batches without a request are bounded as well (`has_room`).
Rule 3. The task may finish when nothing is left and its only client has acknowledged everything it
    received; a second client does not wait for the first.
Rule 4. A client receives the end when the task is finished and this client has acknowledged
    everything. Until then it must ask again after it has consumed what it holds.
Rule 5. If a client counts elements, batches have at most the number of elements that it requested,
    and are produced only for waiting requests, so that no element is produced in advance.
Rule 6. A departed client receives nothing more. Its unacknowledged batches are kept until the
    dispatcher knows of it, so that their splits do not count as done before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from msgspec.structs import replace

from headrace.errors import AbortedError, CancelledError, DeadlineExceededError
from headrace.service.element_sets import ElementSet
from headrace.service.messages import ElementIds, GetElements, GetElementsReply
from headrace.service.ranges import (
    Ranges,
    first_n,
    intersect,
    subtract,
    union,
)
from headrace.service.worker.delivery_policy import (
    BufferedOutput,
    BufferLimits,
    DeliveryPolicy,
    DepartedClientOutput,
    UndeliveredOutput,
)
from headrace.service.worker.result_batch import BatchReply, ResultBatch
from headrace.serving.request_window import UnacknowledgedReplies

__all__ = ["FifoDelivery"]

R = TypeVar("R")


class FifoDelivery(DeliveryPolicy[R]):
    """Sends the next batch to each request.

    Args:
        limits: Memory limits.
        tracks_elements: Whether batches carry element ids.
        reports_assignments: Whether batches carry the assignments of the task.
    """

    def __init__(
        self,
        limits: BufferLimits | None = None,
        *,
        tracks_elements: bool = False,
        reports_assignments: bool = False,
    ) -> None:
        #: Assigned splits that are not done, as in `messages.ElementIds.assigned`; None disables
        #: reporting.
        self._assignments: list[tuple[int, int, int, int]] | None = (
            [] if reports_assignments else None
        )
        self._num_splits = 0
        #: Elements of unfinished splits that each client acknowledged; None disables tracking.
        self._acknowledged_by_client: dict[str, ElementSet] | None = {} if tracks_elements else None
        self._num_done = 0
        self._limits = limits or BufferLimits()
        self._unacknowledged_replies: UnacknowledgedReplies[ResultBatch] = UnacknowledgedReplies()
        self._ready_batches: deque[ResultBatch] = deque()
        #: Total bytes of the ready batches.
        self._ready_bytes = 0
        #: Requests that wait for a batch, longest wait first.
        self._waiting_requests: dict[tuple[str, int], R] = {}
        #: Maximum number of elements for each waiting request; 0 means no limit.
        self._requested_elements: dict[tuple[str, int], int] = {}
        #: Whether some client counts elements.
        self._counts_elements = False
        #: The batch that was sent last.
        self._last_delivered: ResultBatch | None = None
        #: End of the splits with elements in the batches made so far.
        self._delivered_end = 0
        #: Number of batches made so far, and of elements in them.
        self._num_batches = 0
        self._num_elements = 0
        #: End of the splits that are complete with the batches made so far.
        self._done_to = 0
        self._is_exhausted = False
        #: End of the splits that are complete at the end of the task.
        self._done_at_end = 0
        self._is_finished = False
        #: Departed clients.
        self._departed_clients: set[str] = set()
        #: Error for all further requests.
        self._refusal: Exception | None = None

    # --- state ------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another batch may be made."""
        if self._counts_elements and len(self._ready_batches) >= sum(
            map(self._can_deliver_to, self._waiting_requests)
        ):
            return False
        return (
            len(self._ready_batches) < self._limits.ready_batches
            and self._ready_bytes < self._limits.ready_bytes
        )

    @property
    def buffered(self) -> BufferedOutput:
        """Batches without a request."""
        return BufferedOutput(len(self._ready_batches), self._ready_bytes)

    @property
    def completed_splits(self) -> Ranges:
        """Splits that were delivered and acknowledged, in assignment order.

        Batches dropped from a silent client count as well, because no client waits for them.
        """
        if self.is_fully_acknowledged:
            return first_n(self._done_at_end)
        delivered_to = 0 if self._last_delivered is None else self._last_delivered.done_to
        return first_n(
            min(
                (batch.done_from for batch in self._unacknowledged_replies.batches()),
                default=delivered_to,
            )
        )

    @property
    def acknowledged_splits(self) -> tuple[Ranges, Ranges]:
        """Splits acknowledged completely and in part, without those in unacknowledged batches.

        Empty if element ids are tracked, because clients then report by element id.
        """
        if self._acknowledged_by_client is not None:
            return (), ()
        last = self._last_delivered
        complete_end = started_end = (
            self._done_at_end if self._is_exhausted and not self._ready_batches else 0
        )
        if last is not None:
            complete_end, started_end = (
                max(complete_end, last.done_to),
                max(started_end, last.done_to, last.delivered_end),
            )
        unacknowledged = self._unacknowledged_replies.batches()
        return (
            subtract(first_n(complete_end), _delivered_splits(unacknowledged)),
            subtract(first_n(started_end), _whole_splits(unacknowledged)),
        )

    @property
    def can_finish(self) -> bool:
        """Whether nothing is left to deliver (rule 3)."""
        return (
            self._is_exhausted
            and not self._ready_batches
            and (
                self._unacknowledged_replies.num_clients_seen > 1
                or not self._unacknowledged_replies.num_unacknowledged
            )
        )

    @property
    def is_fully_acknowledged(self) -> bool:
        """Whether everything was delivered and acknowledged."""
        return (
            self._is_exhausted
            and not self._ready_batches
            and not self._unacknowledged_replies.num_unacknowledged
        )

    @property
    def is_abandoned(self) -> bool:
        """Whether all clients have departed, so that remaining splits can be returned.

        Only if element ids are tracked: other tasks then deliver the rest, and nothing is lost.
        """
        clients = self._unacknowledged_replies.clients
        have_all_departed = bool(clients) and clients <= self._departed_clients
        return (
            self._acknowledged_by_client is not None
            and have_all_departed
            and not self._unacknowledged_replies.num_unacknowledged
        )

    @property
    def max_batch_elements(self) -> int | None:
        """Smallest number of elements that a waiting request asks for."""
        return min((limit for limit in self._requested_elements.values() if limit), default=None)

    # --- inputs -----------------------------------------------------------------------------------

    def request_received(
        self, request: R, message: GetElements, now: float
    ) -> list[tuple[R, BatchReply]]:
        """Handle a client's request."""
        client_id, number = message.client_id, message.request_number
        if client_id in self._departed_clients:
            return [(request, _departed_client_error(client_id))]
        acknowledged = self._unacknowledged_replies.acknowledge(
            client_id, message.acknowledged, now
        )
        if self._acknowledged_by_client is not None and acknowledged:
            self._record_acknowledged(client_id, acknowledged)
        sent_batch = self._unacknowledged_replies.find(client_id, number)
        if sent_batch is not None:
            return [(request, sent_batch), *self._take_replies()]
        if self._unacknowledged_replies.is_acknowledged(client_id, number):
            error = AbortedError(f"request {number} was already answered and acknowledged")
            return [(request, error), *self._take_replies()]
        if self._unacknowledged_replies.is_expired(client_id, number):
            return [(request, self._dropped_error(number)), *self._take_replies()]
        if self._refusal is not None:
            return [(request, self._refusal)]
        self._counts_elements = self._counts_elements or message.max_elements > 0
        self._requested_elements[client_id, number] = message.max_elements
        # A repeated request replaces the one that lost its connection.
        replaced_request = self._waiting_requests.get((client_id, number))
        self._waiting_requests[client_id, number] = request
        replies = self._take_replies()
        if replaced_request is not None:
            replies.append((replaced_request, AbortedError(f"request {number} was repeated")))
        return replies

    def add_batch(self, batch: ResultBatch) -> list[tuple[R, BatchReply]]:
        """Add the next batch."""
        assert not self._is_exhausted, "batch added after the end of the task"
        batch = replace(batch, earlier_delivered_end=self._delivered_end, index=self._num_batches)
        self._num_batches += 1
        self._num_elements = batch.first_element + batch.num_elements
        self._done_to = batch.done_to
        self._delivered_end = max(batch.delivered_end, batch.done_to)
        if self._refusal is not None:
            return []
        self._ready_batches.append(batch)
        self._ready_bytes += batch.size
        return self._take_replies()

    def assign(self, start: int, stop: int, ordinals: Ranges) -> None:
        """Record the next assignment of the task, splits `start` to `stop` - 1 of the stream."""
        if self._assignments is not None:
            first = ordinals[0][0] if ordinals else 0
            self._assignments.append((self._num_splits, stop - start, start, first))
            self._num_splits += stop - start

    def _open_assignments(self) -> tuple[tuple[int, int, int, int], ...]:
        if self._assignments is None:
            return ()
        # Clients do not know yet about splits that are complete only with the end.
        num_reported = min(self._num_done, self._done_to)
        while (
            self._assignments and self._assignments[0][0] + self._assignments[0][1] <= num_reported
        ):
            del self._assignments[0]
        return tuple(self._assignments)

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
        self._refusal = refusal
        undelivered = self._undelivered_output()
        self._ready_batches.clear()
        self._ready_bytes = 0
        requests, self._waiting_requests = self._waiting_requests, {}
        self._requested_elements.clear()
        return [(request, refusal) for request in requests.values()], undelivered

    def remove_client(
        self, client_id: str
    ) -> tuple[list[tuple[R, BatchReply]], DepartedClientOutput]:
        """Record that a client departed; return what to report about it. Idempotent."""
        self._departed_clients.add(client_id)
        keys = [key for key in self._waiting_requests if key[0] == client_id]
        for key in keys:
            self._requested_elements.pop(key, None)
        replies: list[tuple[R, BatchReply]] = [
            (self._waiting_requests.pop(key), _departed_client_error(client_id)) for key in keys
        ]
        unacknowledged = self._unacknowledged_replies.unacknowledged_by(client_id)
        sent_splits = _delivered_splits(unacknowledged)
        exclusive_splits = intersect(_whole_splits(unacknowledged), sent_splits)
        if self._acknowledged_by_client is None:
            return replies, DepartedClientOutput(
                unacknowledged=exclusive_splits,
                possibly_lost=subtract(sent_splits, exclusive_splits),
            )
        elements, acknowledged = (
            ElementSet(),
            self._acknowledged_by_client.get(client_id, ElementSet()),
        )
        for batch in unacknowledged:
            elements.add(batch.element_ids.runs)
        return replies, DepartedClientOutput(
            unacknowledged=exclusive_splits,
            possibly_lost=(),
            partially_unacknowledged=elements.excluding(exclusive_splits),
            partially_acknowledged=acknowledged.excluding(()),
        )

    def forget_completed(self, splits: int) -> None:
        """Record that the dispatcher knows that all splits before this one are done."""
        self._num_done = max(self._num_done, splits)
        for each in (self._acknowledged_by_client or {}).values():
            each.forget(self._num_done)

    def _record_acknowledged(self, client_id: str, batches: list[ResultBatch]) -> None:
        """Record what a client acknowledged, as long as one of the splits may be reassigned."""
        assert self._acknowledged_by_client is not None
        acknowledged = self._acknowledged_by_client.get(client_id)
        if acknowledged is None:
            acknowledged = self._acknowledged_by_client[client_id] = ElementSet()
        for batch in batches:
            # Splits that begin and end within a batch have no elements in other batches.
            start = max(batch.done_from, batch.earlier_delivered_end)
            acknowledged.add_with_complete(batch.element_ids.runs, start, batch.done_to)

    def forget_client(self, client_id: str) -> list[tuple[R, BatchReply]]:
        """Record that the dispatcher knows what a departed client had received."""
        self._unacknowledged_replies.drop_client(client_id)
        return self._take_replies()

    def drop_expired(self, now: float) -> tuple[list[tuple[R, BatchReply]], int]:
        """Drop batches held by silent clients; return replies and the number of lost elements."""
        expired = self._unacknowledged_replies.expire_clients(now, self._limits.client_timeout)
        return self._take_replies() if expired else [], sum(batch.num_elements for batch in expired)

    # --- rules ------------------------------------------------------------------------------------

    def _take_replies(self) -> list[tuple[R, BatchReply]]:
        replies: list[tuple[R, BatchReply]] = []
        while self._ready_batches and (key := self._next_request()) is not None:
            batch = self._ready_batches.popleft()
            self._ready_bytes -= batch.size
            if self._acknowledged_by_client is not None:
                batch = replace(batch, num_done=self._num_done, assigned=self._open_assignments())
            self._unacknowledged_replies.record(*key, batch, batch.size)
            self._last_delivered = batch
            self._requested_elements.pop(key, None)
            replies.append((self._waiting_requests.pop(key), batch))
        if (
            self._is_exhausted
            and not self._ready_batches
            and (self._is_finished or not self.can_finish)
        ):
            for (client_id, _), request in self._waiting_requests.items():
                num_unacknowledged, _ = self._unacknowledged_replies.count_unacknowledged(client_id)
                replies.append(
                    (request, self._empty_reply(end=self._is_finished and not num_unacknowledged))
                )
            self._waiting_requests.clear()
            self._requested_elements.clear()
        return replies

    def _next_request(self) -> tuple[str, int] | None:
        return next(filter(self._can_deliver_to, self._waiting_requests), None)

    def _can_deliver_to(self, key: tuple[str, int]) -> bool:
        return self._client_has_room(key[0])

    def _client_has_room(self, client_id: str) -> bool:
        num_batches, size = self._unacknowledged_replies.count_unacknowledged(client_id)
        if self._unacknowledged_replies.unacknowledged_bytes >= self._limits.total_bytes:
            return num_batches < 1
        return num_batches < 2 or size < self._limits.client_bytes

    def _empty_reply(self, *, end: bool) -> GetElementsReply:
        return GetElementsReply(
            first_element=self._num_elements,
            num_elements=0,
            end_of_task=end,
            done_from=self._done_to,
            done_to=self._done_at_end,
            delivered_end=max(self._delivered_end, self._done_at_end),
            earlier_delivered_end=self._delivered_end,
            mode_data=ElementIds(assigned=assigned)
            if (assigned := self._open_assignments())
            else None,
        )

    def _undelivered_output(self) -> UndeliveredOutput:
        last = self._last_delivered
        delivered_end = 0 if last is None else max(last.delivered_end, last.done_to)
        if self._is_exhausted and not self._ready_batches:
            delivered_end = self._done_at_end
        return UndeliveredOutput(
            elements=sum(batch.num_elements for batch in self._ready_batches),
            unacknowledged=sum(
                batch.num_elements for batch in self._unacknowledged_replies.batches()
            ),
            delivered_splits=first_n(delivered_end),
        )

    def _dropped_error(self, number: int) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"the elements of request {number} were dropped, because this client sent no request "
            f"for {self._limits.client_timeout:g} s"
        )


def _delivered_splits(batches: Iterable[ResultBatch]) -> Ranges:
    """Return the splits that may have elements in the batches."""
    ranges = ((batch.done_from, max(batch.delivered_end, batch.done_to)) for batch in batches)
    return union((start, stop) for start, stop in ranges if start < stop)


def _whole_splits(batches: Iterable[ResultBatch]) -> Ranges:
    """Return the splits whose elements are all in the batches, in consecutive ones.

    Splits that are complete with a batch may have started in earlier ones; the range then contains
    other splits as well.
    """
    ranges: list[tuple[int, int]] = []
    begin, last = 0, -1
    for batch in sorted(batches, key=lambda batch: batch.index):
        begin = begin if batch.index == last + 1 and ranges else batch.earlier_delivered_end
        ranges.append((begin, batch.done_to))
        last = batch.index
    return union((start, stop) for start, stop in ranges if start < stop)


def _departed_client_error(client_id: str) -> CancelledError:
    return CancelledError(
        f"client {client_id} closed its iteration, or its lease expired: elements sent to it may "
        "have been reassigned to other clients; iterate over the dataset again"
    )
