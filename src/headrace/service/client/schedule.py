"""Schedule: how many requests may be under way, and who is first in line for more.

Rule 1. Over all tasks, requests without an answer and answers not used up are no more than the
        budget, except that a task that has made others wait for long lends them what it holds.
Rule 2. Tasks without any credit get it in the order in which they asked.
Rule 3. Where elements are counted, a request says how many may come with it, and they count from
        the request until they are used up. Then nobody is lent anything, unless there are more
        tasks than elements.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from headrace.service.client.task import Task

__all__ = ["MOST_REQUESTS", "Budget", "Turn", "Turns"]


MOST_REQUESTS = 16

"""Over all workers, where elements are not counted."""


class Budget:
    """Credit for requests, shared by the tasks of a reader.

    Args:
        limit: Requests and unused answers that may be outstanding over all tasks.
        window: The most for one task.
        patience: Seconds after which an unanswered request no longer keeps others waiting.
        counts_elements: Whether the limit is of elements, which come with requests and answers.
    """

    def __init__(
        self,
        limit: int,
        window: int = 3,
        patience: float = 0.5,
        *,
        counts_elements: bool = False,
    ) -> None:
        self._limit = limit
        self._counts_elements = counts_elements
        #: Of each request how many elements may come with it, or came; none: it counts for one.
        self._elements: dict[tuple[Hashable, int], int] = {}
        self._window = window
        self._patience = patience
        #: Per task: its outstanding requests, and whether each is answered.
        self._outstanding: dict[Hashable, dict[int, bool]] = {}
        #: How much is answered, over all tasks.
        self._answered = 0
        #: When each of the others was sent, the oldest first; less those that wait for too long.
        self._sent: dict[tuple[Hashable, int], float] = {}
        #: Tasks without any credit that asked in vain, longest first.
        self._waiting: dict[Hashable, None] = {}
        #: Tasks with some that asked for more in vain, though it was not more than their share.
        self._wishing: dict[Hashable, None] = {}

    @property
    def share(self) -> int:
        """The most for each task at present."""
        return max(1, min(self._window, self._limit // max(1, len(self._outstanding))))

    @property
    def tasks(self) -> list[Any]:
        """All tasks, the oldest first."""
        return list(self._outstanding)

    @property
    def is_short(self) -> bool:
        """Whether a task asked in vain, and may be lent credit with time."""
        return bool(self._waiting or self._wishing)

    def add(self, task: Hashable) -> None:
        """Take note of a task."""
        self._outstanding.setdefault(task, {})

    def remove(self, task: Hashable) -> None:
        """Forget a task, and give back what it holds."""
        for number in list(self._outstanding.get(task, ())):
            self.used_up(task, number)
        self._outstanding.pop(task, None)
        self.withdraw(task)

    def may_ask(self, task: Hashable, now: float) -> bool:
        """Whether the task may send a request now; one that may not, waits in line."""
        own = len(self._outstanding[task])
        if own >= self.share:
            self._wishing.pop(task, None)
            return False
        if self._room(task, now) > 0:
            self.withdraw(task)
            return True
        (self._wishing if own else self._waiting).setdefault(task)
        return False

    def _room(self, task: Hashable, now: float) -> int:
        """Return how much may come with a request of the task, as far as others leave it."""
        room = self._limit - self._answered - self._count_sent(now)
        others = len(self._waiting) - (task in self._waiting)
        first_in_line = not others or next(iter(self._waiting)) == task
        return room if first_in_line else room - others

    def served(self, now: float) -> list[Any]:
        """Return tasks that asked in vain, as many as may be given something now."""
        room = max(0, self._limit - self._answered - self._count_sent(now))
        return [*islice(self._waiting, room), *islice(self._wishing, room)]

    def withdraw(self, task: Hashable) -> None:
        """Take note that a task wants nothing now."""
        self._waiting.pop(task, None)
        self._wishing.pop(task, None)

    def _count_sent(self, now: float) -> int:
        """Return how much may come with requests, except for those that have waited for long."""
        lends = not self._counts_elements or len(self._outstanding) > self._limit
        patience = self._patience if lends else math.inf
        while self._sent:
            oldest = next(iter(self._sent))
            if now - self._sent[oldest] <= patience:
                break
            del self._sent[oldest]
        return sum([self._elements.get(each, 1) for each in self._sent])

    def most(self, task: Hashable, number: int) -> int:
        """Return how many elements may come with a request; 0: as many as are at hand."""
        return self._elements.get((task, number), 1) if self._counts_elements else 0

    def asked(self, task: Hashable, number: int, now: float) -> None:
        """Take note that the request was sent."""
        if self._counts_elements:
            portion = max(1, self._limit // (self.share * len(self._outstanding)))
            self._elements[task, number] = max(1, min(portion, self._room(task, now)))
        self._outstanding[task][number] = False
        self._sent[task, number] = now

    def answered(self, task: Hashable, number: int, count: int = 1) -> None:
        """Take note that its answer has come: from now on it counts until it is used up.

        Args:
            task: Whose.
            number: Of the request.
            count: How many elements came with it; an error is like an element.
        """
        if self._outstanding.get(task, {}).get(number) is False:
            if self._counts_elements:
                self._elements[task, number] = max(1, count)
            self._outstanding[task][number] = True
            self._answered += self._elements.get((task, number), 1)
            self._sent.pop((task, number), None)

    def used_up(self, task: Hashable, number: int) -> None:
        """Give the credit back. May be said twice, and for a task that is gone."""
        counted = self._elements.pop((task, number), 1)
        if self._outstanding.get(task, {}).pop(number, False):
            self._answered -= counted
        self._sent.pop((task, number), None)


# --------------------------------------------------------------------------------------------------
# Turns: which tasks are to be looked at, and what each of them asks when its turn has come

# Of a thousand tasks, most wait in line at any time, or for their answers. One is looked at when
# something happened to it, when the time has come to which it was put off, and when it stands first
# in line for credit (`schedule`).

_OWED_SECONDS = 0.5

"""Seconds without an answer after which a task repeats a request, if its worker has not heard that
what it sent is used up: for that it may wait, and requests are what says so."""

_BUDGET_SECONDS = 0.25

"""How soon to look again while a task waits for credit that others may lend it with time."""


@dataclass
class Turn:
    """What is to be asked now."""

    asks: list[tuple[Task, int]] = field(default_factory=list)
    """Tasks, with the numbers of the requests to send."""
    wake_in: float = math.inf
    """Seconds after which to look again."""

    def wake_within(self, seconds: float) -> None:
        """Look again after so many seconds, or before."""
        self.wake_in = min(self.wake_in, seconds)


class Turns:
    """The tasks of a reader, as far as it is about whose turn it is.

    Args:
        budget: How many requests may be outstanding.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        #: Something happened to these, in this order.
        self._touched: dict[int, None] = {}
        #: Those that may be asked; None: all.
        self._allowed: set[int] | None = None
        #: These wait for some time.
        self._put_off: set[int] = set()

    # --- what happens ---------------------------------------------------------------------------

    def add(self, task_id: int) -> None:
        """Take note of a task. May be said twice."""
        self._budget.add(task_id)
        self.touch(task_id)

    def touch(self, task_id: int) -> None:
        """Take note that something happened to a task."""
        self._touched[task_id] = None

    def answered(self, task_id: int, number: int, count: int = 1) -> None:
        """Take note that an answer has come, with so many elements."""
        self._budget.answered(task_id, number, count)

    def most(self, task_id: int, number: int) -> int:
        """Return how many elements may come with a request; 0: as many as are at hand."""
        return self._budget.most(task_id, number)

    def used_up(self, task_id: int, number: int) -> None:
        """Take note that nothing of an answer is left. May be said twice."""
        self._budget.used_up(task_id, number)
        self.touch(task_id)

    def remove(self, task_id: int) -> None:
        """Forget a task; the others may have what it held."""
        share = self._budget.share
        self._budget.remove(task_id)
        self._put_off.discard(task_id)
        if self._budget.share > share:
            self._touched.update(dict.fromkeys(self._budget.tasks))

    def allow(self, task_ids: set[int] | None) -> bool:
        """Ask none but these tasks from now on, or None: any; return whether that changes."""
        if task_ids == self._allowed:
            return False
        self._allowed = task_ids
        self._touched.update(dict.fromkeys(self._budget.tasks))
        return True

    # --- what follows ---------------------------------------------------------------------------

    def take(self, tasks: Mapping[int, Task], now: float) -> Turn:
        """Return what is to be asked now, which counts as asked.

        Args:
            tasks: Those that are read, by number.
            now: The time.
        """
        turn = Turn()
        in_line = self._budget.served(now)
        for task_id in list(dict.fromkeys((*self._touched, *self._put_off, *in_line))):
            task = tasks.get(task_id)
            if task is not None:
                self._ask(task, now, turn)
            self._touched.pop(task_id, None)
        if self._budget.is_short:
            turn.wake_within(_BUDGET_SECONDS)
        return turn

    def _ask(self, task: Task, now: float, turn: Turn) -> None:
        task_id = task.address.task_id
        if now < task.retry_at:
            self._budget.withdraw(task_id)
            self._wait(task_id, task.retry_at - now, turn)
            return
        self._put_off.discard(task_id)
        task.try_again()
        while not task.ending and task.wants_more:
            if task.problem and task.to_send:
                self._budget.withdraw(task_id)
                break  # one sign of life first
            if self._allowed is not None and task_id not in self._allowed:
                self._budget.withdraw(task_id)
                break
            if not self._budget.may_ask(task_id, now):
                break
            number = task.ask()
            self._budget.asked(task_id, number, now)
        else:
            self._budget.withdraw(task_id)
        if task.owes_word and not task.to_send and not task.ending:
            # Also where nothing came since the connection was lost: nothing may, before that.
            if task.draining or now - task.asked_at >= _OWED_SECONDS:
                task.ask_again()
            else:
                self._wait(task_id, _OWED_SECONDS, turn)
        turn.asks += [(task, number) for number in task.sent(now)]

    def _wait(self, task_id: int, seconds: float, turn: Turn) -> None:
        self._put_off.add(task_id)
        turn.wake_within(seconds)
