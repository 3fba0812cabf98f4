"""Tasks of a worker, from the first request for a task to its end. No thread, lock or clock.

Rule 1. A task starts with the first request for it. Requests that arrive before its plan, or before
    the worker is registered, are passed on in the order of arrival. None of them is rejected in the
    meantime, because later requests would then receive its elements.
Rule 2. The end of a task is reported to the dispatcher until it is acknowledged.
Rule 3. The id and token of an ended task are kept, so that a late request receives the end of a
    finished task, or an error that says that the task was deleted.
Rule 4. A task whose split request is rejected is cancelled; its clients learn the reason from the
    dispatcher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.errors import (
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from headrace.service.messages import (
    CommitFiles,
    Done,
    FailTask,
    FinishTask,
    GetElements,
    GetElementsReply,
    GetPlan,
    GetPlanReply,
    GetSplit,
    GetSplitReply,
    GetTask,
    ReportDepartedClient,
    ReturnSplits,
    TaskDefinition,
)
from headrace.service.ranges import Ranges
from headrace.service.worker.client_errors import format_error, to_client_error
from headrace.service.worker.delivery_policy import BufferedOutput, BufferLimits, UndeliveredOutput
from headrace.service.worker.pending_actions import PendingActions, StartProducer
from headrace.service.worker.plan_lookups import PendingLookups, PlanBytesCache, TaskPlans
from headrace.service.worker.registry import create_delivery
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.task import (
    DataWorkerTask,
    deleted_task_error,
    matches_token,
    wrong_token_error,
)

__all__ = ["TaskTable"]

R = TypeVar("R")

_MAX_ENDED_TASKS = 10_000
_REPORT_SECONDS = 1.0
"""Maximum time that clients wait for the dispatcher to acknowledge the end of a task."""


@dataclass(frozen=True)
class _EndedTask:
    """Outcome of an ended task."""

    task_token: str
    """Token of the task; empty if unknown."""
    is_finished: bool
    """Whether the task finished; False if it was deleted."""
    received_splits: Ranges = ()
    """Splits that its clients received (`DataWorkerTask.received_splits`)."""


class TaskTable(Generic[R]):
    """All tasks of a registration, which begins with `reset`.

    Args:
        pending_actions: Collects the actions to execute.
        plan_cache: Cache of plans.
        limits: Memory limits of each task.
    """

    def __init__(
        self,
        pending_actions: PendingActions[R],
        plan_cache: PlanBytesCache,
        limits: BufferLimits | None,
    ) -> None:
        self._pending_actions = pending_actions
        self._limits = limits
        self._worker_id = ""
        self._is_registered = False
        self._pending_lookups: PendingLookups[R] = PendingLookups(plan_cache)
        self._tasks: dict[int, DataWorkerTask[R]] = {}
        #: Tasks with running producers, by number of the producer.
        self._producers: dict[int, DataWorkerTask[R]] = {}
        self._producer_count = 0
        #: The most recently ended tasks, oldest first.
        self._ended_tasks: dict[int, _EndedTask] = {}
        #: Whether new tasks are drained as soon as they start.
        self._is_draining = False

    @property
    def running(self) -> tuple[int, ...]:
        """Ids of the tasks that are not finished."""
        return tuple(task_id for task_id, task in self._tasks.items() if not task.is_finished)

    @property
    def buffered(self) -> dict[int, BufferedOutput]:
        """Output of each task that waits for clients."""
        return {task_id: task.buffered for task_id, task in self._tasks.items()}

    @property
    def undelivered_count(self) -> int:
        """Number of tasks with output that a client may still request."""
        return sum(not task.is_abandoned for task in self._tasks.values()) + len(
            self._pending_lookups
        )

    # --- clients ----------------------------------------------------------------------------------

    def request_received(self, request: R, message: GetElements, now: float) -> None:
        """Handle a client's request."""
        task_id = message.task_id
        task, finished = self._tasks.get(task_id), self._ended_tasks.get(task_id)
        if task is not None:
            task.request_received(request, message, now, self._pending_actions.actions)
            self._advance(task, now)
        elif finished is not None:
            self._reply_for_ended_task(request, message, finished)
        elif self._pending_lookups.add_request(request, message) and self._is_registered:
            self._pending_actions.call_dispatcher(
                GetTask(worker_id=self._worker_id, task_id=task_id), now
            )

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def _reply_for_ended_task(self, request: R, message: GetElements, finished: _EndedTask) -> None:
        task_id, replies = message.task_id, self._pending_actions.actions.replies
        if finished.task_token and not matches_token(message.task_token, finished.task_token):
            replies.append((request, wrong_token_error(task_id)))
        elif finished.is_finished:
            replies.append(
                (request, GetElementsReply(first_element=0, num_elements=0, end_of_task=True))
            )
        else:
            replies.append((request, _unknown_task_error(task_id)))

    def _reject(self, requests: Iterable[tuple[R, GetElements]], error: Exception) -> None:
        self._pending_actions.actions.replies += [(request, error) for request, _ in requests]

    # --- start of tasks ---------------------------------------------------------------------------

    def start_task(self, task_id: int, now: float) -> None:
        """Start a task without a request for it."""
        if (
            task_id not in self._tasks
            and task_id not in self._ended_tasks
            and self._pending_lookups.add_task(task_id)
        ):
            self._pending_actions.call_dispatcher(
                GetTask(worker_id=self._worker_id, task_id=task_id), now
            )

    def definition_received(
        self, call: GetTask, reply: TaskDefinition | Exception, now: float
    ) -> None:
        """Handle the definition of a task."""
        if isinstance(reply, NotFoundError):
            self._reject(
                self._pending_lookups.release(call.task_id), _unknown_task_error(call.task_id)
            )
        elif isinstance(reply, Exception):
            self._reject(self._pending_lookups.release(call.task_id), to_client_error(reply))
        elif call.task_id in self._pending_lookups:
            self._resolve(reply, now)

    def plan_part_received(
        self, call: GetPlan, reply: GetPlanReply | Exception, now: float
    ) -> None:
        """Handle a part of a plan."""
        try:
            if isinstance(reply, Exception):
                raise reply
            found = self._pending_lookups.add_plan_part(call, reply)
        except Exception as error:
            for definition in self._pending_lookups.cancel_fetch(call.digest):
                self._fail_start(definition, error, now)
            return
        if isinstance(found, GetPlan):
            self._pending_actions.call_dispatcher(found, now)
        else:
            for definition in found:
                self._resolve(definition, now)

    def _resolve(self, definition: TaskDefinition, now: float) -> None:
        """Start a task once its plans are available."""
        found = self._pending_lookups.resolve(definition)
        if isinstance(found, GetPlan):
            self._pending_actions.call_dispatcher(found, now)
        elif found is not None:
            self._start(definition, found, now)

    def _fail_start(self, definition: TaskDefinition, error: Exception, now: float) -> None:
        task_id = definition.task_id
        waiting = self._pending_lookups.release(task_id)
        if isinstance(error, UnavailableError):
            self._reject(waiting, error)
        elif isinstance(error, NotFoundError):
            self._reject(waiting, _unknown_task_error(task_id))
        else:
            self._reject(waiting, to_client_error(error))
            self._remember(task_id, _EndedTask(definition.task_token, is_finished=True))
            failed = FailTask(
                worker_id=self._worker_id,
                task_id=task_id,
                task_token=definition.task_token,
                reason=f"it cannot be started: {format_error(error)}",
            )
            self._pending_actions.call_dispatcher(failed, now)

    def _start(self, definition: TaskDefinition, plans: TaskPlans, now: float) -> None:
        try:
            delivery = create_delivery(definition, self._limits)
        except FailedPreconditionError as error:
            self._fail_start(definition, error, now)
            return
        waiting = self._pending_lookups.release(definition.task_id)
        self._producer_count += 1
        task: DataWorkerTask[R] = DataWorkerTask(
            definition, self._worker_id, self._producer_count, delivery
        )
        self._tasks[task.task_id] = self._producers[task.producer] = task
        actions = self._pending_actions.actions
        actions.starts.append(
            StartProducer(
                producer=task.producer,
                definition=definition,
                plan=plans.plan,
                cost_plan=plans.cost_plan,
                max_batch_bytes=delivery.max_batch_bytes,
            )
        )
        for request, message in waiting:
            task.request_received(request, message, now, actions)
        if self._is_draining:
            task.drain(actions)

    # --- producers --------------------------------------------------------------------------------

    def batch_produced(self, producer: int, batch: ResultBatch, now: float) -> None:
        """Handle a batch."""
        task = self._producers.get(producer)
        if task is not None:
            task.batch_produced(batch, self._pending_actions.actions)
            self._report_files(task, now)

    def splits_needed(self, producer: int, now: float) -> None:
        """Handle a producer's wait for splits."""
        task = self._producers.get(producer)
        if task is not None:
            task.splits_needed(now, self._pending_actions.actions)
            self._advance(task, now)

    def producer_ended(self, producer: int, failure: str | None, now: float) -> None:
        """Handle the end of a producer, with the reason if its task failed."""
        task = self._producers.pop(producer, None)
        if task is not None:
            task.producer_ended(failure, self._pending_actions.actions)
            self._advance(task, now)

    # --- running tasks ----------------------------------------------------------------------------

    def run_timers(self, now: float) -> None:
        """Do what is due at this time."""
        for task in list(self._tasks.values()):
            if now >= task.finish_deadline:
                task.finish(self._pending_actions.actions)
            self._advance(task, now)

    def _advance(self, task: DataWorkerTask[R], now: float) -> None:
        """Do what is due for a task: request splits, report its end, remove it."""
        self._report_files(task, now)
        split_request = task.take_split_request(now)
        if split_request is not None:
            self._pending_actions.call_dispatcher(split_request, now)
        if task.should_report:
            task.finish_deadline = now + _REPORT_SECONDS
            self._pending_actions.call_dispatcher(task.end_report(), now)
        if task.is_complete and self._tasks.get(task.task_id) is task:
            del self._tasks[task.task_id]
            self._remember(
                task.task_id,
                _EndedTask(task.task_token, is_finished=True, received_splits=task.received_splits),
            )
        self._pending_actions.check_at(min(task.request_splits_at, task.finish_deadline))

    def _report_files(self, task: DataWorkerTask[R], now: float) -> None:
        files = task.files_to_report()
        if files is not None:
            self._pending_actions.call_dispatcher(files, now)

    def files_reported(self, call: CommitFiles, reply: Done | Exception, now: float) -> None:
        """Handle the acceptance or rejection of files."""
        task = self._tasks.get(call.task_id)
        if task is None:
            return
        if not isinstance(reply, Exception):
            task.files_reported(call.report_number, self._pending_actions.actions)
            self._advance(task, now)
            return
        self.delete(task.task_id)
        if not isinstance(reply, NotFoundError | FailedPreconditionError):
            self._pending_actions.call_dispatcher(
                task.failure_report(f"the dispatcher rejected its files: {format_error(reply)}"),
                now,
            )

    def split_request_answered(
        self, call: GetSplit, reply: GetSplitReply | Exception, now: float
    ) -> bool:
        """Handle a split reply; return whether the dispatcher still seems to know the task."""
        task = self._tasks.get(call.task_id)
        if task is None:
            return True
        if isinstance(reply, GetSplitReply):
            task.split_request_answered(call, reply, now, self._pending_actions.actions)
            self._advance(task, now)
        elif task.undelivered is None:
            self.delete(task.task_id)
            if not isinstance(reply, NotFoundError | FailedPreconditionError):
                self._pending_actions.call_dispatcher(
                    task.failure_report(
                        f"the dispatcher rejected its split request: {format_error(reply)}"
                    ),
                    now,
                )
            return False
        return True

    def end_reported(
        self, call: FinishTask | FailTask, reply: Done | Exception, now: float
    ) -> None:
        """Handle the dispatcher's reply, or unavailability, after a report of a task's end."""
        task = self._tasks.get(call.task_id)
        if task is not None and task.finish_deadline < math.inf:
            task.finish(self._pending_actions.actions)
            self._advance(task, now)

    def client_departed(self, task_id: int, client_id: str, now: float) -> None:
        """Report to the dispatcher what a departed client had received and not acknowledged."""
        task, finished = self._tasks.get(task_id), self._ended_tasks.get(task_id)
        if task is not None:
            self._pending_actions.call_dispatcher(
                task.remove_client(client_id, self._pending_actions.actions), now
            )
            self._advance(task, now)
        elif finished is not None:
            report = ReportDepartedClient(
                worker_id=self._worker_id,
                task_id=task_id,
                task_token=finished.task_token,
                client_id=client_id,
                unacknowledged=(),
                possibly_lost=(),
                delivered=finished.received_splits,
                partially_delivered=finished.received_splits,
            )
            self._pending_actions.call_dispatcher(report, now)

    def departed_client_reported(
        self, call: ReportDepartedClient, reply: Done | Exception, now: float
    ) -> None:
        """Record that the dispatcher acknowledged the report about a departed client."""
        task = self._tasks.get(call.task_id)
        if task is not None:
            task.forget_client(call.client_id, self._pending_actions.actions)
            self._advance(task, now)

    def drop_expired(self, now: float) -> None:
        """Drop batches held by silent clients of tasks that read whole plans."""
        for task in list(self._tasks.values()):
            task.drop_expired(now, self._pending_actions.actions)
            self._advance(task, now)

    # --- end of tasks -----------------------------------------------------------------------------

    def delete(self, task_id: int) -> None:
        """Cancel a task that the dispatcher no longer needs."""
        self._reject(self._pending_lookups.release(task_id), _unknown_task_error(task_id))
        self._pending_actions.pending_calls.discard(
            lambda call: getattr(call, "task_id", None) == task_id
        )
        task = self._tasks.pop(task_id, None)
        if task is not None:
            self._cancel(task, deleted_task_error(task_id))
            self._remember(task_id, _EndedTask(task.task_token, task.is_finished))
        elif task_id not in self._ended_tasks:
            self._remember(task_id, _EndedTask("", is_finished=False))

    def drain(self, now: float) -> None:
        """Drain all tasks, including those that start later."""
        self._is_draining = True
        for task in list(self._tasks.values()):
            task.drain(self._pending_actions.actions)
            self._advance(task, now)

    def cancel(self, refusal: Exception) -> None:
        """Cancel all tasks."""
        self._reject(self._pending_lookups.release_all(), refusal)
        for task in self._tasks.values():
            self._cancel(task, refusal)

    def _cancel(self, task: DataWorkerTask[R], refusal: Exception) -> None:
        task.cancel(refusal, self._pending_actions.actions)
        self._producers.pop(task.producer, None)

    def undelivered(self) -> tuple[list[UndeliveredOutput], list[ReturnSplits]]:
        """Return the undelivered output of cancelled tasks, and the splits to return."""
        tasks = list(self._tasks.values())
        outputs = [task.undelivered for task in tasks if task.undelivered is not None]
        return outputs, [
            split_return for task in tasks if (split_return := task.split_return()) is not None
        ]

    def reset(self, worker_id: str) -> None:
        """Remove all tasks before a registration under a new id. Requests wait for it."""
        self._worker_id, self._is_registered = worker_id, False
        self._tasks.clear()
        self._ended_tasks.clear()

    def worker_registered(self, now: float) -> None:
        """Look up the requested tasks after the registration."""
        self._is_registered = True
        for task_id in self._pending_lookups:
            self._pending_actions.call_dispatcher(
                GetTask(worker_id=self._worker_id, task_id=task_id), now
            )

    def registration_rejected(self) -> None:
        """Reject waiting requests: the worker was not registered, so it has no tasks for now."""
        for task_id in list(self._pending_lookups):
            self._reject(self._pending_lookups.release(task_id), _unknown_task_error(task_id))

    def _remember(self, task_id: int, finished: _EndedTask) -> None:
        self._ended_tasks[task_id] = finished
        while len(self._ended_tasks) > _MAX_ENDED_TASKS:
            del self._ended_tasks[next(iter(self._ended_tasks))]


def _unknown_task_error(task_id: int) -> CancelledError:
    return CancelledError(f"task {task_id} is not on this worker, or has been deleted")
