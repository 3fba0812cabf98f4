"""Shared by trainers: each element is made once, and each trainer reads all of them.

A way to hand out elements (`hand_out`): a sliding window over an endless dataset (`shared_window`).

Rule 1. A portion is made when the trainer that is farthest asks for what comes next; for it the
        oldest portions leave, where the window is full. Nothing is made in advance.
Rule 2. Each trainer reads every portion in order. One whose next elements have left goes on with
        the oldest that are there: the answer says how many it did not get. A new trainer begins
        with the oldest as well.
Rule 3. Clients that name the same trainer share its place: each portion goes to one of them. A
        trainer's place is kept for as long as the task lives, whoever comes and goes; what a
        client was sent and did not use does not come again.
Rule 4. An error in an element's place goes to one client, and is not kept. Elements larger than
        the window are such errors.
Rule 5. The data has no end. Where it ends all the same, each trainer hears that as an error, after
        the last element; where the task was asked to end, trainers read what there is.
Rule 6. A client holds no more unacknowledged than two portions, or `client_bytes`.
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
from headrace.service.ranges import Ranges, first
from headrace.service.worker.hand_out import Bounds, Departure, HandOut, Left, Ready
from headrace.service.worker.portion import Answer, Portion
from headrace.serving.conversation import Delivery

__all__ = ["Place", "Shared", "Window", "part_of"]


R = TypeVar("R")

_PORTIONS = 8

"""At least so many portions of several elements fit into the window."""


@dataclass
class _Trainer:
    place: Place
    given: int = 0
    skipped: int = 0
    #: Elements that it did not get, of which no answer has said so.
    unsaid: int = 0
    #: It heard of the end.
    was_told: bool = False


class Shared(HandOut[R]):
    """Gives each trainer every portion.

    Args:
        bounds: How much may be kept.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._window = Window(self._bounds.window_bytes)
        self._delivery: Delivery[Portion] = Delivery()
        self._trainers: dict[str, _Trainer] = {}
        #: The clients that are there, with the trainers for which they read.
        self._readers: dict[str, _Trainer] = {}
        #: Requests that wait, the longest waiting first: each with how many elements may come.
        self._waiting: dict[tuple[str, int], tuple[R, int]] = {}
        #: Errors in place of elements that nobody was sent yet.
        self._errors: deque[Portion] = deque()
        #: The newest portion that somebody was sent.
        self._newest: Portion | None = None
        #: Units of which something is in the portions so far, and those that are whole with them.
        self._touched = self._units = 0
        self._portions = self._elements = 0
        self._exhausted = self._finished = False
        self._units_at_end = 0
        #: What each trainer hears after the last element; None: that it was the last.
        self._last_word: HeadraceError | None = None
        self._last_error: HeadraceError | None = None
        self._departed: set[str] = set()
        self._refusal: Exception | None = None

    # --- what is the case -----------------------------------------------------------------------

    @property
    def portion_bytes(self) -> int | None:
        """An eighth of the window: what is pushed out goes in small pieces."""
        return max(1, self._bounds.window_bytes // _PORTIONS)

    @property
    def has_room(self) -> bool:
        """Whether somebody waits for what comes next (rule 1)."""
        if self._exhausted or self._errors or self._refusal is not None:
            return False
        return any(
            self._window.is_at_end(self._readers[client_id].place)
            and self._may_have_more(client_id)
            for client_id, _ in self._waiting
        )

    @property
    def done(self) -> Ranges:
        """Units, in dealt order, that are whole and were sent to some trainer.

        What a trainer did not get when its worker died is not dealt again: others had it.
        """
        if self.is_settled:
            return first(self._units_at_end)
        return first(0 if self._newest is None else self._newest.done_to)

    @property
    def may_finish(self) -> bool:
        """Whether nothing is left for any trainer that is there."""
        return self._is_read() and not self._delivery.unacknowledged

    @property
    def is_settled(self) -> bool:
        """Whether everything was handed out and acknowledged."""
        return self.may_finish

    @property
    def made(self) -> int:
        """Number of elements that were made."""
        return self._elements

    @property
    def kept(self) -> tuple[int, int]:
        """Number of elements in the window, and their bytes."""
        return self._window.elements, self._window.bytes

    @property
    def ready(self) -> Ready:
        """What the window keeps, and how far each trainer is."""
        return Ready(len(self._window), self._window.bytes, tuple(self.figures()))

    def figures(self) -> list[TrainerActivity]:
        """Return how far each trainer is."""
        return [
            TrainerActivity(
                trainer_id=trainer_id,
                delivered=trainer.given,
                skipped=trainer.skipped,
                lag=self._elements - trainer.place.element,
            )
            for trainer_id, trainer in self._trainers.items()
        ]

    def _is_read(self) -> bool:
        return self._exhausted and all(
            self._window.is_at_end(trainer.place) and self._has_heard(trainer)
            for trainer in self._readers.values()
        )

    def _has_heard(self, trainer: _Trainer) -> bool:
        return trainer.was_told or self._last_word is None

    # --- what happens ---------------------------------------------------------------------------

    def ask(self, request: R, message: GetElements, now: float) -> list[tuple[R, Answer]]:
        """Take a client's request."""
        client_id, number = message.client_id, message.request_number
        if client_id in self._departed:
            return [(request, _departed(client_id))]
        if not message.trainer_id:
            return [(request, _nameless(message))]
        self._delivery.hear(client_id, message.acknowledged, now)
        given = self._delivery.find(client_id, number)
        if given is not None:
            return [(request, given), *self._due()]
        if self._delivery.is_over(client_id, number):
            answered = AbortedError(f"request {number} was answered and acknowledged before")
            return [(request, answered), *self._due()]
        if self._refusal is not None:
            return [(request, self._refusal)]
        self._readers[client_id] = self._trainer(message.trainer_id)
        repeated = self._waiting.get((client_id, number))
        self._waiting[client_id, number] = request, message.max_elements
        answers = self._due()
        if repeated is not None:
            answers.append((repeated[0], AbortedError(f"request {number} was asked again")))
        return answers

    def _trainer(self, trainer_id: str) -> _Trainer:
        found = self._trainers.get(trainer_id)
        if found is None:
            found = self._trainers[trainer_id] = _Trainer(self._window.beginning())
        return found

    def add(self, portion: Portion) -> list[tuple[R, Answer]]:
        """Take the next portion."""
        assert not self._exhausted, "a portion after the end"
        if portion.count and not self._window.has_room_for(portion):
            portion = replace(portion, count=0, buffers=(), size=0, error=self._too_large(portion))
        self._units = portion.done_to
        begun, self._touched = self._touched, max(portion.touched, portion.done_to)
        if self._refusal is not None:
            return []
        portion = replace(portion, begun=begun, index=self._portions, is_shared=True)
        if portion.error is not None:
            self._errors.append(portion)
            self._last_error = _as_ours(portion.error)
        else:
            self._portions += 1
            self._elements = portion.first + portion.count
            self._window.add(portion)
        return self._due()

    def _too_large(self, portion: Portion) -> InvalidArgumentError:
        return InvalidArgumentError(
            "The element size is larger than cache size in bytes. Got element size: "
            f"{portion.size} and cache size: {self._bounds.window_bytes}. Raise "
            "`cross_trainer_cache_size_bytes` of the worker"
        )

    def conclude(self, *, failed: bool, cut: bool) -> None:
        """Take note of how the end came about (rule 5)."""
        if failed:
            # Who has not heard of it yet hears it, too.
            self._last_word = self._last_error
            self._errors.clear()
        elif not cut:
            self._last_word = InvalidArgumentError(
                "Cross-trainer caching requires the input dataset to be infinite. However, it "
                f"reached the end of sequence, after {self._elements} elements. End the dataset "
                "with `repeat()`, or read it without `cross_trainer_cache`"
            )

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
        newest = self._newest
        touched = 0 if newest is None else max(newest.touched, newest.done_to)
        left = Left(
            elements=0,
            unacknowledged=sum(portion.count for portion in self._delivery.portions()),
            touched=first(self._units_at_end if self._exhausted else touched),
        )
        self._refusal = refusal
        self._window.clear()
        waiting, self._waiting = self._waiting, {}
        return [(request, refusal) for request, _ in waiting.values()], left

    def depart(self, client_id: str) -> tuple[list[tuple[R, Answer]], Departure]:
        """Take note that a client is gone: nothing of it is dealt again. May be called twice."""
        self._departed.add(client_id)
        self._readers.pop(client_id, None)
        waiting = [who for who in self._waiting if who[0] == client_id]
        answers: list[tuple[R, Answer]] = [
            (self._waiting.pop(who)[0], _departed(client_id)) for who in waiting
        ]
        self._delivery.forget(client_id)
        return [*answers, *self._due()], Departure(units=(), lost=())

    def forget(self, client_id: str) -> list[tuple[R, Answer]]:
        """Take note that the dispatcher has heard of a client that is gone."""
        return []

    def forget_silent(self, now: float) -> tuple[list[tuple[R, Answer]], int]:
        """Drop what silent clients hold; return the answers, and how many elements that is.

        Their trainers hear of it, if they come again.
        """
        held = {client_id: self._delivery.given_to(client_id) for client_id in self._readers}
        lost = self._delivery.forget_silent(now, self._bounds.silence)
        if not lost:
            return [], 0
        for client_id, portions in held.items():
            if portions and not self._delivery.given_to(client_id):
                count = sum(portion.count for portion in portions)
                self._readers[client_id].unsaid += count
                self._readers[client_id].skipped += count
        return self._due(), sum(portion.count for portion in lost)

    # --- rules ----------------------------------------------------------------------------------

    def _due(self) -> list[tuple[R, Answer]]:
        answers: list[tuple[R, Answer]] = []
        for who in list(self._waiting):
            content = self._next_for(who)
            if content is None:
                continue
            request, _ = self._waiting.pop(who)
            if isinstance(content, Portion):
                self._delivery.give(*who, content, content.size)
            answers.append((request, content))
        return answers

    def _next_for(self, who: tuple[str, int]) -> Portion | GetElementsReply | None:
        """Return what a request gets now; None: it waits."""
        client_id, _ = who
        trainer = self._readers[client_id]
        missed = self._window.catch_up(trainer.place)
        trainer.skipped += missed
        trainer.unsaid += missed
        if not self._window.is_at_end(trainer.place):
            return self._read_on(who, trainer) if self._may_have_more(client_id) else None
        if self._errors and self._may_have_more(client_id):
            return self._errors.popleft()
        return self._end_for(client_id, trainer) if self._exhausted else None

    def _read_on(self, who: tuple[str, int], trainer: _Trainer) -> Portion:
        portion = self._window.take(trainer.place, self._waiting[who][1])
        trainer.given += portion.count
        if trainer.unsaid:
            portion = replace(portion, mode=SkippedElements(count=trainer.unsaid))
            trainer.unsaid = 0
        if self._newest is None or portion.first >= self._newest.first:
            self._newest = portion
        return portion

    def _end_for(self, client_id: str, trainer: _Trainer) -> Portion | GetElementsReply | None:
        """Return what somebody gets who has read all there is; None: it waits."""
        if not self._has_heard(trainer):
            trainer.was_told = True
            return Portion(first=self._elements, error=self._last_word)
        held, _ = self._delivery.held_by(client_id)
        if not (held or self._finished):
            return None
        return GetElementsReply(
            first_element=self._elements,
            num_elements=0,
            end_of_task=self._finished and not held,
            done_from=self._units,
            done_to=self._units_at_end,
            delivered_end=max(self._touched, self._units_at_end),
            earlier_delivered_end=self._touched,
        )

    def _may_have_more(self, client_id: str) -> bool:
        portions, size = self._delivery.held_by(client_id)
        return portions < 2 or size < self._bounds.client_bytes


def _as_ours(error: Exception) -> HeadraceError:
    return error if isinstance(error, HeadraceError) else HeadraceError(str(error))


def _nameless(message: GetElements) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"client {message.client_id} reads a task that trainers share, and names no trainer: set "
        "`cross_trainer_cache=CrossTrainerCache(trainer_id)`"
    )


def _departed(client_id: str) -> CancelledError:
    return CancelledError(
        f"client {client_id} closed its iteration, or was silent for so long that it counts as "
        "gone; iterate over the dataset again"
    )


# --------------------------------------------------------------------------------------------------
# The sliding window of a task that trainers share: the newest portions, within so many bytes

# Places in it are numbers of portions, from the first that was ever made; a reader's place may fall
# behind the window's start, and is then moved there.

_MOST_PORTIONS = 1 << 18

"""What is known of a portion takes about a kilobyte, however small its elements are."""


@dataclass
class Place:
    """Where a reader stands."""

    index: int = 0
    """Number of the portion that it reads next."""
    row: int = 0
    """How many elements of that it had."""
    element: int = 0
    """The task's number of the next element."""


class Window:
    """The newest portions of a task.

    Args:
        most_bytes: What they may take together.
        most: How many they may be.
    """

    def __init__(self, most_bytes: int, most: int = _MOST_PORTIONS) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._portions: deque[Portion] = deque()
        #: The sum of their bytes.
        self.bytes = 0
        #: Number of the oldest portion that is here, and of its first element.
        self._start = 0
        self._start_element = 0
        #: The task's number of the element after the last one.
        self._end_element = 0

    @property
    def elements(self) -> int:
        """Number of elements that are here."""
        return self._end_element - self._start_element

    def __len__(self) -> int:
        return len(self._portions)

    def has_room_for(self, portion: Portion) -> bool:
        """Whether a portion fits at all."""
        return portion.size <= self._most_bytes

    def add(self, portion: Portion) -> None:
        """Add the next portion, for which the oldest leave as far as need be."""
        assert portion.count, "a portion without elements"
        while self._portions and (
            self.bytes + portion.size > self._most_bytes or len(self._portions) >= self._most
        ):
            gone = self._portions.popleft()
            self.bytes -= gone.size
            self._start += 1
            self._start_element = gone.first + gone.count
        if not self._portions:
            self._start_element = portion.first
        self._portions.append(portion)
        self.bytes += portion.size
        self._end_element = portion.first + portion.count

    def clear(self) -> None:
        """Let all portions go."""
        self._start += len(self._portions)
        self._start_element = self._end_element
        self._portions.clear()
        self.bytes = 0

    # --- readers --------------------------------------------------------------------------------

    def beginning(self) -> Place:
        """Return where a new reader begins: at the oldest element that is here."""
        return Place(index=self._start, element=self._start_element)

    def is_at_end(self, place: Place) -> bool:
        """Whether the next element of a place was not made yet."""
        return place.index >= self._start + len(self._portions)

    def catch_up(self, place: Place) -> int:
        """Move a place that fell behind to the oldest element; return how many it did not get."""
        if place.index >= self._start:
            return 0
        missed = self._start_element - place.element
        place.index, place.row, place.element = self._start, 0, self._start_element
        return missed

    def take(self, place: Place, most: int) -> Portion:
        """Return the next elements of a place that is not at the end, and move it after them.

        Args:
            place: Not behind the window.
            most: How many elements may come; 0: as many as were made together.
        """
        portion = self._portions[place.index - self._start]
        left = portion.count - place.row
        count = min(left, most) if most else left
        taken = part_of(portion, place.row, place.row + count)
        place.element = taken.first + taken.count
        if count == left:
            place.index, place.row = place.index + 1, 0
        else:
            place.row += count
        return taken


def part_of(portion: Portion, start: int, stop: int) -> Portion:
    """Return elements `start` to `stop` - 1 of a portion, which is cut when it is sent."""
    if (start, stop) == (0, portion.count):
        return portion
    is_last = stop == portion.count
    return Portion(
        first=portion.first + start,
        count=stop - start,
        buffers=portion.buffers,
        size=max(1, portion.size * (stop - start) // portion.count),
        done_from=portion.done_from,
        done_to=portion.done_to if is_last else portion.done_from,
        touched=portion.touched,
        begun=portion.begun,
        index=portion.index,
        rows=(start, stop),
        is_shared=portion.is_shared,
    )
