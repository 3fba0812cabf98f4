"""One task whose elements come in rounds, as one consumer sees it."""

from __future__ import annotations

import math

from headrace.service.client.actions import Delivery
from headrace.service.client.task import Task
from headrace.service.messages import (
    PROGRESS_REQUEST,
    GetElements,
    GetElementsReply,
    ReportDelivery,
    RoundProgress,
    TaskAddress,
)

__all__ = ["RoundTask"]

_OWED_SECONDS = 0.002
"""For so long rounds that arrive are said together, where a word is under way."""


class RoundTask(Task):
    """A task that is being read.

    Args:
        address: Where.
        consumer: Which consumer reads.
    """

    def __init__(self, address: TaskAddress, consumer: int) -> None:
        super().__init__(address)
        self._consumer = consumer
        #: Rounds that were asked for, and have no answer.
        self.asked: set[int] = set()
        #: Rounds that arrived and were not used, as long as they may be.
        self.parts: dict[int, Delivery] = {}
        #: Rounds that arrived: so many from the first on, and others.
        self.received = 0
        self._early: dict[int, GetElementsReply] = {}
        self.whole = 0
        """Rounds that arrived at every consumer."""
        self.behind: tuple[int, ...] = ()
        """Consumers that keep the next round from being whole, as the worker said last."""
        #: What the worker knows of `received`, and whether a word is under way that has no answer.
        self._said = 0
        #: When the worker is to know of it although a word is under way, which waits there.
        self.owes_until = math.inf
        self._has_word = False
        #: Units, in dealt order, that came whole with the rounds that arrived, or in part.
        self._units = self._touched = 0

    def wants(self, number: int) -> bool:
        """Whether a round is still to be asked for."""
        return not (number < self.received or number in self._early or number in self.asked)

    def questions(
        self, client_id: str, now: float, *, urgent: bool
    ) -> list[tuple[int, GetElements]]:
        """Return what to send now, which counts as sent.

        Args:
            client_id: Who asks.
            now: The time.
            urgent: Whether the worker is to answer at once who keeps the next round.
        """
        sent, self.to_send = [each for each in self.to_send if each in self.asked], []
        found = [(number, self._question(client_id, number, -1)) for number in sent]
        owes = self._said < self.received
        waits = self.whole < self.received and not self._has_word
        if owes and not found and self.owes_until == math.inf:
            self.owes_until = now + _OWED_SECONDS
        if urgent or waits or now >= self.owes_until:
            known = -1 if urgent else self.whole
            found.append((PROGRESS_REQUEST, self._question(client_id, PROGRESS_REQUEST, known)))
            self._has_word = True
        if found:
            self._said, self.owes_until = self.received, math.inf
        return found

    def _question(self, client_id: str, number: int, known: int) -> GetElements:
        return GetElements(
            task_id=self.address.task_id,
            ticket=self.address.task_token,
            client_id=client_id,
            request_number=number,
            acknowledged=self.received,
            consumer_index=self._consumer,
            known_rounds=known,
        )

    def try_again(self) -> None:
        """Stop waiting for `retry_at`; after a loss, all that is not answered is to be sent."""
        if self.retry_at:
            self.retry_at = 0.0
            if self.problem:
                self.to_send = sorted(self.asked)
                self._said, self._has_word = -1, False

    def put_off(self, number: int, now: float) -> None:
        """Ask again in a moment: the worker cannot answer now."""
        if number == PROGRESS_REQUEST:
            self._has_word = False
        super().put_off(number, now)

    def aborted(self, number: int, now: float) -> None:
        """Take note that the worker does not answer this request.

        A word makes room for the next one. A round is asked for once at a time: the worker took
        this for an earlier request, when that came over the connection before this one and was
        late.
        """
        if number in self.asked:
            self.put_off(number, now)

    def word_came(self, answer: GetElementsReply) -> None:
        """Take how far rounds are whole; any answer says so."""
        if isinstance(answer.mode_data, RoundProgress):
            self.whole = max(self.whole, answer.mode_data.num_complete)

    def word_answered(self, answer: GetElementsReply) -> None:
        """Take the answer to a word."""
        self._has_word = False
        self.behind = (
            answer.mode_data.lagging_consumers
            if isinstance(answer.mode_data, RoundProgress)
            else ()
        )

    def arrive(self, number: int, answer: GetElementsReply, delivery: Delivery) -> None:
        """Take a round's element."""
        if number not in self.asked:
            return
        self.asked.discard(number)
        self.parts[number] = delivery
        self._early[number] = answer
        while self.received in self._early:
            taken = self._early.pop(self.received)
            self._units, self._touched = taken.done_to, max(taken.delivered_end, taken.done_to)
            self.received += 1

    def settlement(self, client_id: str) -> ReportDelivery:
        """Return what to say of it when it is lost."""
        return ReportDelivery(
            client_id=client_id,
            task_id=self.address.task_id,
            delivered=((0, self._units),) if self._units else (),
            partially_delivered=((0, self._touched),) if self._touched else (),
            rounds=self.received,
        )
