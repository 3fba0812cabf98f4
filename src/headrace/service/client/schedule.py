"""Schedule: how many requests may be under way, and whose turn it is.

Rule 1. Over all tasks, requests without an answer and answers not used up are no more than the
        budget, except that a task that has made others wait for long lends them what it holds.
Rule 2. Tasks without any credit get it in the order in which they asked.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Budget"]


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
