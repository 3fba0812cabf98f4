"""Turns: which tasks are to be looked at, and what each of them asks when its turn has come.

Of a thousand tasks, most wait in line at any time, or for their answers. One is looked at when
something happened to it, when the time has come to which it was put off, and when it stands first
in line for credit (`schedule`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.service.client.schedule import Budget
from headrace.service.client.task import Task

__all__ = ["Turn", "Turns"]

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
