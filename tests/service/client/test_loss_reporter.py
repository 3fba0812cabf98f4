"""Reports about lost and finished tasks, and their order."""

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

ONE_SPLIT = GetElementsReply(
    first_element=0, num_elements=2, end_of_task=False, done_from=0, done_to=1, delivered_end=1
)


def task_with(*answers: GetElementsReply) -> TaskReader:
    """Return a task with replies that were received and not consumed."""
    task = TaskReader(TaskAddress(task_id=5, worker_id="w", worker_address="w:1", task_token="t"))
    for number, answer in enumerate(answers):
        task.accept(number, answer)
    return task


def reported_tasks(reporter: LossReporter) -> list[tuple[int, bool]]:
    calls = [call for call in reporter.pending_reports() if isinstance(call, ReportDelivery)]
    return [(call.task_id, call.consumed) for call in calls]


def reporter_of(task: TaskReader) -> LossReporter:
    reporter = LossReporter("c")
    reporter.task_started(5, task.received_record)
    return reporter


def test_received_elements_of_a_lost_task_are_reported_before_consumed() -> None:
    task = task_with(ONE_SPLIT)
    reporter = reporter_of(task)
    reporter.task_lost(5, task)
    reporter.reply_consumed(5, 0)
    assert reported_tasks(reporter) == [(5, False)]
    assert reported_tasks(reporter) == [(5, False)], "the report is repeated until acknowledged"
    (arrived,) = reporter.pending_reports()
    assert isinstance(arrived, ReportDelivery)
    assert arrived.delivered == ((0, 1),)
    reporter.report_acknowledged(arrived)
    assert not reporter.has_unreported_losses
    (used,) = reporter.pending_reports()
    assert isinstance(used, ReportDelivery)
    assert (used.consumed, used.delivered) == (True, ((0, 1),))
    reporter.report_acknowledged(used)
    assert reporter.pending_reports() == []


def test_unconsumed_replies_of_a_lost_task_are_not_reported_as_consumed() -> None:
    task = task_with(ONE_SPLIT)
    reporter = reporter_of(task)
    reporter.task_lost(5, task)
    (arrived,) = reporter.pending_reports()
    assert isinstance(arrived, ReportDelivery)
    reporter.report_acknowledged(arrived)
    assert reporter.pending_reports() == []
    reporter.reply_consumed(5, 0)
    assert reported_tasks(reporter) == [(5, True)]


def test_a_lost_task_that_was_never_read_has_an_empty_report() -> None:
    reporter = LossReporter("c")
    reporter.task_lost(5, None)
    (call,) = reporter.pending_reports()
    assert isinstance(call, ReportDelivery)
    assert (call.delivered, call.partially_delivered, call.consumed) == ((), (), False)


def test_a_finished_task_is_reported_once_it_is_consumed() -> None:
    task = task_with(ONE_SPLIT)
    reporter = reporter_of(task)
    reporter.task_finished(5, task)
    assert reporter.pending_reports() == []
    reporter.reply_consumed(5, 0)
    assert reported_tasks(reporter) == [(5, True)]


def test_an_unreachable_worker_is_reported_until_its_task_finishes() -> None:
    reporter = LossReporter("c")
    reporter.task_started(5, DeliveryRecord())
    reporter.worker_unreachable(5, refused=True)
    report = ReportUnreachable(client_id="c", task_id=5, connection_refused=True)
    assert reporter.pending_reports() == [report]
    assert reporter.is_urgent
    reporter.task_finished(5, task_with())
    assert reporter.pending_reports() == []
    assert not reporter.is_urgent


def test_final_reports_contain_only_consumed_elements() -> None:
    whole, begun = task_with(ONE_SPLIT), task_with(ONE_SPLIT)
    reporter = LossReporter("c")
    reporter.task_started(5, whole.received_record)
    reporter.task_started(6, begun.received_record)
    whole.consume(0)
    reports = reporter.final_reports({5: whole, 6: begun}, None)
    assert [(report.task_id, report.consumed, report.delivered) for report in reports] == [
        (5, True, ((0, 1),))
    ]
    reports = reporter.final_reports({6: begun}, (6, 0, 1))
    assert [(report.task_id, report.partially_delivered) for report in reports] == [
        (5, ((0, 1),)),
        (6, ((0, 1),)),
    ]
