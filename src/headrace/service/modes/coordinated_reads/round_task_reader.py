"""One task of coordinated reads as a consumer sees it."""

from __future__ import annotations

import math

from headrace.service.client.actions import ReceivedBatch
from headrace.service.client.task_reader import TaskReader
from headrace.service.messages import (
    PROGRESS_REQUEST,
    GetElements,
    GetElementsReply,
    ReportDelivery,
    RoundProgress,
    TaskAddress,
)

__all__ = ["RoundTaskReader"]

_ACKNOWLEDGE_SECONDS = 0.002
"""Seconds to collect arrived rounds into one report, while a progress request is in flight."""


class RoundTaskReader(TaskReader):
    """A task that is being read in rounds.

    Args:
        address: Address of the task.
        consumer: Index of this consumer.
    """

    def __init__(self, address: TaskAddress, consumer: int) -> None:
        super().__init__(address)
        self._consumer = consumer
        #: Requested rounds without a reply.
        self.requested: set[int] = set()
        #: Rounds that arrived and may still be consumed.
        self.batches: dict[int, ReceivedBatch] = {}
        #: Number of rounds that arrived without gaps from the first, and replies of later rounds.
        self.received_rounds: int = 0
        self._early_replies: dict[int, GetElementsReply] = {}
        self.num_complete: int = 0
        """Number of rounds that arrived at every consumer."""
        self.lagging_consumers: tuple[int, ...] = ()
        """Consumers that kept the next round incomplete at the worker's last report."""
        #: The `received_rounds` that the worker knows of.
        self._reported_rounds = 0
        #: When to report arrived rounds even though a progress request waits at the worker; and
        #: whether one does.
        self.acknowledge_by: float = math.inf
        self._has_progress_request = False
        #: Ends of the splits, in assignment order, that arrived completely and in part.
        self._done_to = self._delivered_end = 0

    def should_request(self, number: int) -> bool:
        """Return whether a round must still be requested."""
        return not (
            number < self.received_rounds
            or number in self._early_replies
            or number in self.requested
        )

    def take_requests(
        self, client_id: str, now: float, *, urgent: bool
    ) -> list[tuple[int, GetElements]]:
        """Return the requests to send now, which count as sent.

        Args:
            client_id: ID of this client.
            now: Current time.
            urgent: Whether the worker must reply at once which consumers delay the next round.
        """
        sent, self.unsent = [each for each in self.unsent if each in self.requested], []
        requests = [(number, self._make_request(client_id, number, -1)) for number in sent]
        has_unreported = self._reported_rounds < self.received_rounds
        needs_progress = self.num_complete < self.received_rounds and not self._has_progress_request
        if has_unreported and not requests and self.acknowledge_by == math.inf:
            self.acknowledge_by = now + _ACKNOWLEDGE_SECONDS
        if urgent or needs_progress or now >= self.acknowledge_by:
            known_rounds = -1 if urgent else self.num_complete
            requests.append(
                (PROGRESS_REQUEST, self._make_request(client_id, PROGRESS_REQUEST, known_rounds))
            )
            self._has_progress_request = True
        if requests:
            self._reported_rounds, self.acknowledge_by = self.received_rounds, math.inf
        return requests

    def _make_request(self, client_id: str, number: int, known_rounds: int) -> GetElements:
        return GetElements(
            task_id=self.address.task_id,
            task_token=self.address.task_token,
            client_id=client_id,
            request_number=number,
            acknowledged=self.received_rounds,
            consumer_index=self._consumer,
            known_rounds=known_rounds,
        )

    def resume(self) -> None:
        """End the delay of `retry_at`; after a lost connection, resend all unanswered requests."""
        if self.retry_at:
            self.retry_at = 0.0
            if self.connection_error:
                self.unsent = sorted(self.requested)
                self._reported_rounds, self._has_progress_request = -1, False

    def retry_later(self, number: int, now: float) -> None:
        """Resend a request after a short delay, because the worker cannot answer now."""
        if number == PROGRESS_REQUEST:
            self._has_progress_request = False
        super().retry_later(number, now)

    def request_aborted(self, number: int, now: float) -> None:
        """Record that the worker aborted this request.

        A progress request is replaced by the next one. A round is requested once at a time: the
        worker mistook this request for an earlier one that was delayed on another connection.
        """
        if number in self.requested:
            self.retry_later(number, now)

    def update_progress(self, reply: GetElementsReply) -> None:
        """Record how many rounds are complete; every reply reports it."""
        if isinstance(reply.mode_data, RoundProgress):
            self.num_complete = max(self.num_complete, reply.mode_data.num_complete)

    def progress_replied(self, reply: GetElementsReply) -> None:
        """Handle the reply to a progress request."""
        self._has_progress_request = False
        self.lagging_consumers = (
            reply.mode_data.lagging_consumers if isinstance(reply.mode_data, RoundProgress) else ()
        )

    def add_batch(self, number: int, reply: GetElementsReply, delivery: ReceivedBatch) -> None:
        """Add a round's element."""
        if number not in self.requested:
            return
        self.requested.discard(number)
        self.batches[number] = delivery
        self._early_replies[number] = reply
        while self.received_rounds in self._early_replies:
            next_reply = self._early_replies.pop(self.received_rounds)
            self._done_to, self._delivered_end = (
                next_reply.done_to,
                max(next_reply.delivered_end, next_reply.done_to),
            )
            self.received_rounds += 1

    def loss_report(self, client_id: str) -> ReportDelivery:
        """Return the report about the task after it was lost."""
        return ReportDelivery(
            client_id=client_id,
            task_id=self.address.task_id,
            delivered=((0, self._done_to),) if self._done_to else (),
            partially_delivered=((0, self._delivered_end),) if self._delivered_end else (),
            rounds=self.received_rounds,
        )
