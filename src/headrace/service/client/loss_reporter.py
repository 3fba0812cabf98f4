"""Reports to the dispatcher which elements of lost tasks were received and consumed.

Rule 1. A report is resent until the dispatcher acknowledges it.
Rule 2. Received elements of a lost task are reported before consumed ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.service.client.delivery_record import DeliveryRecord
from headrace.service.client.task_reader import TaskReader
from headrace.service.messages import DispatcherRequest, ReportDelivery, ReportUnreachable

__all__ = ["LossReporter"]


class LossReporter:
    """Tasks that were read, and their pending reports.

    Args:
        client_id: Client that sends the reports.
    """

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        #: Delivery record of every task this client has read; prevents reading a task twice.
        self._records: dict[int, DeliveryRecord] = {}
        #: Lost tasks with an unacknowledged report, and tasks with an unreachable worker; the value
        #: is True if the worker refuses connections.
        self._unreported_losses: set[int] = set()
        self._unreachable: dict[int, bool] = {}
        #: Finished tasks with unconsumed replies, and those whose replies are all consumed.
        self._unconsumed: dict[int, TaskReader] = {}
        self._unreported_consumed: set[int] = set()

    def has_read(self, task_id: int) -> bool:
        """Return whether this client has read the task before."""
        return task_id in self._records

    def task_started(self, task_id: int, record: DeliveryRecord) -> None:
        """Record that a task is being read, with its record of received elements."""
        self._records[task_id] = record

    def task_lost(self, task_id: int, task: TaskReader | None) -> bool:
        """Record that a task was lost; return whether that was unknown before.

        Args:
            task_id: ID of the task.
            task: The task; None if this client no longer reads it.
        """
        is_new = task_id not in self._unreported_losses
        self._unreported_losses.add(task_id)
        if task is not None and task.received_record:
            self._unconsumed[task_id] = task
        return is_new

    def task_finished(self, task_id: int, task: TaskReader) -> None:
        """Record that a task finished."""
        if task.unconsumed:
            self._unconsumed[task_id] = task
        self._unreachable.pop(task_id, None)

    def worker_unreachable(self, task_id: int, *, refused: bool) -> None:
        """Record that a task's worker is unreachable."""
        self._unreachable[task_id] = refused

    def reply_consumed(self, task_id: int, number: int) -> None:
        """Record that a reply of a finished task was consumed completely."""
        lost = self._unconsumed.get(task_id)
        if lost is not None:
            lost.consume(number)

    @property
    def has_unreported_losses(self) -> bool:
        """Whether the dispatcher has not yet acknowledged what was received of a lost task."""
        return bool(self._unreported_losses)

    @property
    def is_urgent(self) -> bool:
        """Whether a report is pending that other clients may be waiting for."""
        return bool(self._unreachable or self._unreported_losses)

    # --- reports ----------------------------------------------------------------------------------

    def pending_reports(self) -> list[DispatcherRequest]:
        """Return the reports to send now."""
        for task_id in [
            task_id for task_id, task in self._unconsumed.items() if not task.unconsumed
        ]:
            if task_id not in self._unreported_losses:
                self._unreported_consumed.add(task_id)
                del self._unconsumed[task_id]
        reports: list[DispatcherRequest] = [
            self._make_report(task_id, self._records[task_id], consumed=True)
            for task_id in sorted(self._unreported_consumed)
        ]
        reports += [
            self._make_report(task_id, self._records.get(task_id, DeliveryRecord()))
            for task_id in sorted(self._unreported_losses)
        ]
        reports += [
            ReportUnreachable(
                client_id=self._client_id, task_id=task_id, connection_refused=refused
            )
            for task_id, refused in sorted(self._unreachable.items())
        ]
        return reports

    def report_acknowledged(self, report: ReportDelivery) -> None:
        """Record that the dispatcher acknowledged a report."""
        (self._unreported_consumed if report.consumed else self._unreported_losses).discard(
            report.task_id
        )

    def unreachable_acknowledged(self, task_id: int) -> None:
        """Record that the dispatcher knows that a task's worker is unreachable."""
        self._unreachable.pop(task_id, None)

    def final_reports(
        self, tasks: Mapping[int, TaskReader], partial: tuple[int, int, int] | None
    ) -> list[ReportDelivery]:
        """Return the reports to send before this client leaves (`IterationSession.final_reports`).

        Args:
            tasks: Tasks that are being read.
            partial: As in `IterationSession.final_reports`.
        """
        reports = [
            self._make_report(task_id, record, consumed=True)
            for task_id, record in self._records.items()
            if task_id not in tasks and task_id not in self._unconsumed and record
        ]
        for task_id, task in (*tasks.items(), *self._unconsumed.items()):
            if partial is not None and partial[0] == task_id and partial[1] in task.unconsumed:
                task.consumed_record.add_partial_reply(task.unconsumed[partial[1]], partial[2])
            if task.consumed_record:
                reports.append(self._make_report(task_id, task.consumed_record, consumed=True))
        return reports

    def _make_report(
        self, task_id: int, record: DeliveryRecord, *, consumed: bool = False
    ) -> ReportDelivery:
        return ReportDelivery(
            client_id=self._client_id,
            task_id=task_id,
            delivered=record.delivered,
            partially_delivered=record.partially_delivered,
            partial_splits=record.partial_splits,
            consumed=consumed,
        )
