"""What the dispatcher is to hear of tasks: what arrived of those that were lost, and was used.

Rule 1. All is said again until it is answered.
Rule 2. What arrived of a lost task is said before that it was used.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.service.client.receipt import Receipt
from headrace.service.client.task import Task
from headrace.service.messages import DispatcherRequest, ReportDelivery, ReportUnreachable

__all__ = ["Settling"]


class Settling:
    """Tasks of which something arrived, and what is still to be said of them.

    Args:
        client_id: Who says it.
    """

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        #: Every task that was ever read, so that none is begun twice, with what arrived of it.
        self._arrived: dict[int, Receipt] = {}
        #: Lost tasks to settle, and tasks whose worker cannot be reached, with whether that refuses
        #: connections.
        self._to_settle: set[int] = set()
        self._to_report: dict[int, bool] = {}
        #: Tasks that are over of which not all that came is used, and those of which it is.
        self._unused: dict[int, Task] = {}
        self._to_say_used: set[int] = set()

    def knows(self, task_id: int) -> bool:
        """Whether a task was read before."""
        return task_id in self._arrived

    def begin(self, task_id: int, receipt: Receipt) -> None:
        """Take note of a task that is read, and of where it is said what arrives of it."""
        self._arrived[task_id] = receipt

    def lose(self, task_id: int, task: Task | None) -> bool:
        """Take note that a task was lost; return whether that is news.

        Args:
            task_id: Its number.
            task: Itself; None: it is not read any more.
        """
        is_new = task_id not in self._to_settle
        self._to_settle.add(task_id)
        if task is not None and task.arrived:
            self._unused[task_id] = task
        return is_new

    def finish(self, task_id: int, task: Task) -> None:
        """Take note that a task is over."""
        if task.in_use:
            self._unused[task_id] = task
        self._to_report.pop(task_id, None)

    def cannot_reach(self, task_id: int, *, refused: bool) -> None:
        """Take note that a task's worker cannot be reached."""
        self._to_report[task_id] = refused

    def use_up(self, task_id: int, number: int) -> None:
        """Take note that nothing is left of an answer of a task that is over."""
        lost = self._unused.get(task_id)
        if lost is not None:
            lost.use_up(number)

    @property
    def is_unsettled(self) -> bool:
        """Whether the dispatcher does not know yet what arrived of a lost task."""
        return bool(self._to_settle)

    @property
    def is_urgent(self) -> bool:
        """Whether it is to hear of a task that others wait for."""
        return bool(self._to_report or self._to_settle)

    # --- what is said ---------------------------------------------------------------------------

    def calls(self) -> list[DispatcherRequest]:
        """Return what is to be said now."""
        for task_id in [each for each, task in self._unused.items() if not task.in_use]:
            if task_id not in self._to_settle:
                self._to_say_used.add(task_id)
                del self._unused[task_id]
        calls: list[DispatcherRequest] = [
            self._word(task_id, self._arrived[task_id], used=True)
            for task_id in sorted(self._to_say_used)
        ]
        calls += [
            self._word(task_id, self._arrived.get(task_id, Receipt()))
            for task_id in sorted(self._to_settle)
        ]
        calls += [
            ReportUnreachable(
                client_id=self._client_id, task_id=task_id, connection_refused=refused
            )
            for task_id, refused in sorted(self._to_report.items())
        ]
        return calls

    def said(self, call: ReportDelivery) -> None:
        """Take note that the dispatcher heard what arrived of a task, or was used."""
        (self._to_say_used if call.consumed else self._to_settle).discard(call.task_id)

    def reported(self, task_id: int) -> None:
        """Take note that the dispatcher knows that a task's worker cannot be reached."""
        self._to_report.pop(task_id, None)

    def last_words(
        self, tasks: Mapping[int, Task], begun: tuple[int, int, int] | None
    ) -> list[ReportDelivery]:
        """Return what is to be said before this client leaves (`Session.leave`).

        Args:
            tasks: Those that are read.
            begun: As in `Session.leave`.
        """
        words = [
            self._word(task_id, receipt, used=True)
            for task_id, receipt in self._arrived.items()
            if task_id not in tasks and task_id not in self._unused and receipt
        ]
        for task_id, task in (*tasks.items(), *self._unused.items()):
            if begun is not None and begun[0] == task_id and begun[1] in task.in_use:
                task.used.begin(task.in_use[begun[1]], begun[2])
            if task.used:
                words.append(self._word(task_id, task.used, used=True))
        return words

    def _word(self, task_id: int, receipt: Receipt, *, used: bool = False) -> ReportDelivery:
        return ReportDelivery(
            client_id=self._client_id,
            task_id=task_id,
            delivered=receipt.whole,
            partially_delivered=receipt.touched,
            partial_splits=receipt.parts,
            consumed=used,
        )
