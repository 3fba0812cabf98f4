"""Schedule: which requests may be sent to which task, and in what order answers are taken.

Rule 1. A task's requests are numbered 0, 1, 2, ...; answers are taken in that order, each once.
Rule 2. A number is acknowledged when the elements that came under it have been used up.
Rule 3. Over all tasks, requests without an answer and answers not used up are no more than the
        budget, except that a task that has made others wait for long lends them what it holds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Budget", "Window"]

A = TypeVar("A")


class Window(Generic[A]):
    """The requests of one task: numbers out, answers in, in order."""

    def __init__(self) -> None:
        self._next = 0
        #: Sent, and no answer yet.
        self._unanswered: set[int] = set()
        #: Came before an answer with a lower number.
        self._early: dict[int, A] = {}
        #: The number whose answer is taken next.
        self._due = 0
        #: Taken, and not used up.
        self._in_use: set[int] = set()
        #: Elements from this one on have not been seen.
        self._unseen = 0

    @property
    def unanswered(self) -> int:
        """Requests without an answer."""
        return len(self._unanswered)

    @property
    def outstanding(self) -> int:
        """Requests without an answer, and answers not used up."""
        return self._next - self._due + len(self._in_use)

    @property
    def acknowledged(self) -> int:
        """All numbers below this one are done with."""
        return min(self._in_use, default=self._due)

    def ask(self) -> int:
        """Return the number for a new request."""
        number = self._next
        self._next += 1
        self._unanswered.add(number)
        return number

    def to_repeat(self) -> list[int]:
        """Return the numbers to send again after the connection was lost, in order."""
        return sorted(self._unanswered)

    def take(self, number: int, answer: A) -> list[tuple[int, A]]:
        """Return the answers whose turn has come with this one, in order; none for a repeat."""
        if number not in self._unanswered:
            return []
        self._unanswered.discard(number)
        self._early[number] = answer
        due: list[tuple[int, A]] = []
        while self._due in self._early:
            due.append((self._due, self._early.pop(self._due)))
            self._in_use.add(self._due)
            self._due += 1
        return due

    def is_new(self, first: int, count: int) -> bool:
        """Whether elements `first` to `first + count` - 1 of the task are seen for the first time.

        A task hands out its elements in order, so what it hands to one client ascends.
        """
        if count and first < self._unseen:
            return False
        self._unseen = max(self._unseen, first + count)
        return True

    def use_up(self, number: int) -> None:
        """Take note that nothing of the answer to this number is left. May be said twice."""
        self._in_use.discard(number)


class Budget:
    """Credit for requests, shared by the tasks of a reader.

    Args:
        limit: Requests and unused answers that may be outstanding over all tasks.
        window: The most for one task.
        patience: Seconds after which an unanswered request no longer keeps others waiting.
    """

    def __init__(self, limit: int, window: int = 3, patience: float = 0.5) -> None:
        self._limit = limit
        self._window = window
        self._patience = patience
        #: Per task: when each outstanding request was sent (`inf` once it is answered).
        self._outstanding: dict[Hashable, dict[int, float]] = {}
        #: Tasks without any credit that asked in vain, longest first.
        self._waiting: dict[Hashable, None] = {}

    def add(self, task: Hashable) -> None:
        """Take note of a task."""
        self._outstanding.setdefault(task, {})

    def remove(self, task: Hashable) -> None:
        """Forget a task, and give back what it holds."""
        self._outstanding.pop(task, None)
        self._waiting.pop(task, None)

    def may_ask(self, task: Hashable, now: float) -> bool:
        """Whether the task may send a request now; one that may not, waits in line."""
        own = len(self._outstanding[task])
        fair = max(1, min(self._window, self._limit // max(1, len(self._outstanding))))
        if own >= fair:
            return False
        counted = sum(
            1
            for sent in self._outstanding.values()
            for since in sent.values()
            if now - since <= self._patience
        )
        line = [other for other in self._waiting if other != task]
        first_in_line = not line or (task in self._waiting and next(iter(self._waiting)) == task)
        if counted < self._limit and (first_in_line or counted + len(line) < self._limit):
            self._waiting.pop(task, None)
            return True
        if own == 0:
            self._waiting.setdefault(task)
        return False

    def asked(self, task: Hashable, number: int, now: float) -> None:
        """Take note that the request was sent."""
        self._outstanding[task][number] = now

    def answered(self, task: Hashable, number: int) -> None:
        """Take note that its answer has come: from now on it counts until it is used up."""
        sent = self._outstanding.get(task)
        if sent is not None and number in sent:
            sent[number] = float("inf")

    def used_up(self, task: Hashable, number: int) -> None:
        """Give the credit back. May be said twice, and for a task that is gone."""
        self._outstanding.get(task, {}).pop(number, None)
