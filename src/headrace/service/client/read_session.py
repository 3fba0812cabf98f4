"""Session of a client that receives elements in arrival order, from all tasks.

Rule 1. A request to a worker is repeated under its number until it is answered or the task has
    ended, so a broken connection neither loses nor duplicates elements.
Rule 2. A task ends when its worker reports the end or cancels it; when the dispatcher has declared
    it lost; or when its worker is unreachable, and the dispatcher neither lists the task nor
    reports that the worker can redeliver its rest. Elements of an ended task are dropped, because
    they may have been delivered to another client.
Rule 3. A lost task is reported: the dispatcher learns which of its splits arrived here, all of
    which the consumer will receive.

The base class is in `iteration_session`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.element.frame_compression import uncompressed_size
from headrace.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    UnavailableError,
)
from headrace.service.client.actions import ClientActions, ReceivedBatch, TaskRequest
from headrace.service.client.heartbeat_schedule import describe_missing
from headrace.service.client.iteration_session import IterationSession
from headrace.service.client.loss_reporter import LossReporter
from headrace.service.client.request_scheduler import RequestBudget, RequestScheduler
from headrace.service.client.task_reader import TaskReader
from headrace.service.messages import (
    ClientHeartbeatReply,
    GetElements,
    GetElementsReply,
    OpenIterationReply,
    ReportDelivery,
    SkippedElements,
    TaskAddress,
)
from headrace.service.modes.cross_trainer_cache.lag import LagReporter
from headrace.transport.channel import Buffer

__all__ = ["ReadSession"]

_AWAITED_REPORT_SECONDS = 1.0
"""Seconds of a wait for one split, in ordered reading, after which the dispatcher is informed."""
_ENOUGH_PENDING_REPLIES = 2
"""Number of pending replies of a task that makes another request less urgent."""


class ReadSession(IterationSession[TaskReader]):
    """State of one client's reading of an iteration.

    Args:
        client_id: ID of this client.
        dispatcher: Address of the dispatcher, for messages.
        max_outstanding: Maximum of unanswered requests plus unconsumed replies.
        counts_elements: Whether `max_outstanding` counts elements instead of requests and replies.
        now: Current time in seconds of a monotonic clock, as every other `now`.
        wait_timeout: Seconds without a worker that could deliver, after which waiting fails.
        trainer_id: Trainer that this client reads for, with a cross-trainer cache.
        codec: Codec for compressed replies over slow networks; empty disables compression.
        is_remote: Whether a worker's address belongs to another machine.
        has_shards: Whether each worker has a shard that no other worker reads at the same time.
        assigns_splits: Whether workers receive splits from the dispatcher.
        delivers_empty: Whether to deliver replies without elements, which report ends of splits.
    """

    _remedy = (
        "Iterate over the dataset again; give the dispatcher a `work_dir` and "
        "`fault_tolerant_mode=True` so that it survives restarts"
    )

    def __init__(
        self,
        client_id: str,
        dispatcher: str,
        max_outstanding: int,
        now: float,
        *,
        wait_timeout: float = 3600.0,
        trainer_id: str = "",
        counts_elements: bool = False,
        codec: str = "",
        is_remote: Callable[[str], bool] = lambda address: True,
        has_shards: bool = False,
        assigns_splits: bool = False,
        delivers_empty: bool = False,
    ) -> None:
        super().__init__(client_id, dispatcher, now, wait_timeout=wait_timeout, codec=codec)
        self._is_remote = is_remote
        #: Tasks read over a network that may be slow.
        self._remote_tasks: set[int] = set()
        self._trainer_id = trainer_id
        self._lag_reporter = LagReporter(trainer_id)
        self._delivers_empty = delivers_empty
        self._scheduler = RequestScheduler(
            RequestBudget(max_outstanding, counts_elements=counts_elements)
        )
        #: Number of elements received.
        self._num_elements = 0
        self._loss_reporter = LossReporter(client_id)
        #: Tasks without a known end.
        self._unfinished: dict[int, TaskAddress] = {}
        #: Finished tasks that, according to the dispatcher, are no longer on their workers.
        self._deleted_tasks: set[int] = set()
        #: The latest attempt at each shard; None for copies of the whole dataset.
        self._attempts: dict[int | None, int] = {}
        self._has_shards, self._assigns_splits = has_shards, assigns_splits
        #: In ordered reading: the awaited split, since when, and the awaited split reported last.
        self._awaited_split: int | None = None
        self._awaited_since = now
        self._reported_awaited = -1

    # --- dispatcher -------------------------------------------------------------------------------

    def iteration_opened(self, reply: OpenIterationReply, now: float) -> None:
        self._update_tasks(reply.tasks, now)
        self._iteration_finished, self._heartbeats.lease_seconds = reply.finished, reply.lease
        if reply.failure_reason:
            self.fail(FailedPreconditionError(reply.failure_reason))

    def _report_acknowledged(self, report: ReportDelivery) -> None:
        self._loss_reporter.report_acknowledged(report)
        if not report.consumed:
            self._heartbeats.expedite()

    def _unreachable_acknowledged(self, task_id: int) -> None:
        self._loss_reporter.unreachable_acknowledged(task_id)

    def update_received(self, update: ClientHeartbeatReply, now: float) -> None:
        self._heartbeats.reply_received(now, update.heartbeat_interval)
        self._journal_problem = update.journal_problem
        # The update does not concern any other split.
        self.urgent_tasks = frozenset(
            update.urgent_tasks if self._reported_awaited == self._awaited_split else ()
        )
        needs_report, was_finished = False, self._iteration_finished
        if not update.unchanged:
            self._known_version = update.version
            self._update_tasks(update.tasks, now)
            self._deleted_tasks |= self._redeliverable_tasks.difference(update.redeliverable)
            self._redeliverable_tasks = set(update.redeliverable)
            for task_id in update.reports_needed:
                task = self._active_tasks.get(task_id)
                needs_report = self._loss_reporter.task_lost(task_id, task) or needs_report
                self._close_task(task_id)
            self._iteration_finished, self.losses = update.finished, update.lost
            self._awaited_clients, self.abandoned_splits = (
                update.awaited_clients,
                update.abandoned_splits,
            )
            if update.failure_reason:
                self.fail(FailedPreconditionError(update.failure_reason))
        has_problem = self._loss_reporter.is_urgent or any(
            task.connection_error for task in self._active_tasks.values()
        )
        lacks_tasks = not self._active_tasks and not self._iteration_finished
        self._heartbeats.schedule_next(now, is_waiting=has_problem or lacks_tasks)
        if needs_report:  # other clients wait for this report
            self._heartbeats.expedite()
        for task in list(self._active_tasks.values()):
            task_id = task.address.task_id
            if task_id in self._listed_workers.keys() | self._redeliverable_tasks:
                continue
            if self._delivers_empty and was_finished:
                # All elements are known to have arrived. Only the end of the task is missing, for
                # example because its worker is paused, and other tasks have delivered the rest.
                self._close_task(task_id)
            elif task.connection_error:
                if task_id in self._deleted_tasks:
                    self._warn_of_loss(task, f"finished task {task_id}", now)
                elif self._has_shards and self._iteration_finished and task_id in self._unfinished:
                    description = f"shard {task.address.shard_index}, task {task_id}"
                    exception = ", unless another worker has read the shard again"
                    self._warn_of_loss(task, description, now, exception)
                self._close_task(task_id)

    def _warn_of_loss(
        self, task: TaskReader, description: str, now: float, exception: str = ""
    ) -> None:
        """Log that elements of an ended task may be lost, because its worker is unreachable."""
        self._warnings.append(
            f"giving up on the worker at {task.address.worker_address} ({description}), which has "
            f"been unreachable for {now - task.disconnected_at:.0f} s ({task.connection_error}): "
            f"elements of its last replies that did not arrive are lost{exception}"
        )

    def _update_tasks(self, tasks: tuple[TaskAddress, ...], now: float) -> None:
        self._listed_workers = {task.task_id: task.worker_address for task in tasks}
        for address in tasks:
            if not self._loss_reporter.has_read(address.task_id):
                task = TaskReader(address)
                if self.compression.is_enabled and self._is_remote(address.worker_address):
                    self._remote_tasks.add(address.task_id)
                # In this order, so that an interrupt may repeat the steps but not skip one.
                self._scheduler.add(address.task_id)
                self._active_tasks[address.task_id] = task
                self._unfinished[address.task_id] = address
                self._loss_reporter.task_started(address.task_id, task.received_record)
            if address.attempt > self._attempts.get(address.shard_index, 0):
                self._attempts[address.shard_index] = address.attempt
                lost = (
                    "every worker with a copy of the dataset"
                    if address.shard_index is None
                    else f"the worker of shard {address.shard_index}"
                )
                self._warn_of_retry(address, lost)

    # --- workers ----------------------------------------------------------------------------------

    def measure_reply(self, task_id: int, buffers: Sequence[Buffer], now: float) -> None:
        if task_id in self._remote_tasks and task_id in self._active_tasks:
            size = uncompressed_size(buffers)
            outstanding = sum(task.window.num_unanswered for task in self._active_tasks.values())
            self.compression.reply_received(size, self._wait.seconds(now), outstanding, now)

    def worker_replied(
        self,
        task_id: int,
        number: int,
        reply: GetElementsReply | Exception,
        payload: Any,
        now: float,
    ) -> list[ReceivedBatch]:
        task = self._active_tasks.get(task_id)
        if task is None:
            return []
        task.worker_responded()
        self._scheduler.task_changed(task_id)
        self._wait.worker_available()
        if isinstance(reply, CancelledError):
            # Handled as a lost worker: the dispatcher decides whether the iteration continues.
            if self._has_shards and task_id in self._redeliverable_tasks:
                self._warnings.append(
                    f"the worker at {task.address.worker_address} no longer has the finished task "
                    f"{task_id}: elements of its last replies that did not arrive are lost"
                )
            self._close_task(task_id)
            self._heartbeats.expedite()
            return []
        if isinstance(reply, AbortedError):
            # The request was repeated; or the worker mistook it for an earlier request that was
            # delayed on another connection.
            task.request_aborted(number, now)
            return []
        if isinstance(reply, UnavailableError):
            # The worker is not ready, or its replies must be read first.
            task.retry_later(number, now)
            return []
        if isinstance(reply, Exception):
            entry: tuple[GetElementsReply | None, Any] = (None, reply)
        else:
            entry = (reply, payload)
            task.is_ending = task.is_ending or reply.end_of_task
            if task.window.is_unanswered(number):
                skipped = (
                    reply.mode_data.count if isinstance(reply.mode_data, SkippedElements) else 0
                )
                self._lag_reporter.add_skipped(skipped, task.address.worker_address)
            # An empty reply means that the end is near and waits until the dispatcher has heard
            # from each client; or that everything was sent, and splits will be assigned once that
            # is consumed.
            task.is_draining = not (reply.num_elements or reply.error)
            if task.is_draining:
                self._heartbeats.expedite()
        batches = []
        for next_number, (next_reply, next_payload) in task.window.accept(number, entry):
            self._scheduler.reply_received(
                task_id, next_number, 1 if next_reply is None else next_reply.num_elements
            )
            batch = self._accept_reply(task, next_number, next_reply, next_payload)
            if batch is not None:
                batches.append(batch)
        # In ordered reading, the delivered batch may not contain the awaited element.
        if batches and self._wait.is_waiting and not self._delivers_empty:
            self._wait.begin(now)
        if task.is_ending:
            self._task_ended(task.address)
        if task.is_ending and not task.window.num_unanswered:
            self._close_task(task_id)
            self._heartbeats.expedite()
        return batches

    def _accept_reply(
        self, task: TaskReader, number: int, reply: GetElementsReply | None, value: Any
    ) -> ReceivedBatch | None:
        if reply is not None and not task.accept(number, reply):
            self._consume(task, number)
            if not self._delivers_empty or reply.num_elements or reply.error:
                return None
            value = None
        count = 0 if reply is None else reply.num_elements
        self._num_elements += count
        return ReceivedBatch(task.address, number, count, value, reply)

    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        task = self._active_tasks.get(task_id)
        if task is None:
            return
        task.disconnected(error, now)
        self._scheduler.task_changed(task_id)
        self._loss_reporter.worker_unreachable(task_id, refused=task.is_refused)
        self._heartbeats.expedite()

    def restrict_requests(
        self, task_ids: set[int] | None, awaited_split: int | None, now: float
    ) -> bool:
        if awaited_split != self._awaited_split:
            self._awaited_split, self._awaited_since, self.urgent_tasks = (
                awaited_split,
                now,
                frozenset(),
            )
        return self._scheduler.restrict(task_ids)

    # --- consumer ---------------------------------------------------------------------------------

    def batch_consumed(self, task_id: int, number: int) -> bool:
        # If several replies are pending, acknowledgement can wait for the next request.
        task = self._active_tasks.get(task_id)
        if task is not None:
            self._consume(task, number)
            return task.is_draining or task.window.num_unanswered < _ENOUGH_PENDING_REPLIES
        self._loss_reporter.reply_consumed(task_id, number)
        return True

    @property
    def skipped(self) -> int:
        return self._lag_reporter.total_skipped

    @property
    def unfinished_tasks(self) -> tuple[list[TaskAddress], list[TaskAddress]]:
        active: list[TaskAddress] = []
        others: list[TaskAddress] = []
        for task_id, task in self._unfinished.items():
            (active if task_id in self._active_tasks else others).append(task)
        shards = {task.shard_index for task in active} - {None}
        return active, [task for task in others if task.shard_index not in shards]

    @property
    def is_finished(self) -> bool:
        return self.failure is not None or (
            self._iteration_finished
            and not self._active_tasks
            and not self._loss_reporter.has_unreported_losses
        )

    # --- actions ----------------------------------------------------------------------------------

    def _request_elements(self, now: float, actions: ClientActions) -> None:
        plan = self._scheduler.plan_requests(self._active_tasks, now)
        actions.requests += [self._make_request(task, number) for task, number in plan.requests]
        actions.wake_within(plan.wake_in)
        actions.warnings += self._lag_reporter.take_warnings(now)

    def _make_request(self, task: TaskReader, number: int) -> TaskRequest:
        message = GetElements(
            task_id=task.address.task_id,
            task_token=task.address.task_token,
            client_id=self.client_id,
            request_number=number,
            acknowledged=task.window.acknowledged,
            max_elements=self._scheduler.max_elements(task.address.task_id, number),
            trainer_id=self._trainer_id,
            codec=self.compression.codec if task.address.task_id in self._remote_tasks else "",
        )
        return TaskRequest(task.address, number, message)

    def _call_dispatcher(self, now: float, actions: ClientActions) -> None:
        overdue_split = self._overdue_split(now, actions)
        if overdue_split not in (self._reported_awaited, -1):
            self._heartbeats.expedite()
        if self._heartbeats.is_due(now):
            self._reported_awaited = overdue_split
            actions.calls += self._loss_reporter.pending_reports()
            actions.calls.append(
                self._make_heartbeat(
                    now,
                    elements=self._num_elements,
                    buffers=sum(len(task.unconsumed) for task in self._active_tasks.values()),
                    wanted_split=overdue_split,
                )
            )
            self._heartbeats.heartbeat_sent(now)
        actions.wake_within(self._heartbeats.seconds_until_due(now))

    def _exclude_pause(self, pause: float, now: float) -> None:
        super()._exclude_pause(pause, now)
        self._awaited_since = now  # the split may have arrived during the pause

    def _overdue_split(self, now: float, actions: ClientActions) -> int:
        """Return the split that the consumer has awaited for long; -1 if there is none."""
        if self._awaited_split is None:
            return -1
        remaining = self._awaited_since + _AWAITED_REPORT_SECONDS - now
        if remaining > 0:
            actions.wake_within(remaining)
            return -1
        return self._awaited_split

    def final_reports(self, partial: tuple[int, int, int] | None) -> list[ReportDelivery]:
        # Consumed elements by task. All elements received of an ended task count, unless it was
        # lost; they were reported at that time.
        return self._loss_reporter.final_reports(self._active_tasks, partial)

    @property
    def _awaited(self) -> str:
        return "the next element in order" if self._delivers_empty else super()._awaited

    def _needs_dispatcher(self, task: TaskReader) -> bool:
        return self._assigns_splits or task.is_draining

    def _describe_missing(self, now: float) -> str:
        silence = self._heartbeats.silence(now)
        # In ordered reading, other tasks may be delivering later elements.
        urgent_tasks = [
            self._active_tasks[task_id]
            for task_id in self.urgent_tasks
            if task_id in self._active_tasks
        ]
        return describe_missing(
            self._dispatcher,
            silence,
            urgent_tasks or self._active_tasks.values(),
            self._awaited_clients,
            now,
            self.skipped_workers,
            listed_workers=list(self._listed_workers.values()),
            is_idle=self._wait.is_idle_for_long(now),
            has_shards=self._has_shards,
            journal_problem=self._journal_problem,
        )

    # --- tasks ------------------------------------------------------------------------------------

    def _task_ended(self, task: TaskAddress) -> None:
        """Record the end of a task, and thereby of earlier tasks with the same shard."""
        for task_id, other in list(self._unfinished.items()):
            if task_id == task.task_id or (
                task.shard_index is not None and other.shard_index == task.shard_index
            ):
                del self._unfinished[task_id]

    def _consume(self, task: TaskReader, number: int) -> None:
        task.consume(number)
        self._scheduler.reply_consumed(task.address.task_id, number)

    def _close_task(self, task_id: int) -> None:
        task = self._active_tasks.pop(task_id, None)
        if task is not None:
            self._loss_reporter.task_finished(task_id, task)
            self._scheduler.remove(task_id)
            self._disconnects.append(task_id)
