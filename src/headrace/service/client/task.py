"""One task, as a client sees it: what was asked, what arrived, and whether its worker answers."""

from __future__ import annotations

from typing import Any

from headrace.errors import UnavailableError
from headrace.service.client.receipt import Receipt
from headrace.service.messages import GetElementsReply, TaskAddress
from headrace.serving.conversation import Window
from headrace.waiting import Backoff

__all__ = ["Task"]

_NOT_NOW_SECONDS = 0.1


class Task:
    """A task that is being read.

    Args:
        address: Where.
    """

    def __init__(self, address: TaskAddress) -> None:
        self.address = address
        self.window: Window[tuple[GetElementsReply | None, Any]] = Window()
        #: Numbers to be sent (again), in order.
        self.to_send: list[int] = []
        #: How often a request was repeated while the one before it waits with the worker, which
        #: answers that one with an AbortedError.
        self._repeated: dict[int, int] = {}
        #: The worker has handed out all that it had, and waits until it is used up.
        self.draining = False
        #: The worker said that nothing is left; answers to other numbers may be under way.
        self.ending = False
        #: Answers that were delivered to the consumer and are not used up.
        self.in_use: dict[int, GetElementsReply] = {}
        self.arrived = Receipt()
        #: What the consumer has used up.
        self.used = Receipt()
        #: When a request was sent last, and up to which number it said that answers are used up.
        self.asked_at = 0.0
        self.said = 0
        #: Not before this time is the worker asked again; 0.0: at any time.
        self.retry_at = 0.0
        self._backoff = Backoff(0.02, longest=1.0)
        #: The connection was lost, and nothing was heard since; how, and since when.
        self.problem: str = ""
        self.problem_since = 0.0
        #: Nothing listens at the worker's address.
        self.refused = False

    @property
    def owes_word(self) -> bool:
        """Whether all requests wait, and none says that the answers before them are used up."""
        window = self.window
        return bool(window.unanswered) and not self.in_use and window.acknowledged > self.said

    @property
    def wants_more(self) -> bool:
        """Whether another request may be of use: one waits with the worker, which has nothing."""
        return not (self.draining and self.window.outstanding)

    # --- what is asked --------------------------------------------------------------------------

    def ask(self) -> int:
        """Return the number of a new request, which is to be sent."""
        number = self.window.ask()
        self.to_send.append(number)
        return number

    def ask_again(self) -> None:
        """Repeat the last request, which waits with the worker: it says what is used up."""
        number = self.window.to_repeat()[-1]
        self._repeated[number] = self._repeated.get(number, 0) + 1
        self.to_send.append(number)

    def sent(self, now: float) -> list[int]:
        """Return the requests to send now, which count as sent: each says what is used up."""
        # One that was put off may have been answered since, where it was under way twice.
        numbers = [number for number in self.to_send if self.window.awaits(number)]
        self.to_send = []
        if numbers:
            self.asked_at, self.said = now, self.window.acknowledged
        return numbers

    # --- the worker -----------------------------------------------------------------------------

    def heard(self) -> None:
        """Take note of a sign of life."""
        if self.problem:
            self.retry_at = 0.0
        self._backoff.reset()
        self.problem = ""

    def aborted(self, number: int, now: float) -> None:
        """Take note that the worker does not answer this request, or not the one it repeats."""
        times = self._repeated.pop(number, 0)
        if times > 1:
            self._repeated[number] = times - 1
        if not times and self.window.awaits(number):
            self.put_off(number, now)

    def put_off(self, number: int, now: float) -> None:
        """Ask again under a number in a moment: the worker cannot answer now."""
        self.to_send.append(number)
        self.retry_at = now + _NOT_NOW_SECONDS

    def disconnected(self, error: UnavailableError, now: float) -> None:
        """Take note that the connection was lost, or could not be made."""
        if not self.problem:
            self.problem, self.problem_since = str(error), now
        self.refused = bool(getattr(error, "refused", False))
        self.to_send = []
        self._repeated.clear()
        self.retry_at = now + next(self._backoff)

    def try_again(self) -> None:
        """Stop waiting for `retry_at`; after a loss, all that is not answered is to be sent."""
        if self.retry_at:
            self.retry_at = 0.0
            if self.problem:
                self.to_send = self.window.to_repeat()

    # --- what arrived ---------------------------------------------------------------------------

    def receive(self, number: int, answer: GetElementsReply) -> bool:
        """Take an answer whose turn has come; return whether it has something for the consumer."""
        self.arrived.add(answer)
        self._repeated.pop(number, None)
        empty = answer.end_of_task or not (answer.num_elements or answer.error)
        if empty or not self.window.is_new(answer.first_element, answer.num_elements):
            return False
        self.in_use[number] = answer
        return True

    def use_up(self, number: int) -> None:
        """Take note that nothing of an answer is left."""
        used = self.in_use.get(number)
        if used is not None:
            # In this order: an interruption in between may repeat it, and not leave it out.
            self.used.add(used)
            self.in_use.pop(number, None)
        self.window.use_up(number)
