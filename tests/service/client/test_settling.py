"""What the dispatcher is to hear of tasks, and in which order."""

from __future__ import annotations

from headrace.service.client.receipt import Receipt
from headrace.service.client.settling import Settling
from headrace.service.client.task import Task
from headrace.service.messages import (
    GetElementsReply,
    ReportDelivery,
    ReportUnreachable,
    TaskAddress,
)

ONE_UNIT = GetElementsReply(
    first_element=0, num_elements=2, end_of_task=False, done_from=0, done_to=1, delivered_end=1
)


def task_with(*answers: GetElementsReply) -> Task:
    """Return a task of which answers arrived and are in use."""
    task = Task(TaskAddress(task_id=5, worker_id="w", worker_address="w:1", task_token="t"))
    for number, answer in enumerate(answers):
        task.receive(number, answer)
    return task


def said(settling: Settling) -> list[tuple[int, bool]]:
    calls = [call for call in settling.calls() if isinstance(call, ReportDelivery)]
    return [(call.task_id, call.consumed) for call in calls]


def settling_of(task: Task) -> Settling:
    settling = Settling("c")
    settling.begin(5, task.arrived)
    return settling


def test_what_arrived_of_a_lost_task_is_said_before_that_it_was_used() -> None:
    task = task_with(ONE_UNIT)
    settling = settling_of(task)
    settling.lose(5, task)
    settling.use_up(5, 0)
    assert said(settling) == [(5, False)]
    assert said(settling) == [(5, False)], "it is said again until it is answered"
    (arrived,) = settling.calls()
    assert isinstance(arrived, ReportDelivery)
    assert arrived.delivered == ((0, 1),)
    settling.said(arrived)
    assert not settling.is_unsettled
    (used,) = settling.calls()
    assert isinstance(used, ReportDelivery)
    assert (used.consumed, used.delivered) == (True, ((0, 1),))
    settling.said(used)
    assert settling.calls() == []


def test_what_is_in_use_of_a_lost_task_is_not_said_to_be_used() -> None:
    task = task_with(ONE_UNIT)
    settling = settling_of(task)
    settling.lose(5, task)
    (arrived,) = settling.calls()
    assert isinstance(arrived, ReportDelivery)
    settling.said(arrived)
    assert settling.calls() == []
    settling.use_up(5, 0)
    assert said(settling) == [(5, True)]


def test_of_a_lost_task_that_was_never_read_nothing_arrived() -> None:
    settling = Settling("c")
    settling.lose(5, None)
    (call,) = settling.calls()
    assert isinstance(call, ReportDelivery)
    assert (call.delivered, call.partially_delivered, call.consumed) == ((), (), False)


def test_of_a_task_that_is_over_it_is_said_that_what_came_was_used_once_it_is() -> None:
    task = task_with(ONE_UNIT)
    settling = settling_of(task)
    settling.finish(5, task)
    assert settling.calls() == []
    settling.use_up(5, 0)
    assert said(settling) == [(5, True)]


def test_a_worker_that_cannot_be_reached_is_reported_until_its_task_is_over() -> None:
    settling = Settling("c")
    settling.begin(5, Receipt())
    settling.cannot_reach(5, refused=True)
    report = ReportUnreachable(client_id="c", task_id=5, connection_refused=True)
    assert settling.calls() == [report]
    assert settling.is_urgent
    settling.finish(5, task_with())
    assert settling.calls() == []
    assert not settling.is_urgent


def test_who_leaves_says_what_it_used_of_each_task_and_nothing_of_the_rest() -> None:
    whole, begun = task_with(ONE_UNIT), task_with(ONE_UNIT)
    settling = Settling("c")
    settling.begin(5, whole.arrived)
    settling.begin(6, begun.arrived)
    whole.use_up(0)
    words = settling.last_words({5: whole, 6: begun}, None)
    assert [(word.task_id, word.consumed, word.delivered) for word in words] == [
        (5, True, ((0, 1),))
    ]
    words = settling.last_words({6: begun}, (6, 0, 1))
    assert [(word.task_id, word.partially_delivered) for word in words] == [
        (5, ((0, 1),)),
        (6, ((0, 1),)),
    ]
