"""Request scheduling: the number of requests in flight, and which task may send the next one.

Rule 1. Over all tasks, unanswered requests and unconsumed replies do not exceed the budget, except
    that credit of a task that has kept others waiting for long is lent to them.
Rule 2. Tasks without credit receive it in the order of their denied requests.
Rule 3. If elements are counted, a request states the maximum number of elements in its reply, and
    these use credit from the request until they are consumed. Credit is then lent only if there are
    more tasks than elements.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from headrace.service.client.task_reader import TaskReader

__all__ = ["MAX_REQUESTS", "RequestBudget", "RequestPlan", "RequestScheduler"]


MAX_REQUESTS = 16
"""Maximum of unanswered requests plus unconsumed replies, if elements are not counted."""


class RequestBudget:
    """Credit for requests, shared by the tasks of a reader.

    Args:
        limit: Maximum of unanswered requests plus unconsumed replies over all tasks.
        window: Maximum for one task.
        lend_after: Seconds after which the credit of an unanswered request is lent to other tasks.
        counts_elements: Whether the limit counts elements instead of requests and replies.
    """

    def __init__(
        self,
        limit: int,
        window: int = 3,
        lend_after: float = 0.5,
        *,
        counts_elements: bool = False,
    ) -> None:
        self._limit = limit
        self._counts_elements = counts_elements
        #: Number of elements that each reply may have or had; a missing entry means one.
        self._elements: dict[tuple[Hashable, int], int] = {}
        self._window = window
        self._lend_after = lend_after
        #: Outstanding requests of each task, and whether each is answered.
        self._outstanding: dict[Hashable, dict[int, bool]] = {}
        #: Credit used by answered requests, over all tasks.
        self._unconsumed = 0
        #: Send times of unanswered requests, oldest first, without those whose credit is lent.
        self._sent_at: dict[tuple[Hashable, int], float] = {}
        #: Tasks without credit whose request was denied, longest wait first.
        self._waiting: dict[Hashable, None] = {}
        #: Tasks with credit below their limit that were denied more.
        self._wanting_more: dict[Hashable, None] = {}

    @property
    def per_task_limit(self) -> int:
        """Current maximum for one task."""
        return max(1, min(self._window, self._limit // max(1, len(self._outstanding))))

    @property
    def tasks(self) -> list[Any]:
        """All tasks, oldest first."""
        return list(self._outstanding)

    @property
    def is_short(self) -> bool:
        """Whether a task was denied credit and may be lent some later."""
        return bool(self._waiting or self._wanting_more)

    def add(self, task: Hashable) -> None:
        """Add a task."""
        self._outstanding.setdefault(task, {})

    def remove(self, task: Hashable) -> None:
        """Remove a task and release its credit."""
        for number in list(self._outstanding.get(task, ())):
            self.reply_consumed(task, number)
        self._outstanding.pop(task, None)
        self.withdraw(task)

    def can_request(self, task: Hashable, now: float) -> bool:
        """Return whether the task may send a request now; if not, it waits in line."""
        num_outstanding = len(self._outstanding[task])
        if num_outstanding >= self.per_task_limit:
            self._wanting_more.pop(task, None)
            return False
        if self._available(task, now) > 0:
            self.withdraw(task)
            return True
        (self._wanting_more if num_outstanding else self._waiting).setdefault(task)
        return False

    def _available(self, task: Hashable, now: float) -> int:
        """Return the credit available to the task, less what earlier tasks wait for."""
        available = self._limit - self._unconsumed - self._count_sent(now)
        num_others = len(self._waiting) - (task in self._waiting)
        is_next = not num_others or next(iter(self._waiting)) == task
        return available if is_next else available - num_others

    def tasks_to_serve(self, now: float) -> list[Any]:
        """Return the waiting tasks that credit is available for."""
        available = max(0, self._limit - self._unconsumed - self._count_sent(now))
        return [*islice(self._waiting, available), *islice(self._wanting_more, available)]

    def withdraw(self, task: Hashable) -> None:
        """Remove a task from the waiting lines."""
        self._waiting.pop(task, None)
        self._wanting_more.pop(task, None)

    def _count_sent(self, now: float) -> int:
        """Return the credit of unanswered requests, except those whose credit is lent."""
        may_lend = not self._counts_elements or len(self._outstanding) > self._limit
        lend_after = self._lend_after if may_lend else math.inf
        while self._sent_at:
            oldest = next(iter(self._sent_at))
            if now - self._sent_at[oldest] <= lend_after:
                break
            del self._sent_at[oldest]
        return sum([self._elements.get(request, 1) for request in self._sent_at])

    def max_elements(self, task: Hashable, number: int) -> int:
        """Return the maximum number of elements in the reply to a request; 0 means no limit."""
        return self._elements.get((task, number), 1) if self._counts_elements else 0

    def request_sent(self, task: Hashable, number: int, now: float) -> None:
        """Record that a request was sent."""
        if self._counts_elements:
            fair_share = max(1, self._limit // (self.per_task_limit * len(self._outstanding)))
            self._elements[task, number] = max(1, min(fair_share, self._available(task, now)))
        self._outstanding[task][number] = False
        self._sent_at[task, number] = now

    def reply_received(self, task: Hashable, number: int, count: int = 1) -> None:
        """Record a reply, which counts until it is consumed.

        Args:
            task: Task of the request.
            number: Number of the request.
            count: Number of elements in the reply; an error counts as one.
        """
        if self._outstanding.get(task, {}).get(number) is False:
            if self._counts_elements:
                self._elements[task, number] = max(1, count)
            self._outstanding[task][number] = True
            self._unconsumed += self._elements.get((task, number), 1)
            self._sent_at.pop((task, number), None)

    def reply_consumed(self, task: Hashable, number: int) -> None:
        """Release the credit of a reply. Idempotent, also for removed tasks."""
        credit = self._elements.pop((task, number), 1)
        if self._outstanding.get(task, {}).pop(number, False):
            self._unconsumed -= credit
        self._sent_at.pop((task, number), None)


# --------------------------------------------------------------------------------------------------
# Request planning: which tasks to examine, and which requests they send

# Most of a thousand tasks are waiting for credit or replies at any time. A task is examined only
# after a change, when its delay has passed, and when credit for it becomes available.

_ACKNOWLEDGE_SECONDS = 0.5
"""Seconds without a reply after which a task repeats a request whose worker does not know yet that
its replies were consumed. The worker may be waiting for that, and only requests acknowledge.
"""

_LEND_CHECK_SECONDS = 0.25
"""Seconds between checks while a task waits for credit that may be lent to it."""


@dataclass
class RequestPlan:
    """Requests to send now."""

    requests: list[tuple[TaskReader, int]] = field(default_factory=list)
    """Tasks with the numbers of their requests."""
    wake_in: float = math.inf
    """Seconds until the next check."""

    def wake_within(self, seconds: float) -> None:
        """Check again within this many seconds."""
        self.wake_in = min(self.wake_in, seconds)


class RequestScheduler:
    """Decides which tasks of a reader send requests.

    Args:
        budget: Credit for outstanding requests.
    """

    def __init__(self, budget: RequestBudget) -> None:
        self._budget = budget
        #: Tasks that changed, in order of the changes.
        self._changed: dict[int, None] = {}
        #: Tasks that may be sent requests; None allows all.
        self._allowed_tasks: set[int] | None = None
        #: Tasks that wait until a certain time.
        self._delayed: set[int] = set()

    # --- inputs -----------------------------------------------------------------------------------

    def add(self, task_id: int) -> None:
        """Add a task. Idempotent."""
        self._budget.add(task_id)
        self.task_changed(task_id)

    def task_changed(self, task_id: int) -> None:
        """Record that a task changed and must be examined."""
        self._changed[task_id] = None

    def reply_received(self, task_id: int, number: int, count: int = 1) -> None:
        """Record a reply with this many elements."""
        self._budget.reply_received(task_id, number, count)

    def max_elements(self, task_id: int, number: int) -> int:
        """Return the maximum number of elements in the reply to a request; 0 means no limit."""
        return self._budget.max_elements(task_id, number)

    def reply_consumed(self, task_id: int, number: int) -> None:
        """Record that a reply was consumed completely. Idempotent."""
        self._budget.reply_consumed(task_id, number)
        self.task_changed(task_id)

    def remove(self, task_id: int) -> None:
        """Remove a task; other tasks may use its credit."""
        limit_before = self._budget.per_task_limit
        self._budget.remove(task_id)
        self._delayed.discard(task_id)
        if self._budget.per_task_limit > limit_before:
            self._changed.update(dict.fromkeys(self._budget.tasks))

    def restrict(self, task_ids: set[int] | None) -> bool:
        """Restrict requests to some tasks, None for all; return whether that changes anything."""
        if task_ids == self._allowed_tasks:
            return False
        self._allowed_tasks = task_ids
        self._changed.update(dict.fromkeys(self._budget.tasks))
        return True

    # --- results ----------------------------------------------------------------------------------

    def plan_requests(self, tasks: Mapping[int, TaskReader], now: float) -> RequestPlan:
        """Return the requests to send now, which count as sent.

        Args:
            tasks: Tasks that are being read, by ID.
            now: Current time.
        """
        plan = RequestPlan()
        waiting_tasks = self._budget.tasks_to_serve(now)
        for task_id in list(dict.fromkeys((*self._changed, *self._delayed, *waiting_tasks))):
            task = tasks.get(task_id)
            if task is not None:
                self._plan_task(task, now, plan)
            self._changed.pop(task_id, None)
        if self._budget.is_short:
            plan.wake_within(_LEND_CHECK_SECONDS)
        return plan

    def _plan_task(self, task: TaskReader, now: float, plan: RequestPlan) -> None:
        task_id = task.address.task_id
        if now < task.retry_at:
            self._budget.withdraw(task_id)
            self._delay(task_id, task.retry_at - now, plan)
            return
        self._delayed.discard(task_id)
        task.resume()
        while not task.is_ending and task.can_request_more:
            if task.connection_error and task.unsent:
                self._budget.withdraw(task_id)
                break  # probe with one request
            if self._allowed_tasks is not None and task_id not in self._allowed_tasks:
                self._budget.withdraw(task_id)
                break
            if not self._budget.can_request(task_id, now):
                break
            number = task.new_request()
            self._budget.request_sent(task_id, number, now)
        else:
            self._budget.withdraw(task_id)
        if task.has_unsent_acknowledgement and not task.unsent and not task.is_ending:
            # Also if nothing arrived since the connection was lost: the worker may be waiting for
            # it.
            if task.is_draining or now - task.sent_at >= _ACKNOWLEDGE_SECONDS:
                task.repeat_last()
            else:
                self._delay(task_id, _ACKNOWLEDGE_SECONDS, plan)
        plan.requests += [(task, number) for number in task.take_unsent(now)]

    def _delay(self, task_id: int, seconds: float, plan: RequestPlan) -> None:
        self._delayed.add(task_id)
        plan.wake_within(seconds)
