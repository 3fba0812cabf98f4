"""One task: delivery of its result batches, its splits, and its end. No thread, lock or clock.

Each method handles one input and adds the resulting actions to `actions`.

Rule 1. A producer makes one batch, and the next one when there is room for it.
Rule 2. A draining task requests no further splits; one that reads its whole plan ends where it is.
Rule 3. The dispatcher learns of the end of a task before its clients do, so that it knows that the
    iteration has ended when they ask. If it does not reply, the clients do not wait for it.
"""

from __future__ import annotations

import hmac
import math
from typing import Generic, TypeVar

from headrace.errors import CancelledError
from headrace.service.messages import (
    CommitFiles,
    FailTask,
    FinishTask,
    GetElements,
    GetSplit,
    GetSplitReply,
    ReportDepartedClient,
    ReturnSplits,
    TaskDefinition,
)
from headrace.service.ranges import Ranges, first_missing, first_n, subtract
from headrace.service.worker.delivery_policy import (
    BufferedOutput,
    DeliveryPolicy,
    UndeliveredOutput,
)
from headrace.service.worker.pending_actions import SplitGrant, WorkerActions
from headrace.service.worker.result_batch import BatchReply, ResultBatch
from headrace.service.worker.split_requests import SplitRequests

__all__ = ["DataWorkerTask", "deleted_task_error", "matches_token", "wrong_token_error"]

R = TypeVar("R")


class DataWorkerTask(Generic[R]):
    """One task, from its start to its end.

    Args:
        definition: The dispatcher's definition of the task.
        worker_id: ID of the worker.
        producer: Number of the task's producer.
        delivery: Decides which client receives which batch.
    """

    def __init__(
        self,
        definition: TaskDefinition,
        worker_id: str,
        producer: int,
        delivery: DeliveryPolicy[R],
    ) -> None:
        self.task_id: int = definition.task_id
        self.task_token: str = definition.task_token
        self.producer = producer
        self.is_finished: bool = False
        """Whether clients may learn that the task has ended."""
        self.finish_deadline: float = math.inf
        """When the task is finished even if the dispatcher has not replied."""
        self._worker_id = worker_id
        self._split_requests = SplitRequests() if definition.assigns_splits else None
        #: Assignment number at the last pause; no elements are held back at that point.
        self._grants_at_pause = 0
        self._delivery = delivery
        #: Whether the producer has made a batch and waits for room for the next one.
        self._waits_for_room = False
        self._has_ended = False
        self._is_draining = False
        self._failure: str | None = None
        #: Output that was not delivered when the task was cancelled.
        self.undelivered: UndeliveredOutput | None = None

    @property
    def reads_splits(self) -> bool:
        """Whether the task reads assigned splits, not the whole plan."""
        return self._split_requests is not None

    @property
    def is_complete(self) -> bool:
        """Whether the task is finished and everything is acknowledged."""
        return self.is_finished and self._delivery.is_fully_acknowledged

    @property
    def received_splits(self) -> Ranges:
        """Splits that clients received completely, if that is tracked per split."""
        return self._delivery.acknowledged_splits[0]

    @property
    def is_abandoned(self) -> bool:
        """Whether all clients have departed, so that remaining splits can be returned."""
        return self.reads_splits and self._delivery.is_abandoned

    @property
    def buffered(self) -> BufferedOutput:
        """Output that waits for clients."""
        return self._delivery.buffered

    # --- clients ----------------------------------------------------------------------------------

    def request_received(
        self, request: R, message: GetElements, now: float, actions: WorkerActions[R]
    ) -> None:
        """Answer a request now or later."""
        if not matches_token(message.task_token, self.task_token):
            actions.replies.append((request, wrong_token_error(self.task_id)))
            return
        self._add_replies(self._delivery.request_received(request, message, now), actions)

    def remove_client(self, client_id: str, actions: WorkerActions[R]) -> ReportDepartedClient:
        """Stop delivery to a departed client; return the report about it."""
        replies, departure = self._delivery.remove_client(client_id)
        self._add_replies(replies, actions)
        delivered, partially_delivered = self._delivery.acknowledged_splits
        return ReportDepartedClient(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.task_token,
            client_id=client_id,
            unacknowledged=departure.unacknowledged,
            possibly_lost=departure.possibly_lost,
            partially_unacknowledged=departure.partially_unacknowledged,
            partially_acknowledged=departure.partially_acknowledged,
            delivered=delivered,
            partially_delivered=partially_delivered,
        )

    def forget_client(self, client_id: str, actions: WorkerActions[R]) -> None:
        """Forget what a departed client had not acknowledged: the dispatcher knows it."""
        self._add_replies(self._delivery.forget_client(client_id), actions)

    def drop_expired(self, now: float, actions: WorkerActions[R]) -> None:
        """Drop batches held by silent clients of a task that reads its whole plan.

        Batches of assigned splits are kept until the dispatcher reports that a client departed.
        """
        if self.reads_splits:
            return
        replies, lost = self._delivery.drop_expired(now)
        if lost:
            actions.warnings.append(
                f"task {self.task_id}: {lost} elements dropped: their client neither "
                "acknowledged them nor sent a request for too long"
            )
        self._add_replies(replies, actions)

    def _add_replies(self, replies: list[tuple[R, BatchReply]], actions: WorkerActions[R]) -> None:
        actions.replies += replies
        if self._waits_for_room and self._delivery.has_room:
            self._waits_for_room = False
            actions.resumes.append(self.producer)
            max_elements = self._delivery.max_batch_elements
            if max_elements is not None:
                actions.max_elements[self.producer] = max_elements

    # --- producer ---------------------------------------------------------------------------------

    def batch_produced(self, batch: ResultBatch, actions: WorkerActions[R]) -> None:
        """Add a batch."""
        self._waits_for_room = self.undelivered is None
        if self.producer in actions.resumes:
            actions.resumes.remove(self.producer)  # the batch uses the room granted before
        self._add_replies(self._delivery.add_batch(batch), actions)

    def producer_ended(self, failure: str | None, actions: WorkerActions[R]) -> None:
        """Record that no batch will follow, and the reason if the task failed."""
        self._has_ended, self._failure = True, failure
        self._waits_for_room = False
        num_assigned = (
            0
            if self._split_requests is None or failure is not None
            else self._split_requests.num_assigned
        )
        if self._split_requests is not None:
            # A read-ahead thread of the plan may have been waiting for more.
            self._split_requests.is_exhausted, self._split_requests.request_at = True, math.inf
        self._delivery.note_outcome(failed=failure is not None, drained=self._is_draining)
        self._add_replies(self._delivery.note_exhausted(num_assigned), actions)
        if self._delivery.dropped_elements:
            actions.warnings.append(
                f"task {self.task_id}: the last {self._delivery.dropped_elements} elements were "
                "dropped, because they are too few for a round of all consumers (remainder='drop')"
            )

    def splits_needed(self, now: float, actions: WorkerActions[R]) -> None:
        """Record that the producer waits for splits."""
        assert self._split_requests is not None, f"task {self.task_id} reads no assigned splits"
        self._split_requests.splits_needed(now)
        self._end_splits(actions)

    # --- dispatcher -------------------------------------------------------------------------------

    @property
    def request_splits_at(self) -> float:
        """When to request splits from the dispatcher."""
        return math.inf if self._split_requests is None else self._split_requests.request_at

    def take_split_request(self, now: float) -> GetSplit | None:
        """Return the split request that is due now, if any."""
        split_requests = self._split_requests
        if split_requests is None or split_requests.request_at > now:
            return None
        split_requests.request_at = math.inf
        return GetSplit(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.task_token,
            assignment_number=split_requests.assignment_number,
            max_splits=split_requests.request_size,
            num_done=first_missing(self._delivery.completed_splits),
        )

    def split_request_answered(
        self, call: GetSplit, reply: GetSplitReply, now: float, actions: WorkerActions[R]
    ) -> None:
        """Handle the dispatcher's reply to a split request."""
        assert self._split_requests is not None
        splits = self._split_requests.reply_received(reply, now)
        if splits is not None:
            self._delivery.assign(*splits, reply.ordinals)
        if splits is not None:
            # With each assignment, the dispatcher records what is done.
            self._delivery.forget_completed(call.num_done)
        if self.undelivered is not None or self._has_ended:
            # The splits are returned, or reassigned with the others of a failed task.
            self._split_requests.request_at = math.inf
        elif splits is not None:
            self._split_requests.is_exhausted = self._split_requests.is_exhausted or reply.is_last
            actions.grants.append(
                SplitGrant(
                    producer=self.producer,
                    splits=splits,
                    deliver_at_once=reply.is_poison_candidate,
                    ordinals=reply.ordinals,
                    num_done=call.num_done,
                )
            )
        else:
            if reply.flush and self._grants_at_pause < self._split_requests.assignment_number:
                self._grants_at_pause = self._split_requests.assignment_number
                self._split_requests.is_needed, self._split_requests.request_at = False, math.inf
                actions.grants.append(SplitGrant(producer=self.producer, is_pause=True))
            elif reply.wait:
                actions.deferrals.append(self.producer)
            self._end_splits(actions)

    def files_to_report(self) -> CommitFiles | None:
        """Return the report of completed files that is due, if any."""
        report = self._delivery.unreported_files
        if report is None or self.undelivered is not None:
            return None
        number, files, done = report
        return CommitFiles(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.task_token,
            report_number=number,
            files=files,
            num_done=done,
        )

    def files_reported(self, number: int, actions: WorkerActions[R]) -> None:
        """Record that the dispatcher acknowledged a report of files."""
        self._delivery.files_reported(number)
        self._add_replies([], actions)

    def _end_splits(self, actions: WorkerActions[R]) -> None:
        split_requests = self._split_requests
        if (
            split_requests is not None
            and split_requests.is_exhausted
            and split_requests.is_needed
            and not self._has_ended
        ):
            split_requests.is_needed, split_requests.request_at = False, math.inf
            actions.grants.append(SplitGrant(producer=self.producer))

    @property
    def should_report(self) -> bool:
        """Whether the task has ended and the dispatcher does not know it."""
        return (
            self._has_ended
            and self.undelivered is None
            and not self.is_finished
            and self.finish_deadline == math.inf
            and self._delivery.can_finish
        )

    def end_report(self) -> FinishTask | FailTask:
        """Return the report of the task's end for the dispatcher."""
        if self._failure is None:
            return FinishTask(
                worker_id=self._worker_id,
                task_id=self.task_id,
                task_token=self.task_token,
                cut_short=self._is_draining,
                num_done=first_missing(self._delivery.completed_splits) if self.reads_splits else 0,
                num_assigned=None
                if self._split_requests is None
                else self._split_requests.num_assigned,
            )
        return self.failure_report(self._failure)

    def failure_report(self, reason: str) -> FailTask:
        """Return the report of a failure of the task."""
        return FailTask(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.task_token,
            reason=reason,
        )

    def finish(self, actions: WorkerActions[R]) -> None:
        """Let clients receive the end of the task."""
        if not self.is_finished:
            self.is_finished, self.finish_deadline = True, math.inf
            self._add_replies(self._delivery.note_finished(), actions)

    # --- owner ------------------------------------------------------------------------------------

    def drain(self, actions: WorkerActions[R]) -> None:
        """Stop requesting splits or reading a whole plan, and deliver the produced elements."""
        self._is_draining = self._is_draining or not self._has_ended
        if self._split_requests is None:
            if not self._has_ended:
                actions.stops.append(self.producer)
            return
        self._split_requests.is_exhausted = True
        # Splits that the dispatcher is assigning now are still delivered.
        if not self._split_requests.is_pending:
            self._end_splits(actions)

    def cancel(self, refusal: Exception, actions: WorkerActions[R]) -> UndeliveredOutput:
        """Reject all further requests, except for batches sent before, and end the producer."""
        if self.undelivered is None:
            replies, self.undelivered = self._delivery.cancel(refusal)
            actions.replies += replies
            self._waits_for_room = False
            if self._split_requests is not None:
                self._split_requests.request_at = math.inf
            if not self._has_ended:
                actions.cancellations.append(self.producer)
        return self.undelivered

    def split_return(self) -> ReturnSplits | None:
        """Return the call that returns the splits without delivered elements, if there are any.

        Call this after the task was cancelled and its pending split request was answered.
        """
        if self._split_requests is None or self._failure is not None or self.undelivered is None:
            return None
        splits = subtract(
            first_n(self._split_requests.num_assigned), self.undelivered.delivered_splits
        )
        if not splits:
            return None
        return ReturnSplits(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.task_token,
            splits=splits,
        )


def matches_token(presented: str, token: str) -> bool:
    """Return whether the presented token equals the task's token."""
    return hmac.compare_digest(presented.encode(errors="replace"), token.encode())


def wrong_token_error(task_id: int) -> CancelledError:
    """Return the error for a request that does not present the task's token.

    It is a CancelledError, as for a cancelled task: the client then asks its dispatcher whether its
    iteration continues.
    """
    return CancelledError(
        f"the task_token of the request does not match task {task_id} of this worker: its "
        "iteration belongs to an earlier run of the dispatcher, which was restarted without its "
        "journal, or to another service. Iterate over the dataset again, and run the dispatcher "
        "with `fault_tolerant_mode` so that iterations survive its restarts"
    )


def deleted_task_error(task_id: int) -> CancelledError:
    """Return the error for clients of a task that the dispatcher deleted."""
    return CancelledError(
        f"task {task_id} has been deleted: its iteration was released, because its clients closed "
        "it or their leases expired; iterate over the dataset again"
    )
