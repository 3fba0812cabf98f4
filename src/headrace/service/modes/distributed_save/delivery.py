"""The account of a task whose elements are written to files: nobody is handed any.

A way to hand out elements (`hand_out`), in which files take the place of answers: a portion says
which files are whole, and the dispatcher is told until it has heard of them, one portion after
the other.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from headrace.errors import FailedPreconditionError
from headrace.service.messages import GetElements, SavedFile
from headrace.service.ranges import Ranges, first
from headrace.service.worker.hand_out import Bounds, Departure, HandOut, Left
from headrace.service.worker.portion import Answer, Portion

__all__ = ["FileDelivery"]

R = TypeVar("R")

_MAX_UNREPORTED = 3


class FileDelivery(HandOut[R]):
    """Counts files that are whole, and those of which the dispatcher has heard.

    Args:
        bounds: Not used: what is written takes no memory.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        #: What the dispatcher has not heard of: files, and the units that are done with them.
        self._unreported: deque[tuple[tuple[SavedFile, ...], int]] = deque()
        self._report_number = 0
        self._num_done = 0
        #: Units that are done with all that was said or is to be said.
        self._num_written = 0
        self._exhausted = False

    # --- what is the case -----------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether more may be written."""
        return len(self._unreported) < _MAX_UNREPORTED

    @property
    def done(self) -> Ranges:
        """Units, in dealt order, that are in files which count."""
        return first(self._num_done)

    @property
    def may_finish(self) -> bool:
        """Whether the dispatcher has heard of all."""
        return self._exhausted and not self._unreported

    @property
    def is_settled(self) -> bool:
        """Whether the dispatcher has heard of all."""
        return self.may_finish

    @property
    def unheard(self) -> tuple[int, tuple[SavedFile, ...], int] | None:
        """What the dispatcher is to hear next: the number, the files, the units done with them."""
        return (self._report_number, *self._unreported[0]) if self._unreported else None

    # --- what happens ---------------------------------------------------------------------------

    def add(self, portion: Portion) -> list[tuple[R, Answer]]:
        """Take files that are whole."""
        self._queue_report(portion.files, portion.done_to)
        return []

    def exhaust(self, units: int = 0) -> list[tuple[R, Answer]]:
        """Take note that no portion will follow; with the end, `units` units are whole."""
        self._exhausted = True
        if units > self._num_written:
            self._queue_report((), units)
        return []

    def _queue_report(self, files: tuple[SavedFile, ...], done: int) -> None:
        self._num_written = max(self._num_written, done)
        self._unreported.append((files, self._num_written))

    def heard(self, number: int) -> None:
        """Take note that the dispatcher has heard of files."""
        if self._unreported and number == self._report_number:
            self._report_number += 1
            _, self._num_done = self._unreported.popleft()

    def call_off(self, refusal: Exception) -> tuple[list[tuple[R, Answer]], Left]:
        """Say nothing more."""
        self._unreported.clear()
        return [], Left(elements=0, unacknowledged=0, touched=first(self._num_written))

    # --- clients, of which there are none -------------------------------------------------------

    def ask(self, request: R, message: GetElements, now: float) -> list[tuple[R, Answer]]:
        """Refuse a client."""
        error = FailedPreconditionError(f"task {message.task_id} writes files: no client reads it")
        return [(request, error)]

    def finish(self) -> list[tuple[R, Answer]]:
        """Nobody waits for the end."""
        return []

    def depart(self, client_id: str) -> tuple[list[tuple[R, Answer]], Departure]:
        """Nobody was given anything."""
        return [], Departure(units=(), lost=())

    def forget(self, client_id: str) -> list[tuple[R, Answer]]:
        """Nobody was given anything."""
        return []

    def forget_silent(self, now: float) -> tuple[list[tuple[R, Answer]], int]:
        """Nobody was given anything."""
        return [], 0
