"""Rounds: each consumer gets one element of every round, and a round is given to all or to nobody.

A way to hand out elements (`hand_out`). Portions hold one element each; portion p is part p mod n
of round p // n, for n consumers. A client asks for a round by its number. An error is a part like
any other: it keeps its place.

Rule 1. Consumer i gets part i of a round, as often as it asks, until it says that it arrived. What
        it says in `acknowledged` are rounds that arrived.
Rule 2. A round is *whole* when it arrived at every consumer. Consumers use no other, so that one
        that some of them never get is used by nobody. A request with the number `PROGRESS_REQUEST`
        asks for no element: its answer says how many rounds are whole, once that are more than
        `known`; at once where `known` is negative, with the consumers that are waited for.
Rule 3. Rounds that are not whole are bounded (`has_room`): a consumer that lags stops the worker,
        and with it the others.
Rule 4. Elements that are too few for a round at the end go to nobody. Where one of them is an
        error, the consumers without a part get that error too: nobody misses why a task ended.
Rule 5. The task may finish when all rounds are whole; consumers get the end after that.
Rule 6. An index belongs to the client that first asked with it. A client that is gone is not
        replaced, and no round after it becomes whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from headrace.errors import AbortedError, FailedPreconditionError
from headrace.service.messages import PROGRESS_REQUEST, GetElements, GetElementsReply, RoundProgress
from headrace.service.ranges import Ranges, first, united
from headrace.service.worker.hand_out import Bounds, Departure, HandOut, Left, Ready
from headrace.service.worker.portion import Answer, Portion

__all__ = ["Rounds"]

R = TypeVar("R")


@dataclass
class _Round:
    """A round that is not whole."""

    parts: list[Portion] = field(default_factory=list)
    size: int = 0
    is_given: bool = False
    """Whether a consumer was given its part."""


@dataclass
class _Consumer:
    """What is known of one consumer."""

    client_id: str = ""
    """Empty: it never asked."""
    received: int = 0
    """Rounds that arrived, from the first on."""
    is_gone: bool = False


class Rounds(HandOut[R]):
    """Gives each consumer its part of each round.

    Args:
        consumers: How many there are.
        bounds: How much may be kept.
    """

    def __init__(self, consumers: int, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._consumers = [_Consumer() for _ in range(consumers)]
        #: Those that are not whole; the last one may lack parts.
        self._rounds: dict[int, _Round] = {}
        #: The sum of their bytes.
        self._size = 0
        #: Rounds that are whole, and rounds that have all parts.
        self._whole = self._made = 0
        #: Requests that wait: (consumer, number); with what the consumer knows, where it is a word.
        self._waiting: dict[tuple[int, int], tuple[R, int]] = {}
        #: Units of which something is in the portions so far; that are whole with those; and that
        #: are whole with the rounds that are.
        self._touched = self._units = self._units_whole = 0
        #: Of units from this one on, nothing was given to anybody.
        self._given_of = 0
        self._exhausted = self._finished = False
        self._units_at_end = 0
        self._dropped = 0
        #: Why everybody is refused.
        self._refusal: Exception | None = None

    # --- what is the case -----------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another portion may be made; what a round lacks may always."""
        lacks = self._made in self._rounds
        rounds = self._made - self._whole
        return (
            lacks
            or not rounds
            or (rounds < self._bounds.ready_portions and self._size < self._bounds.ready_bytes)
        )

    @property
    def ready(self) -> Ready:
        """Rounds that are made and did not arrive everywhere."""
        return Ready(self._made - self._whole, self._size)

    @property
    def done(self) -> Ranges:
        """Units, in dealt order, that all consumers have."""
        return first(self._units_at_end if self.may_finish else self._units_whole)

    @property
    def may_finish(self) -> bool:
        """Whether all rounds there will ever be are whole."""
        return self._exhausted and self._whole == self._made

    @property
    def is_settled(self) -> bool:
        """Whether everything was handed out and acknowledged."""
        return self.may_finish

    @property
    def dropped(self) -> int:
        """Elements at the end that made no round, and go to nobody."""
        return self._dropped

    # --- what happens ---------------------------------------------------------------------------

    def ask(self, request: R, message: GetElements, now: float) -> list[tuple[R, Answer]]:
        """Take a consumer's request."""
        refusal = self._admit(message)
        if refusal is not None:
            return [(request, refusal)]
        index, number = message.consumer_index, message.request_number
        consumer = self._consumers[index]
        answers = self._receive(consumer, message.acknowledged)
        if number == PROGRESS_REQUEST:
            if message.known_rounds < self._whole:
                return [*answers, (request, self._word())]
        elif number < consumer.received:
            answered = AbortedError(f"round {number} was received before")
            return [*answers, (request, answered)]
        elif number < self._made:
            return [*answers, (request, self._give(index, number))]
        if self._refusal is not None:
            return [*answers, (request, self._refusal)]
        if self._finished:
            return [*answers, (request, self._end())]
        # A repeated request takes the place of the one that lost its connection.
        repeated = self._waiting.pop((index, number), None)
        self._waiting[index, number] = request, message.known_rounds
        if repeated is not None:
            answers.append((repeated[0], AbortedError(f"request {number} was asked again")))
        return answers

    def _admit(self, message: GetElements) -> Exception | None:
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
                "the "
                f"current round has already reached {consumer.received}: client "
                f"{consumer.client_id} reads as consumer {index}. This may indicate that the "
                "consumer was restarted with the same job name"
            )
        if consumer.is_gone:
            return _departed(client_id)
        return None

    def _receive(self, consumer: _Consumer, received: int) -> list[tuple[R, Answer]]:
        """Take note of what arrived at a consumer, and of what is whole with that."""
        consumer.received = max(consumer.received, min(received, self._made))
        whole = min(each.received for each in self._consumers)
        if whole == self._whole:
            return []
        for number in range(self._whole, whole):
            over = self._rounds.pop(number)
            self._size -= over.size
            self._units_whole = over.parts[-1].done_to
        self._whole = whole
        words = [key for key, (_, known) in self._waiting.items() if key[1] == PROGRESS_REQUEST]
        return [(self._waiting.pop(key)[0], self._word()) for key in words]

    def add(self, portion: Portion) -> list[tuple[R, Answer]]:
        """Take the next element."""
        assert not self._exhausted, "a portion after the end"
        portion = replace(portion, begun=self._touched)
        self._units = portion.done_to
        self._touched = max(portion.touched, portion.done_to)
        if self._refusal is not None:
            return []
        current = self._rounds.setdefault(self._made, _Round())
        current.parts.append(portion)
        current.size += portion.size
        self._size += portion.size
        return self._make() if len(current.parts) == len(self._consumers) else []

    def _make(self) -> list[tuple[R, Answer]]:
        """Give the round, which has all parts now, to those who wait for it."""
        number, self._made = self._made, self._made + 1
        waiting = [key for key in self._waiting if key[1] == number]
        return [(self._waiting.pop(key)[0], self._give(*key)) for key in waiting]

    def exhaust(self, units: int = 0) -> list[tuple[R, Answer]]:
        """Take note that no portion will follow; with the end, `units` units are whole."""
        self._exhausted = True
        self._units_at_end = max(units, self._units)
        left = self._rounds.get(self._made)
        if left is None:
            return []
        error = next((part.error for part in left.parts if part.error is not None), None)
        if error is not None:
            last = left.parts[-1]
            more = Portion(
                first=last.first,
                error=error,
                done_from=last.done_to,
                done_to=last.done_to,
                touched=last.touched,
            )
            left.parts += [more] * (len(self._consumers) - len(left.parts))
            return self._make()
        del self._rounds[self._made]
        self._size -= left.size
        self._dropped = len(left.parts)
        return []

    def finish(self) -> list[tuple[R, Answer]]:
        """Take note that the task is finished: consumers get the end."""
        self._finished = True
        return self._release(self._end())

    def call_off(self, refusal: Exception) -> tuple[list[tuple[R, Answer]], Left]:
        """Refuse everybody from now on, except for rounds of which something was given before."""
        self._refusal = refusal
        given = [each for each in self._rounds.values() if each.is_given]
        kept = [number for number, each in self._rounds.items() if not each.is_given]
        touched = self._units_at_end if self._exhausted and not kept else self._given_of
        elements = 0
        for number in kept:
            left = self._rounds.pop(number)
            elements += sum(part.count for part in left.parts)
            self._size -= left.size
        self._made = min(kept, default=self._made)
        left_over = Left(
            elements=elements,
            unacknowledged=sum(part.count for each in given for part in each.parts),
            touched=first(touched),
        )
        return self._release(refusal), left_over

    def depart(self, client_id: str) -> tuple[list[tuple[R, Answer]], Departure]:
        """Take note that a client is gone: no round that it has not received becomes whole."""
        answers: list[tuple[R, Answer]] = []
        lost: list[tuple[int, int]] = []
        for index, consumer in enumerate(self._consumers):
            if consumer.client_id != client_id:
                continue
            consumer.is_gone = True
            for key in [key for key in self._waiting if key[0] == index]:
                answers.append((self._waiting.pop(key)[0], _departed(client_id)))
            for number, each in self._rounds.items():
                if each.is_given and number >= consumer.received:
                    begin, last = each.parts[0], each.parts[-1]
                    lost.append((begin.done_from, max(last.touched, last.done_to)))
        units = united(each for each in lost if each[0] < each[1])
        return answers, Departure(units=(), lost=units)

    def forget(self, client_id: str) -> list[tuple[R, Answer]]:
        """Take note that the dispatcher has heard of a client that is gone: nothing follows."""
        return []

    def forget_silent(self, now: float) -> tuple[list[tuple[R, Answer]], int]:
        """Drop nothing: whoever is silent is waited for by the others."""
        return [], 0

    # --- answers --------------------------------------------------------------------------------

    def _give(self, index: int, number: int) -> Portion:
        """Return a consumer's part of a round; units count with the round as a whole."""
        given = self._rounds[number]
        given.is_given = True
        begin, last = given.parts[0], given.parts[-1]
        touched = max(last.touched, last.done_to)
        self._given_of = max(self._given_of, touched)
        return replace(
            given.parts[index],
            first=number,
            done_from=begin.done_from,
            done_to=last.done_to,
            touched=touched,
            begun=begin.begun,
            mode=RoundProgress(num_complete=self._whole),
        )

    def _word(self) -> GetElementsReply:
        progress = RoundProgress(num_complete=self._whole, lagging_consumers=self._behind())
        return GetElementsReply(
            first_element=self._made, num_elements=0, end_of_task=False, mode_data=progress
        )

    def _end(self) -> GetElementsReply:
        return GetElementsReply(
            first_element=self._made,
            num_elements=0,
            end_of_task=True,
            mode_data=RoundProgress(num_complete=self._whole),
        )

    def _behind(self) -> tuple[int, ...]:
        """Return the consumers without which the next round is not whole; none: it is not made."""
        if self._made == self._whole:
            return ()
        consumers: Iterable[tuple[int, _Consumer]] = enumerate(self._consumers)
        return tuple(index for index, each in consumers if each.received == self._whole)

    def _release(self, answer: Answer) -> list[tuple[R, Answer]]:
        """Answer all who wait alike."""
        waiting, self._waiting = self._waiting, {}
        return [(request, answer) for request, _ in waiting.values()]


def _departed(client_id: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"client {client_id} was not heard of for too long, or closed its iterator, and counts as "
        "gone: its group of consumers cannot go on; start all consumers again"
    )
