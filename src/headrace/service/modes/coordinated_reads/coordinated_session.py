"""Session of a consumer of coordinated reads: delivers one round after another.

The base class is in `client.iteration_session`.

Rule 1. Rounds are delivered in order (`round_order`), each when the worker has reported that it
    arrived at every consumer (`round_delivery`, rule 2). So all consumers yield the same rounds.
Rule 2. Rounds are requested ahead, in the order in which they will be consumed; at most
    `max_outstanding` rounds are requested or received without being consumed.
Rule 3. When a task is lost, the client reports how many of its rounds arrived, and the dispatcher
    replies how many arrived everywhere. Those are consumed; the others are dropped by all
    consumers.
Rule 4. The client asks the dispatcher for a horizon ahead of time: the rounds that it is likely to
    consume in `_LEASE_SECONDS`.
Rule 5. A wait for other consumers fails after `wait_timeout`, or, if one of them has left, as soon
    as there is no further round that all of them have.
"""

from __future__ import annotations

import math
from typing import Any

from headrace.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    UnavailableError,
)
from headrace.service.client.actions import ClientActions, ReceivedBatch, TaskRequest
from headrace.service.client.heartbeat_schedule import describe_missing
from headrace.service.client.iteration_session import IterationSession
from headrace.service.messages import (
    PROGRESS_REQUEST,
    ClientHeartbeatReply,
    GetElementsReply,
    OpenIterationReply,
    ReportDelivery,
    ReportUnreachable,
    TaskAddress,
)
from headrace.service.modes.coordinated_reads.round_order import RoundOrder
from headrace.service.modes.coordinated_reads.round_task_reader import RoundTaskReader

__all__ = ["CoordinatedReadSession"]

_LEASE_SECONDS = 4.0
_FEWEST_ROUNDS = 16
_REQUESTS_PER_WINDOW = 4
"""Number of times that requests are sent while the outstanding rounds are consumed once."""
_LAG_CHECK_SECONDS = 2.0
"""Seconds between requests, during a wait, for the consumers that delay the next round."""
_LAST_ROUNDS_SECONDS = 1.0
"""Seconds to wait, after another consumer has left, for rounds that all of them have."""


class CoordinatedReadSession(IterationSession[RoundTaskReader]):
    """State of one consumer's reading of an iteration.

    Args:
        client_id: ID of this client.
        dispatcher: Address of the dispatcher, for messages.
        max_outstanding: Maximum number of rounds that are requested or buffered.
        now: Current time in seconds of a monotonic clock, as every other `now`.
        consumer: Index of this consumer.
        num_consumers: Number of consumers.
        wait_timeout: Seconds after which a wait for other consumers fails, or a wait without a
            worker that could deliver.
    """

    _remedy = "Iterate over the dataset again, on all consumers"

    def __init__(
        self,
        client_id: str,
        dispatcher: str,
        max_outstanding: int,
        now: float,
        *,
        consumer: int,
        num_consumers: int,
        wait_timeout: float = 3600.0,
    ) -> None:
        super().__init__(client_id, dispatcher, now, wait_timeout=wait_timeout)
        self._max_outstanding = max_outstanding
        self._consumer, self._num_consumers = consumer, num_consumers
        self._wait_timeout = wait_timeout
        self._round_order = RoundOrder()
        #: Every task that was ever listed.
        self._tasks: dict[int, RoundTaskReader] = {}
        #: Rounds that were delivered and are not consumed.
        self._unconsumed: set[tuple[int, int]] = set()
        #: Number of rounds consumed since the last requests.
        self._consumed_count = 0
        #: The latest attempt to read complete copies.
        self._attempts = 0
        self._missing_consumer = ""
        #: Time at which it became known that a consumer has left.
        self._left_since = math.inf
        #: Reports to the dispatcher that are not acknowledged.
        self._unreported_losses: set[int] = set()
        self._unreachable: dict[int, bool] = {}
        #: Horizon requested last; and the time of the last round count, the count, and the rate per
        #: second.
        self._requested_horizon = 0
        self._counted_at, self._counted, self._rate = now, 0, 0.0
        self._check_lag_at = 0.0

    # --- dispatcher -------------------------------------------------------------------------------

    def iteration_opened(self, reply: OpenIterationReply, now: float) -> None:
        self._update_tasks(reply.tasks)
        self._round_order.extend_horizon(math.inf if reply.finished else reply.horizon)
        self._iteration_finished, self._heartbeats.lease_seconds = reply.finished, reply.lease
        if reply.failure_reason:
            self.fail(FailedPreconditionError(reply.failure_reason))
        self._heartbeats.expedite()

    def _report_acknowledged(self, report: ReportDelivery) -> None:
        self._unreported_losses.discard(report.task_id)
        self._heartbeats.expedite()

    def _unreachable_acknowledged(self, task_id: int) -> None:
        self._unreachable.pop(task_id, None)

    def update_received(self, update: ClientHeartbeatReply, now: float) -> None:
        self._heartbeats.reply_received(now, update.heartbeat_interval)
        self._journal_problem = update.journal_problem
        if not update.unchanged:
            self._apply_update(update, now)
        for task_id, task in [*self._active_tasks.items()]:
            if task_id in self._listed_workers.keys() | self._redeliverable_tasks:
                continue
            if task.connection_error:
                # The task is finished, so all its rounds arrived.
                self._task_ended(task_id, task.received_rounds)
            elif self._iteration_finished:
                # No split was assigned to it. A worker that never received the task does not report
                # its end; and if a worker could not open the dataset, that error is ignored once
                # other tasks ended.
                self._task_ended(task_id, task.num_complete)
        # Last, because all tasks up to this horizon are known now.
        self._round_order.extend_horizon(math.inf if self._iteration_finished else update.horizon)
        waits = bool(self._unreachable or self._unreported_losses) or any(
            task.connection_error
            or not (task_id in self._active_tasks or self._round_order.has_round_count(task_id))
            for task_id, task in self._tasks.items()
        )
        stuck = not self._active_tasks and not self._iteration_finished
        self._heartbeats.schedule_next(now, is_waiting=waits or stuck)

    def _apply_update(self, update: ClientHeartbeatReply, now: float) -> None:
        self._known_version = update.version
        self._update_tasks(update.tasks)
        self._redeliverable_tasks = set(update.redeliverable)
        for task_id, rounds in update.complete_rounds:
            self._task_ended(task_id, rounds)
        for task_id in update.reports_needed:
            self._unreported_losses.add(task_id)
            self._close_task(task_id)
        self._iteration_finished, self.losses = update.finished, update.lost
        self._awaited_clients = update.awaited_clients
        if update.missing_consumer and not self._missing_consumer:
            self._missing_consumer, self._left_since = update.missing_consumer, now
        if update.failure_reason:
            self.fail(FailedPreconditionError(update.failure_reason))

    def _update_tasks(self, tasks: tuple[TaskAddress, ...]) -> None:
        self._listed_workers = {task.task_id: task.worker_address for task in tasks}
        for address in tasks:
            task_id = address.task_id
            if task_id not in self._tasks:
                self._tasks[task_id] = self._active_tasks[task_id] = RoundTaskReader(
                    address, self._consumer
                )
                self._round_order.add_task(task_id, address.starting_round or 0)
            if address.attempt > self._attempts:
                self._attempts = address.attempt
                self._warn_of_retry(address, "every worker with a copy of the dataset")

    # --- workers ----------------------------------------------------------------------------------

    def worker_replied(
        self,
        task_id: int,
        number: int,
        answer: GetElementsReply | Exception,
        payload: Any,
        now: float,
    ) -> list[ReceivedBatch]:
        task = self._active_tasks.get(task_id)
        if task is None:
            return []
        task.worker_responded()
        self._wait.worker_available()
        if isinstance(answer, CancelledError):
            # Handled as a lost worker: the dispatcher decides about its rounds.
            self._close_task(task_id)
            self._heartbeats.expedite()
        elif isinstance(answer, UnavailableError):
            task.retry_later(number, now)
        elif isinstance(answer, AbortedError):
            task.request_aborted(number, now)
        elif isinstance(answer, HeadraceError):
            self.fail(answer)
        elif isinstance(answer, Exception):
            self.fail(HeadraceError(str(answer)))
        else:
            self._accept_reply(task, number, answer, payload)
        return self.take_due(now)

    def _accept_reply(
        self, task: RoundTaskReader, number: int, answer: GetElementsReply, payload: Any
    ) -> None:
        task.update_progress(answer)
        if answer.end_of_task:
            self._task_ended(task.address.task_id, task.received_rounds)
            self._heartbeats.expedite()
        elif number == PROGRESS_REQUEST:
            task.progress_replied(answer)
        else:
            delivery = ReceivedBatch(task.address, number, answer.num_elements, payload)
            task.add_batch(number, answer, delivery)

    def take_due(self, now: float) -> list[ReceivedBatch]:
        deliveries: list[ReceivedBatch] = []
        while (turn := self._round_order.next_turn()) is not None:
            task_id, number = turn
            task = self._tasks[task_id]
            if number >= task.num_complete or number not in task.batches:
                break
            self._round_order.advance()
            self._unconsumed.add(turn)
            task.lagging_consumers = ()
            deliveries.append(task.batches.pop(number))
        if deliveries and self._wait.is_waiting:
            self._wait.begin(now)
        return deliveries

    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        task = self._active_tasks.get(task_id)
        if task is None:
            return
        task.disconnected(error, now)
        self._unreachable[task_id] = task.is_refused
        self._heartbeats.expedite()

    # --- consumer ---------------------------------------------------------------------------------

    def batch_consumed(self, task_id: int, number: int) -> bool:
        self._unconsumed.discard((task_id, number))
        self._consumed_count += 1
        # Several rounds at a time, so that their requests and reports share messages.
        return self._consumed_count >= self._max_outstanding // _REQUESTS_PER_WINDOW

    def set_waiting(self, now: float | None) -> None:
        begins = now is not None and not self._wait.is_waiting
        super().set_waiting(now)
        if now is not None and begins:
            self._check_lag_at = now + min(_LAG_CHECK_SECONDS, self._wait_timeout / 2)

    @property
    def is_finished(self) -> bool:
        return self.failure is not None or (
            self._iteration_finished
            and not self._unreported_losses
            and self._round_order.next_turn() is None
        )

    def final_reports(self, partial: tuple[int, int, int] | None) -> list[ReportDelivery]:
        return []  # no other consumer continues from here

    # --- actions ----------------------------------------------------------------------------------

    def _request_elements(self, now: float, actions: ClientActions) -> None:
        self._consumed_count = 0
        urgent = None
        if self._wait.is_waiting and now >= self._check_lag_at:
            self._check_lag_at = now + _LAG_CHECK_SECONDS
            urgent = self._round_order.next_turn()
        room = self._max_outstanding - len(self._unconsumed)
        # Not all of these are among the next rounds: a lost task loses its turns.
        num_outstanding = sum(
            [len(task.requested) + len(task.batches) for task in self._active_tasks.values()]
        )
        for index, (task_id, number) in enumerate(self._round_order.upcoming(room)):
            task = self._active_tasks.get(task_id)
            # The next round is always requested; otherwise later rounds could fill the room
            # forever.
            if (
                task is not None
                and task.should_request(number)
                and (num_outstanding < room or index == 0)
            ):
                task.requested.add(number)
                task.unsent.append(number)
                num_outstanding += 1
        for task_id, task in self._active_tasks.items():
            if now < task.retry_at:
                actions.wake_within(task.retry_at - now)
                continue
            task.resume()
            is_urgent = urgent is not None and urgent[0] == task_id
            for number, message in task.take_requests(self.client_id, now, urgent=is_urgent):
                actions.requests.append(TaskRequest(task.address, number, message))
            actions.wake_within(task.acknowledge_by - now)

    def _call_dispatcher(self, now: float, actions: ClientActions) -> None:
        horizon = self._wanted_horizon(now)
        if horizon > self._requested_horizon:
            self._heartbeats.expedite()
        if self._heartbeats.is_due(now):
            client_id = self.client_id
            for task_id in sorted(self._unreported_losses):
                task = self._tasks.get(task_id)
                empty_report = ReportDelivery(
                    client_id=client_id, task_id=task_id, delivered=(), rounds=0
                )
                actions.calls.append(empty_report if task is None else task.loss_report(client_id))
            for task_id, refused in sorted(self._unreachable.items()):
                actions.calls.append(
                    ReportUnreachable(
                        client_id=client_id, task_id=task_id, connection_refused=refused
                    )
                )
            actions.calls.append(
                self._make_heartbeat(
                    now,
                    horizon=horizon,
                    elements=self._round_order.next_number,
                    buffers=len(self._unconsumed),
                )
            )
            self._requested_horizon = max(self._requested_horizon, horizon)
            self._heartbeats.heartbeat_sent(now)
        actions.wake_within(self._heartbeats.seconds_until_due(now))

    def _wanted_horizon(self, now: float) -> int:
        """Return the horizon to request; 0 if the known one suffices for now."""
        number, seconds = self._round_order.next_number, now - self._counted_at
        if seconds >= 1.0:
            self._rate = (number - self._counted) / seconds
            self._counted_at, self._counted = now, number
        rate = max(self._rate, float(number - self._counted))
        ahead = max(_FEWEST_ROUNDS, 2 * self._max_outstanding, math.ceil(_LEASE_SECONDS * rate))
        reached = self._round_order.furthest_round
        if reached is None or self._round_order.horizon - reached >= ahead / 2:
            return 0
        return reached + ahead

    def _check_wait(self, now: float, actions: ClientActions) -> None:
        super()._check_wait(now, actions)
        if self._wait.is_waiting:
            actions.wake_within(max(0.0, self._check_lag_at - now))
            if self._missing_consumer:
                actions.wake_within(_LAST_ROUNDS_SECONDS)

    def _wait_error(self, now: float) -> HeadraceError | None:
        number, seconds = self._round_order.next_number, self._wait.seconds(now)
        since = min(seconds, now - self._left_since)
        if self._missing_consumer and since >= _LAST_ROUNDS_SECONDS:
            return FailedPreconditionError(
                f"consumer {self._consumer} of {self._num_consumers} cannot read round {number}: "
                f"{self._missing_consumer}. All consumers must read a round together; start all "
                "of them again"
            )
        problem = super()._wait_error(now)
        if problem is not None:
            return problem
        lagging = self._lagging_consumers()
        if lagging and seconds >= self._wait_timeout:
            return DeadlineExceededError(
                f"waited {seconds:.0f} s for round {number} (`wait_timeout`): "
                f"{self._describe_lagging(lagging)}"
            )
        return None

    def _lagging_consumers(self) -> tuple[int, ...]:
        turn = self._round_order.next_turn()
        task = None if turn is None else self._active_tasks.get(turn[0])
        return () if task is None else task.lagging_consumers

    def _describe_lagging(self, lagging: tuple[int, ...]) -> str:
        names = " and ".join(str(each) for each in lagging[:3])
        more = f" and {len(lagging) - 3} more" if len(lagging) > 3 else ""
        noun = "consumer" if len(lagging) == 1 else "consumers"
        return (
            f"{noun} {names}{more} of {self._num_consumers} did not read round "
            f"{self._round_order.next_number}, and all other consumers wait. Check that every "
            "consumer runs, and iterates over the dataset equally often"
        )

    @property
    def _awaited(self) -> str:
        return f"round {self._round_order.next_number}"

    def _needs_dispatcher(self, task: RoundTaskReader) -> bool:
        return True  # the dispatcher extends the horizon

    def _describe_missing(self, now: float) -> str:
        lagging = self._lagging_consumers()
        if lagging:
            return self._describe_lagging(lagging)
        if self._awaited_clients:
            names = " and ".join(self._awaited_clients[:3])
            return (
                f"no heartbeat from {names} of the same job, which must report the rounds that "
                "they received from a lost worker"
            )
        silence = self._heartbeats.silence(now)
        return describe_missing(
            self._dispatcher,
            silence,
            self._active_tasks.values(),
            (),
            now,
            listed_workers=list(self._listed_workers.values()),
            is_idle=self._wait.is_idle_for_long(now),
            journal_problem=self._journal_problem,
        )

    # --- tasks ------------------------------------------------------------------------------------

    def _close_task(self, task_id: int) -> None:
        """Stop reading a task."""
        if self._active_tasks.pop(task_id, None) is not None:
            self._unreachable.pop(task_id, None)
            self._disconnects.append(task_id)

    def _task_ended(self, task_id: int, rounds: int) -> None:
        """Record the total number of rounds of a task: those are complete, and no others."""
        self._round_order.set_round_count(task_id, rounds)
        self._close_task(task_id)
        task = self._tasks.get(task_id)
        if task is not None:
            task.num_complete = rounds
            task.batches = {
                number: batch for number, batch in task.batches.items() if number < rounds
            }
