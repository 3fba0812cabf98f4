"""Which tasks are looked at, and what each of them asks: events and times in, numbers out."""

from __future__ import annotations

import math

from headrace.errors import UnavailableError
from headrace.service.client.request_scheduler import RequestBudget, RequestScheduler
from headrace.service.client.task_reader import TaskReader
from headrace.service.messages import GetElementsReply, TaskAddress


class Reading:
    """Some tasks with their turns."""

    def __init__(self, *task_ids: int, limit: int = 16, window: int = 1) -> None:
        self.budget = RequestBudget(limit, window=window)
        self.turns = RequestScheduler(self.budget)
        self.tasks: dict[int, TaskReader] = {}
        for task_id in task_ids:
            address = TaskAddress(
                task_id=task_id, worker_id="w", worker_address="w:1", task_token="ticket"
            )
            self.turns.add(task_id)
            self.tasks[task_id] = TaskReader(address)
        self.wake_in = 0.0

    def take(self, now: float = 0.0) -> list[tuple[int, int]]:
        """Return the tasks that ask now, with the numbers."""
        turn = self.turns.plan_requests(self.tasks, now)
        self.wake_in = turn.wake_in
        return [(task.address.task_id, number) for task, number in turn.requests]

    def answer(self, task_id: int, number: int) -> None:
        """Let an answer come whose turn it is, with an element."""
        answer = GetElementsReply(first_element=number, num_elements=1, end_of_task=False)
        task = self.tasks[task_id]
        for due, (elements, _) in task.window.accept(number, (answer, None)):
            self.turns.reply_received(task_id, due)
            assert elements is not None
            task.accept(due, elements)
        self.turns.task_changed(task_id)

    def use_up(self, task_id: int, number: int) -> None:
        self.tasks[task_id].consume(number)
        self.turns.reply_consumed(task_id, number)


def test_a_task_requests_at_start_and_after_consumption() -> None:
    reading = Reading(1, 2)
    assert reading.take() == [(1, 0), (2, 0)]
    assert reading.take() == []
    reading.answer(2, 0)
    assert reading.take() == []
    reading.use_up(2, 0)
    assert reading.take() == [(2, 1)]
    assert reading.wake_in == math.inf


def test_released_credit_goes_to_the_longest_waiting_task() -> None:
    reading = Reading(1, 2, 3, limit=1)
    assert reading.take() == [(1, 0)]
    assert reading.wake_in == 0.25
    reading.answer(1, 0)
    reading.use_up(1, 0)
    assert reading.take() == [(2, 0)]


def test_a_delayed_task_is_examined_after_its_delay() -> None:
    reading = Reading(1)
    assert reading.take() == [(1, 0)]
    reading.tasks[1].retry_later(0, now=0.0)
    reading.turns.task_changed(1)
    assert reading.take() == []
    assert reading.wake_in == 0.1
    assert reading.take(now=0.05) == []
    assert reading.take(now=0.1) == [(1, 0)]


def test_after_a_lost_connection_only_unanswered_requests_are_resent() -> None:
    reading = Reading(1, window=2)
    assert reading.take() == [(1, 0), (1, 1)]
    reading.tasks[1].disconnected(UnavailableError("refused"), now=0.0)
    reading.answer(1, 0)
    reading.use_up(1, 0)
    assert reading.take(now=0.5) == [(1, 1)]


def test_other_tasks_use_the_credit_of_a_removed_task() -> None:
    reading = Reading(1, 2, limit=2, window=2)
    assert reading.take() == [(1, 0), (2, 0)]
    del reading.tasks[1]
    reading.turns.remove(1)
    assert reading.take() == [(2, 1)]


def test_an_owed_acknowledgement_repeats_the_request() -> None:
    reading = Reading(1)
    reading.take()
    reading.answer(1, 0)
    reading.use_up(1, 0)
    assert reading.take() == [(1, 1)]
    # A second answer that came early is used up: the request that is out says nothing of it.
    reading.tasks[1].window.allocate()
    reading.answer(1, 1)
    reading.use_up(1, 1)
    reading.turns.task_changed(1)
    assert reading.tasks[1].has_unsent_acknowledgement
    reading.budget.request_sent(1, 2, 0.0)
    assert reading.take(now=0.1) == []
    assert reading.wake_in == 0.5
    assert reading.take(now=0.6) == [(1, 2)]


def test_an_owed_acknowledgement_is_sent_after_a_reconnect() -> None:
    reading = Reading(1, limit=3, window=3)
    assert reading.take() == [(1, 0), (1, 1), (1, 2)]
    reading.answer(1, 0)
    reading.answer(1, 1)
    # The shares of credit become smaller.
    reading.turns.add(2)
    reading.turns.add(3)
    reading.tasks[1].disconnected(UnavailableError("gone"), 0.0)
    reading.turns.task_changed(1)
    assert reading.take(now=0.1) == [(1, 2)]
    # The worker does not reply to it before it receives the acknowledgement.
    reading.use_up(1, 0)
    reading.use_up(1, 1)
    assert reading.take(now=0.2) == []
    assert reading.take(now=0.7) == [(1, 2)]
    assert reading.take(now=9.0) == []


def test_a_delayed_request_answered_meanwhile_is_not_resent() -> None:
    reading = Reading(1)
    reading.take()
    reading.tasks[1].retry_later(0, 0.0)
    reading.turns.task_changed(1)
    assert reading.take() == []
    reading.answer(1, 0)  # it was under way twice
    assert reading.take(now=0.2) == []
    reading.use_up(1, 0)
    assert reading.take(now=0.3) == [(1, 1)]
