"""First come, first served: requests wait, portions wait, and each request gets one portion.

A way to hand out elements (`hand_out`).

Rule 1. Portions leave in order, each to the request that has waited longest, of a client that may
        have more: one that holds `client_bytes` unacknowledged waits until it has acknowledged
        some, and all wait while `total_bytes` are. Two portions a client may always have (one while
        `total_bytes` are out), so that none waits for ever.
Rule 2. Portions that nobody has asked for are bounded as well (`has_room`).
Rule 3. The task may finish when nothing is left and its only client has acknowledged what it got; a
        second client does not wait for the first.
Rule 4. A client gets the end when the task is finished and that client has acknowledged what it
        got. Until then it is asked to come again when it has used that up.
Rule 5. Where a client counts elements, portions have no more of them than it asked for, and are
        made only for requests that wait. So nothing is made that was not asked for.
Rule 6. A client that is gone gets nothing more. What it did not acknowledge is kept until the
        dispatcher has heard of it, so that those units do not count as done before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from msgspec.structs import replace

from headrace.errors import AbortedError, CancelledError, DeadlineExceededError
from headrace.service.messages import ElementIds, GetElements, GetElementsReply
from headrace.service.ranges import (
    Ranges,
    common,
    first,
    subtracted,
    united,
)
from headrace.service.rows import Rows
from headrace.service.worker.hand_out import Bounds, Departure, HandOut, Left, Ready
from headrace.service.worker.portion import Answer, Portion
from headrace.serving.conversation import Delivery

__all__ = ["FirstCome"]

R = TypeVar("R")


class FirstCome(HandOut[R]):
    """Gives each request the next portion.

    Args:
        bounds: How much may be kept.
        origins: Whether portions say whence their elements are.
        says_dealt: Whether they say what the task was dealt.
    """

    def __init__(
        self, bounds: Bounds | None = None, *, origins: bool = False, says_dealt: bool = False
    ) -> None:
        #: What was dealt and is not done, as `messages.GetElementsReply.dealt`; None: nobody asks.
        self._dealt: list[tuple[int, int, int, int]] | None = [] if says_dealt else None
        self._units_dealt = 0
        #: What each client has acknowledged, of units that were not done; None: nobody asks.
        self._used: dict[str, Rows] | None = {} if origins else None
        self._done = 0
        self._bounds = bounds or Bounds()
        self._delivery: Delivery[Portion] = Delivery()
        self._ready: deque[Portion] = deque()
        #: The sum of their bytes.
        self._ready_bytes = 0
        #: Requests that wait for a portion, the longest waiting first.
        self._waiting: dict[tuple[str, int], R] = {}
        #: Of each of them, how many elements may come; 0: as many as are at hand.
        self._wanted: dict[tuple[str, int], int] = {}
        #: Whether some client counts elements.
        self._counts = False
        #: The portion that was given last.
        self._last_given: Portion | None = None
        #: Units of which something is in the portions so far.
        self._touched = 0
        #: Portions so far, and elements in them.
        self._portions = 0
        self._elements = 0
        #: Units that are whole with all portions so far.
        self._units = 0
        self._exhausted = False
        #: Units that are whole with the end.
        self._units_at_end = 0
        self._finished = False
        #: Clients that are gone.
        self._departed: set[str] = set()
        #: Why everybody is refused.
        self._refusal: Exception | None = None

    # --- what is the case -----------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another portion may be made."""
        if self._counts and len(self._ready) >= sum(map(self._is_served, self._waiting)):
            return False
        return (
            len(self._ready) < self._bounds.ready_portions
            and self._ready_bytes < self._bounds.ready_bytes
        )

    @property
    def ready(self) -> Ready:
        """Portions that nobody has asked for."""
        return Ready(len(self._ready), self._ready_bytes)

    @property
    def done(self) -> Ranges:
        """Units that were delivered and acknowledged: in the order in which they were dealt.

        What a silent client held counts as well: nobody waits for it any more.
        """
        if self.is_settled:
            return first(self._units_at_end)
        given = 0 if self._last_given is None else self._last_given.done_to
        return first(
            min((portion.done_from for portion in self._delivery.portions()), default=given)
        )

    @property
    def acknowledged(self) -> tuple[Ranges, Ranges]:
        """Units of which all, and of which something was acknowledged, and is in hand nowhere.

        Where elements have origins, clients say it by these.
        """
        if self._used is not None:
            return (), ()
        last = self._last_given
        whole = begun = self._units_at_end if self._exhausted and not self._ready else 0
        if last is not None:
            whole, begun = max(whole, last.done_to), max(begun, last.done_to, last.touched)
        in_hand = self._delivery.portions()
        return (
            subtracted(first(whole), _touched_by(in_hand)),
            subtracted(first(begun), _whole_in(in_hand)),
        )

    @property
    def may_finish(self) -> bool:
        """Whether nothing is left to hand out (rule 3)."""
        return (
            self._exhausted
            and not self._ready
            and (self._delivery.clients_ever > 1 or not self._delivery.unacknowledged)
        )

    @property
    def is_settled(self) -> bool:
        """Whether everything was handed out and acknowledged."""
        return self._exhausted and not self._ready and not self._delivery.unacknowledged

    @property
    def is_deserted(self) -> bool:
        """Whether all clients that asked are gone, and what is left can be handed back.

        Where elements have origins, whoever goes on gets it from others, and nothing is lost.
        """
        clients = self._delivery.clients
        are_gone = bool(clients) and clients <= self._departed
        return self._used is not None and are_gone and not self._delivery.unacknowledged

    @property
    def portion_elements(self) -> int | None:
        """The fewest that somebody who waits asks for."""
        return min((most for most in self._wanted.values() if most), default=None)

    # --- what happens -----------------------------------------------------------------------------

    def ask(self, request: R, message: GetElements, now: float) -> list[tuple[R, Answer]]:
        """Take a client's request."""
        client_id, number = message.client_id, message.request_number
        if client_id in self._departed:
            return [(request, _departed(client_id))]
        used = self._delivery.hear(client_id, message.acknowledged, now)
        if self._used is not None and used:
            self._note_used(client_id, used)
        given = self._delivery.find(client_id, number)
        if given is not None:
            return [(request, given), *self._due()]
        if self._delivery.is_over(client_id, number):
            answered = AbortedError(f"request {number} was answered and acknowledged before")
            return [(request, answered), *self._due()]
        if self._delivery.is_forgotten(client_id, number):
            return [(request, self._forgotten(number)), *self._due()]
        if self._refusal is not None:
            return [(request, self._refusal)]
        self._counts = self._counts or message.max_elements > 0
        self._wanted[client_id, number] = message.max_elements
        # A repeated request takes the place of the one that lost its connection.
        repeated = self._waiting.get((client_id, number))
        self._waiting[client_id, number] = request
        answers = self._due()
        if repeated is not None:
            answers.append((repeated, AbortedError(f"request {number} was asked again")))
        return answers

    def add(self, portion: Portion) -> list[tuple[R, Answer]]:
        """Take the next portion."""
        assert not self._exhausted, "a portion after the end"
        portion = replace(portion, begun=self._touched, index=self._portions)
        self._portions += 1
        self._elements = portion.first + portion.count
        self._units = portion.done_to
        self._touched = max(portion.touched, portion.done_to)
        if self._refusal is not None:
            return []
        self._ready.append(portion)
        self._ready_bytes += portion.size
        return self._due()

    def deal(self, start: int, stop: int, rows: Ranges) -> None:
        """Take note that the task is dealt units `start` to `stop` - 1 of the stream next."""
        if self._dealt is not None:
            first = rows[0][0] if rows else 0
            self._dealt.append((self._units_dealt, stop - start, start, first))
            self._units_dealt += stop - start

    def _not_done(self) -> tuple[tuple[int, int, int, int], ...]:
        if self._dealt is None:
            return ()
        # Of those that are whole with the end, clients have not heard before.
        told = min(self._done, self._units)
        while self._dealt and self._dealt[0][0] + self._dealt[0][1] <= told:
            del self._dealt[0]
        return tuple(self._dealt)

    def exhaust(self, units: int = 0) -> list[tuple[R, Answer]]:
        """Take note that no portion will follow; with the end, `units` units are whole."""
        self._exhausted = True
        self._units_at_end = max(units, self._units)
        return self._due()

    def finish(self) -> list[tuple[R, Answer]]:
        """Take note that the task is finished: clients get the end."""
        self._finished = True
        return self._due()

    def call_off(self, refusal: Exception) -> tuple[list[tuple[R, Answer]], Left]:
        """Refuse everybody from now on, except for what was given before."""
        self._refusal = refusal
        left = self._left()
        self._ready.clear()
        self._ready_bytes = 0
        waiting, self._waiting = self._waiting, {}
        self._wanted.clear()
        return [(request, refusal) for request in waiting.values()], left

    def depart(self, client_id: str) -> tuple[list[tuple[R, Answer]], Departure]:
        """Take note that a client is gone; return what is to be said of it. May be called twice."""
        self._departed.add(client_id)
        waiting = [who for who in self._waiting if who[0] == client_id]
        for who in waiting:
            self._wanted.pop(who, None)
        answers: list[tuple[R, Answer]] = [
            (self._waiting.pop(who), _departed(client_id)) for who in waiting
        ]
        given = self._delivery.given_to(client_id)
        lost = _touched_by(given)
        alone = common(_whole_in(given), lost)
        if self._used is None:
            return answers, Departure(units=alone, lost=subtracted(lost, alone))
        rows, used = Rows(), self._used.get(client_id, Rows())
        for portion in given:
            rows.add(portion.origins.runs)
        return answers, Departure(
            units=alone,
            lost=(),
            parts=rows.but(alone),
            used=used.but(()),
        )

    def forget_done(self, units: int) -> None:
        """Take note that the dispatcher knows that all units before this one are done."""
        self._done = max(self._done, units)
        for each in (self._used or {}).values():
            each.forget(self._done)

    def _note_used(self, client_id: str, portions: list[Portion]) -> None:
        """Remember what a client acknowledged, as long as a unit of it may be dealt again."""
        assert self._used is not None
        rows = self._used.get(client_id)
        if rows is None:
            rows = self._used[client_id] = Rows()
        for portion in portions:
            # Units that begin and end with a portion came with nothing else.
            start = max(portion.done_from, portion.begun)
            rows.add_with_whole(portion.origins.runs, start, portion.done_to)

    def forget(self, client_id: str) -> list[tuple[R, Answer]]:
        """Take note that the dispatcher has heard of what a client that is gone was given."""
        self._delivery.forget(client_id)
        return self._due()

    def forget_silent(self, now: float) -> tuple[list[tuple[R, Answer]], int]:
        """Drop what silent clients hold; return the answers, and how many elements that is."""
        lost = self._delivery.forget_silent(now, self._bounds.silence)
        return self._due() if lost else [], sum(portion.count for portion in lost)

    # --- rules ------------------------------------------------------------------------------------

    def _due(self) -> list[tuple[R, Answer]]:
        answers: list[tuple[R, Answer]] = []
        while self._ready and (who := self._next_in_line()) is not None:
            portion = self._ready.popleft()
            self._ready_bytes -= portion.size
            if self._used is not None:
                portion = replace(portion, done=self._done, dealt=self._not_done())
            self._delivery.give(*who, portion, portion.size)
            self._last_given = portion
            self._wanted.pop(who, None)
            answers.append((self._waiting.pop(who), portion))
        if self._exhausted and not self._ready and (self._finished or not self.may_finish):
            for (client_id, _), request in self._waiting.items():
                held, _ = self._delivery.held_by(client_id)
                answers.append((request, self._nothing(end=self._finished and not held)))
            self._waiting.clear()
            self._wanted.clear()
        return answers

    def _next_in_line(self) -> tuple[str, int] | None:
        return next(filter(self._is_served, self._waiting), None)

    def _is_served(self, who: tuple[str, int]) -> bool:
        return self._may_have_more(who[0])

    def _may_have_more(self, client_id: str) -> bool:
        portions, size = self._delivery.held_by(client_id)
        if self._delivery.unacknowledged_bytes >= self._bounds.total_bytes:
            return portions < 1
        return portions < 2 or size < self._bounds.client_bytes

    def _nothing(self, *, end: bool) -> GetElementsReply:
        return GetElementsReply(
            first_element=self._elements,
            num_elements=0,
            end_of_task=end,
            done_from=self._units,
            done_to=self._units_at_end,
            delivered_end=max(self._touched, self._units_at_end),
            earlier_delivered_end=self._touched,
            mode_data=ElementIds(assigned=dealt) if (dealt := self._not_done()) else None,
        )

    def _left(self) -> Left:
        given = self._last_given
        touched = 0 if given is None else max(given.touched, given.done_to)
        if self._exhausted and not self._ready:
            touched = self._units_at_end
        return Left(
            elements=sum(portion.count for portion in self._ready),
            unacknowledged=sum(portion.count for portion in self._delivery.portions()),
            touched=first(touched),
        )

    def _forgotten(self, number: int) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"the elements that answered request {number} were dropped: this client was not heard "
            f"of for {self._bounds.silence:g} s"
        )


def _touched_by(portions: Iterable[Portion]) -> Ranges:
    """Return the units of which something may be in portions."""
    ranges = ((each.done_from, max(each.touched, each.done_to)) for each in portions)
    return united((start, stop) for start, stop in ranges if start < stop)


def _whole_in(portions: Iterable[Portion]) -> Ranges:
    """Return the units of which everything is in portions: they begin and end in consecutive ones.

    Those that are whole with one may have been in earlier ones; then others are among these.
    """
    ranges: list[tuple[int, int]] = []
    since, last = 0, -1
    for portion in sorted(portions, key=lambda portion: portion.index):
        since = since if portion.index == last + 1 and ranges else portion.begun
        ranges.append((since, portion.done_to))
        last = portion.index
    return united((start, stop) for start, stop in ranges if start < stop)


def _departed(client_id: str) -> CancelledError:
    return CancelledError(
        f"client {client_id} closed its iteration, or was silent for so long that it counts as "
        "gone: what it was sent may have gone to others; iterate over the dataset again"
    )
