"""Round delivery: each consumer receives one element of every round; all do, or none.

A delivery policy (`worker.delivery_policy`). Batches hold one element each; for n consumers, batch
p is part p mod n of round p // n. A client requests a round by its number. An error is a part like
any other.

Rule 1. Consumer i receives part i of a round, as often as it asks, until it acknowledges it.
    `acknowledged` is the number of rounds that arrived.
Rule 2. A round is *complete* when it arrived at every consumer. Consumers use only complete rounds,
    so a round that some consumers never receive is used by none. A request with the number
    `PROGRESS_REQUEST` asks for no element: its reply has the number of complete rounds, once that
    exceeds `known_rounds`; if `known_rounds` is negative, it is sent at once, with the consumers
    that are awaited.
Rule 3. Incomplete rounds are bounded (`has_room`): a slow consumer stops the worker, and thereby
    the other consumers.
Rule 4. Elements at the end that are too few for a round are dropped. If one of them is an error,
    the consumers without a part receive that error too, so that all learn why the task ended.
Rule 5. The task may finish when all rounds are complete; consumers receive the end after that.
Rule 6. An index belongs to the client that first used it. A departed client is not replaced, and no
    later round becomes complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from headrace.errors import AbortedError, FailedPreconditionError
from headrace.service.messages import PROGRESS_REQUEST, GetElements, GetElementsReply, RoundProgress
from headrace.service.ranges import Ranges, first_n, union
from headrace.service.worker.delivery_policy import (
    BufferedOutput,
    BufferLimits,
    DeliveryPolicy,
    DepartedClientOutput,
    UndeliveredOutput,
)
from headrace.service.worker.result_batch import BatchReply, ResultBatch

__all__ = ["RoundDelivery"]

R = TypeVar("R")


@dataclass
class _PendingRound:
    """A round that is not complete."""

    parts: list[ResultBatch] = field(default_factory=list)
    size: int = 0
    is_delivered: bool = False
    """Whether a consumer was sent its part."""


@dataclass
class _Consumer:
    """State of one consumer."""

    client_id: str = ""
    """Client of the consumer; empty before its first request."""
    received_rounds: int = 0
    """Number of rounds that arrived, without gaps from the first."""
    is_expired: bool = False


class RoundDelivery(DeliveryPolicy[R]):
    """Delivers each consumer's part of each round.

    Args:
        consumers: Number of consumers.
        limits: Memory limits.
    """

    def __init__(self, consumers: int, limits: BufferLimits | None = None) -> None:
        self._limits = limits or BufferLimits()
        self._consumers = [_Consumer() for _ in range(consumers)]
        #: Incomplete rounds; the last one may lack parts.
        self._rounds: dict[int, _PendingRound] = {}
        #: Total bytes of these rounds.
        self._bytes = 0
        #: Number of complete rounds, and of rounds that have all parts.
        self._num_complete = self._num_produced = 0
        #: Waiting requests by (consumer, number), each with the complete rounds that the consumer
        #: knows.
        self._waiting_requests: dict[tuple[int, int], tuple[R, int]] = {}
        #: Ends of three ranges of splits: those with elements in the batches so far, those complete
        #: with these batches, and those complete with the complete rounds.
        self._delivered_end = self._done_to = self._completed_to = 0
        #: From this split on, no element was sent.
        self._delivered_to = 0
        self._is_exhausted = self._is_finished = False
        self._done_at_end = 0
        self._dropped_elements = 0
        #: Error for all further requests.
        self._refusal: Exception | None = None

    # --- state ------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another batch may be made; always true while a round lacks parts."""
        lacks = self._num_produced in self._rounds
        rounds = self._num_produced - self._num_complete
        return (
            lacks
            or not rounds
            or (rounds < self._limits.ready_batches and self._bytes < self._limits.ready_bytes)
        )

    @property
    def buffered(self) -> BufferedOutput:
        """Rounds that were produced and did not arrive everywhere."""
        return BufferedOutput(self._num_produced - self._num_complete, self._bytes)

    @property
    def completed_splits(self) -> Ranges:
        """Splits that all consumers have received, in assignment order."""
        return first_n(self._done_at_end if self.can_finish else self._completed_to)

    @property
    def can_finish(self) -> bool:
        """Whether all rounds are complete and none will follow."""
        return self._is_exhausted and self._num_complete == self._num_produced

    @property
    def is_fully_acknowledged(self) -> bool:
        """Whether everything was delivered and acknowledged."""
        return self.can_finish

    @property
    def dropped_elements(self) -> int:
        """Number of elements at the end that were too few for a round and are dropped."""
        return self._dropped_elements

    # --- inputs -----------------------------------------------------------------------------------

    def request_received(
        self, request: R, message: GetElements, now: float
    ) -> list[tuple[R, BatchReply]]:
        """Handle a consumer's request."""
        refusal = self._check_consumer(message)
        if refusal is not None:
            return [(request, refusal)]
        index, number = message.consumer_index, message.request_number
        consumer = self._consumers[index]
        replies = self._record_received(consumer, message.acknowledged)
        if number == PROGRESS_REQUEST:
            if message.known_rounds < self._num_complete:
                return [*replies, (request, self._progress_reply())]
        elif number < consumer.received_rounds:
            duplicate = AbortedError(f"round {number} was already received")
            return [*replies, (request, duplicate)]
        elif number < self._num_produced:
            return [*replies, (request, self._deliver(index, number))]
        if self._refusal is not None:
            return [*replies, (request, self._refusal)]
        if self._is_finished:
            return [*replies, (request, self._end_reply())]
        # A repeated request replaces the one that lost its connection.
        repeated = self._waiting_requests.pop((index, number), None)
        self._waiting_requests[index, number] = request, message.known_rounds
        if repeated is not None:
            replies.append((repeated[0], AbortedError(f"request {number} was repeated")))
        return replies

    def _check_consumer(self, message: GetElements) -> Exception | None:
        index, client_id = message.consumer_index, message.client_id
        if not 0 <= index < len(self._consumers):
            return FailedPreconditionError(
                f"Requesting data for consumer index {index}, but the task is configured for only "
                f"{len(self._consumers)} consumers"
            )
        consumer = self._consumers[index]
        consumer.client_id = consumer.client_id or client_id
        if consumer.client_id != client_id:
            return FailedPreconditionError(
                f"Consumer {index} requested data for round {max(message.request_number, 0)}, but "
                f"the current round has already reached {consumer.received_rounds}: client "
                f"{consumer.client_id} reads as consumer {index}. This may indicate that the "
                "consumer was restarted with the same job name"
            )
        if consumer.is_expired:
            return _departed_client_error(client_id)
        return None

    def _record_received(self, consumer: _Consumer, received: int) -> list[tuple[R, BatchReply]]:
        """Record the rounds that arrived at a consumer, and those that are complete with that."""
        consumer.received_rounds = max(consumer.received_rounds, min(received, self._num_produced))
        num_complete = min(each.received_rounds for each in self._consumers)
        if num_complete == self._num_complete:
            return []
        for number in range(self._num_complete, num_complete):
            completed = self._rounds.pop(number)
            self._bytes -= completed.size
            self._completed_to = completed.parts[-1].done_to
        self._num_complete = num_complete
        progress_keys = [
            key for key, (_, known) in self._waiting_requests.items() if key[1] == PROGRESS_REQUEST
        ]
        return [
            (self._waiting_requests.pop(key)[0], self._progress_reply()) for key in progress_keys
        ]

    def add_batch(self, batch: ResultBatch) -> list[tuple[R, BatchReply]]:
        """Add the next element."""
        assert not self._is_exhausted, "batch added after the end of the task"
        batch = replace(batch, earlier_delivered_end=self._delivered_end)
        self._done_to = batch.done_to
        self._delivered_end = max(batch.delivered_end, batch.done_to)
        if self._refusal is not None:
            return []
        current = self._rounds.setdefault(self._num_produced, _PendingRound())
        current.parts.append(batch)
        current.size += batch.size
        self._bytes += batch.size
        return self._deliver_round() if len(current.parts) == len(self._consumers) else []

    def _deliver_round(self) -> list[tuple[R, BatchReply]]:
        """Send the round, which has all parts now, to the waiting consumers."""
        number, self._num_produced = self._num_produced, self._num_produced + 1
        waiting = [key for key in self._waiting_requests if key[1] == number]
        return [(self._waiting_requests.pop(key)[0], self._deliver(*key)) for key in waiting]

    def note_exhausted(self, splits: int = 0) -> list[tuple[R, BatchReply]]:
        """Record that no further batch will come; `splits` splits are complete with the end."""
        self._is_exhausted = True
        self._done_at_end = max(splits, self._done_to)
        partial = self._rounds.get(self._num_produced)
        if partial is None:
            return []
        error = next((part.error for part in partial.parts if part.error is not None), None)
        if error is not None:
            last_part = partial.parts[-1]
            filler = ResultBatch(
                first_element=last_part.first_element,
                error=error,
                done_from=last_part.done_to,
                done_to=last_part.done_to,
                delivered_end=last_part.delivered_end,
            )
            partial.parts += [filler] * (len(self._consumers) - len(partial.parts))
            return self._deliver_round()
        del self._rounds[self._num_produced]
        self._bytes -= partial.size
        self._dropped_elements = len(partial.parts)
        return []

    def note_finished(self) -> list[tuple[R, BatchReply]]:
        """Record that the task is finished: consumers receive the end."""
        self._is_finished = True
        return self._reply_to_all(self._end_reply())

    def cancel(self, refusal: Exception) -> tuple[list[tuple[R, BatchReply]], UndeliveredOutput]:
        """Reject all further requests, except for rounds with parts that were sent before."""
        self._refusal = refusal
        delivered = [each for each in self._rounds.values() if each.is_delivered]
        undelivered = [number for number, each in self._rounds.items() if not each.is_delivered]
        delivered_end = (
            self._done_at_end if self._is_exhausted and not undelivered else self._delivered_to
        )
        num_elements = 0
        for number in undelivered:
            pending = self._rounds.pop(number)
            num_elements += sum(part.num_elements for part in pending.parts)
            self._bytes -= pending.size
        self._num_produced = min(undelivered, default=self._num_produced)
        output = UndeliveredOutput(
            elements=num_elements,
            unacknowledged=sum(part.num_elements for each in delivered for part in each.parts),
            delivered_splits=first_n(delivered_end),
        )
        return self._reply_to_all(refusal), output

    def remove_client(
        self, client_id: str
    ) -> tuple[list[tuple[R, BatchReply]], DepartedClientOutput]:
        """Record that a client departed: rounds that it has not received never become complete."""
        replies: list[tuple[R, BatchReply]] = []
        lost: list[tuple[int, int]] = []
        for index, consumer in enumerate(self._consumers):
            if consumer.client_id != client_id:
                continue
            consumer.is_expired = True
            for key in [key for key in self._waiting_requests if key[0] == index]:
                replies.append(
                    (self._waiting_requests.pop(key)[0], _departed_client_error(client_id))
                )
            for number, each in self._rounds.items():
                if each.is_delivered and number >= consumer.received_rounds:
                    first_part, last_part = each.parts[0], each.parts[-1]
                    lost.append(
                        (first_part.done_from, max(last_part.delivered_end, last_part.done_to))
                    )
        splits = union(each for each in lost if each[0] < each[1])
        return replies, DepartedClientOutput(unacknowledged=(), possibly_lost=splits)

    def forget_client(self, client_id: str) -> list[tuple[R, BatchReply]]:
        """Do nothing: the dispatcher's knowledge of a departed client has no effect here."""
        return []

    def drop_expired(self, now: float) -> tuple[list[tuple[R, BatchReply]], int]:
        """Drop nothing: the other consumers wait for a silent one."""
        return [], 0

    # --- replies ----------------------------------------------------------------------------------

    def _deliver(self, index: int, number: int) -> ResultBatch:
        """Return a consumer's part of a round; splits count with the round as a whole."""
        pending = self._rounds[number]
        pending.is_delivered = True
        first_part, last_part = pending.parts[0], pending.parts[-1]
        delivered_end = max(last_part.delivered_end, last_part.done_to)
        self._delivered_to = max(self._delivered_to, delivered_end)
        return replace(
            pending.parts[index],
            first_element=number,
            done_from=first_part.done_from,
            done_to=last_part.done_to,
            delivered_end=delivered_end,
            earlier_delivered_end=first_part.earlier_delivered_end,
            mode_data=RoundProgress(num_complete=self._num_complete),
        )

    def _progress_reply(self) -> GetElementsReply:
        progress = RoundProgress(
            num_complete=self._num_complete, lagging_consumers=self._lagging_consumers()
        )
        return GetElementsReply(
            first_element=self._num_produced, num_elements=0, end_of_task=False, mode_data=progress
        )

    def _end_reply(self) -> GetElementsReply:
        return GetElementsReply(
            first_element=self._num_produced,
            num_elements=0,
            end_of_task=True,
            mode_data=RoundProgress(num_complete=self._num_complete),
        )

    def _lagging_consumers(self) -> tuple[int, ...]:
        """Return the consumers that keep the next round incomplete; none if it is not produced."""
        if self._num_produced == self._num_complete:
            return ()
        consumers: Iterable[tuple[int, _Consumer]] = enumerate(self._consumers)
        return tuple(
            index for index, each in consumers if each.received_rounds == self._num_complete
        )

    def _reply_to_all(self, reply: BatchReply) -> list[tuple[R, BatchReply]]:
        """Send the same reply to all waiting requests."""
        waiting, self._waiting_requests = self._waiting_requests, {}
        return [(request, reply) for request, _ in waiting.values()]


def _departed_client_error(client_id: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"client {client_id} closed its iterator, or its lease expired: its group of consumers "
        "cannot continue; start all consumers again"
    )
