"""What the dispatcher is to hear of tasks, and in which order."""

from __future__ import annotations

from headrace.service.client.delivery_record import DeliveryRecord
from headrace.service.client.loss_reporter import LossReporter
from headrace.service.client.task_reader import TaskReader
from headrace.service.messages import (
    GetElementsReply,
    ReportDelivery,
    ReportUnreachable,
    TaskAddress,
)

ONE_UNIT = GetElementsReply(
    first_element=0, num_elements=2, end_of_task=False, done_from=0, done_to=1, delivered_end=1
)


def task_with(*answers: GetElementsReply) -> TaskReader:
    """Return a task of which answers arrived and are in use."""
    task = TaskReader(TaskAddress(task_id=5, worker_id="w", worker_address="w:1", task_token="t"))
    for number, answer in enumerate(answers):
        task.accept(number, answer)
    return task


def said(settling: LossReporter) -> list[tuple[int, bool]]:
    calls = [call for call in settling.pending_reports() if isinstance(call, ReportDelivery)]
    return [(call.task_id, call.consumed) for call in calls]


def settling_of(task: TaskReader) -> LossReporter:
    settling = LossReporter("c")
    settling.task_started(5, task.received_record)
    return settling


def test_what_arrived_of_a_lost_task_is_said_before_that_it_was_used() -> None:
    task = task_with(ONE_UNIT)
    settling = settling_of(task)
    settling.task_lost(5, task)
    settling.reply_consumed(5, 0)
    assert said(settling) == [(5, False)]
    assert said(settling) == [(5, False)], "it is said again until it is answered"
    (arrived,) = settling.pending_reports()
    assert isinstance(arrived, ReportDelivery)
    assert arrived.delivered == ((0, 1),)
    settling.report_acknowledged(arrived)
    assert not settling.has_unreported_losses
    (used,) = settling.pending_reports()
    assert isinstance(used, ReportDelivery)
    assert (used.consumed, used.delivered) == (True, ((0, 1),))
    settling.report_acknowledged(used)
    assert settling.pending_reports() == []


def test_what_is_in_use_of_a_lost_task_is_not_said_to_be_used() -> None:
    task = task_with(ONE_UNIT)
    settling = settling_of(task)
    settling.task_lost(5, task)
    (arrived,) = settling.pending_reports()
    assert isinstance(arrived, ReportDelivery)
    settling.report_acknowledged(arrived)
    assert settling.pending_reports() == []
    settling.reply_consumed(5, 0)
    assert said(settling) == [(5, True)]


def test_of_a_lost_task_that_was_never_read_nothing_arrived() -> None:
    settling = LossReporter("c")
    settling.task_lost(5, None)
    (call,) = settling.pending_reports()
    assert isinstance(call, ReportDelivery)
    assert (call.delivered, call.partially_delivered, call.consumed) == ((), (), False)


def test_of_a_task_that_is_over_it_is_said_that_what_came_was_used_once_it_is() -> None:
    task = task_with(ONE_UNIT)
    settling = settling_of(task)
    settling.task_finished(5, task)
    assert settling.pending_reports() == []
    settling.reply_consumed(5, 0)
    assert said(settling) == [(5, True)]


def test_a_worker_that_cannot_be_reached_is_reported_until_its_task_is_over() -> None:
    settling = LossReporter("c")
    settling.task_started(5, DeliveryRecord())
    settling.worker_unreachable(5, refused=True)
    report = ReportUnreachable(client_id="c", task_id=5, connection_refused=True)
    assert settling.pending_reports() == [report]
    assert settling.is_urgent
    settling.task_finished(5, task_with())
    assert settling.pending_reports() == []
    assert not settling.is_urgent


def test_who_leaves_says_what_it_used_of_each_task_and_nothing_of_the_rest() -> None:
    whole, begun = task_with(ONE_UNIT), task_with(ONE_UNIT)
    settling = LossReporter("c")
    settling.task_started(5, whole.received_record)
    settling.task_started(6, begun.received_record)
    whole.consume(0)
    words = settling.final_reports({5: whole, 6: begun}, None)
    assert [(word.task_id, word.consumed, word.delivered) for word in words] == [
        (5, True, ((0, 1),))
    ]
    words = settling.final_reports({6: begun}, (6, 0, 1))
    assert [(word.task_id, word.partially_delivered) for word in words] == [
        (5, ((0, 1),)),
        (6, ((0, 1),)),
    ]
