"""Base of the client sessions: one iteration, read from all of its tasks.

Inputs and actions:

    iteration_opened, dispatcher_replied   replies of the dispatcher, or a missing reply
    worker_replied, disconnected           results of requests to workers
    batch_consumed, set_waiting            the consumer's progress
    act(now) -> ClientActions              what to send, disconnect and log now

A session has no thread, socket or clock. This module contains what does not depend on the order of
delivery: the schedule of dispatcher calls (`heartbeat_schedule`), the consumer's wait
(`set_waiting`), and pauses of this process. `read_session` delivers elements in arrival order,
`coordinated_session` one round after another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from headrace.errors import (
    HeadraceError,
    JobLostError,
    JournalUnavailableError,
    NotFoundError,
    UnavailableError,
)
from headrace.service.client.actions import ClientActions, ReceivedBatch
from headrace.service.client.compression_tuner import CompressionTuner
from headrace.service.client.heartbeat_schedule import ConsumerWait, HeartbeatSchedule
from headrace.service.client.task_reader import TaskReader
from headrace.service.messages import (
    ClientHeartbeat,
    ClientHeartbeatReply,
    DispatcherReply,
    DispatcherRequest,
    GetElementsReply,
    LostSplits,
    OpenIterationReply,
    ReportDelivery,
    ReportUnreachable,
    TaskAddress,
)
from headrace.transport.channel import Buffer

__all__ = ["IterationSession"]

T = TypeVar("T", bound=TaskReader)

_MAX_WAKE_DELAY = 2.0
"""Seconds of delay after the planned wake time that the session treats as a pause of its
process.
"""


class IterationSession(ABC, Generic[T]):
    """State of one client's reading of an iteration.

    Args:
        client_id: ID of this client.
        dispatcher: Address of the dispatcher, for messages.
        now: Current time in seconds of a monotonic clock, as every other `now`.
        wait_timeout: Seconds without a worker that could deliver, after which waiting fails.
        codec: Codec for compressed replies over slow networks; empty disables compression.
    """

    #: Advice in the error for a client that the dispatcher does not know.
    _remedy: str

    def __init__(
        self,
        client_id: str,
        dispatcher: str,
        now: float,
        *,
        wait_timeout: float,
        codec: str = "",
    ) -> None:
        self.client_id = client_id
        self.compression: CompressionTuner = CompressionTuner(codec, now)
        self._dispatcher = dispatcher
        self._heartbeats = HeartbeatSchedule(now)
        self._wait = ConsumerWait(wait_timeout)
        self._wait.set_idle(now, is_idle=True)
        #: Seconds that the consumer has waited for elements, without the wait in progress.
        self._waited_seconds = 0.0
        #: Tasks that are being read.
        self._active_tasks: dict[int, T] = {}
        #: Version of the last update from the dispatcher.
        self._known_version = -1
        #: Worker addresses by task of the iteration.
        self._listed_workers: dict[int, str] = {}
        self._redeliverable_tasks: set[int] = set()
        self._iteration_finished = False
        self._awaited_clients: tuple[str, ...] = ()
        #: Why the dispatcher cannot write its journal, and so assigns nothing; empty if it can.
        self._journal_problem = ""
        self.losses: tuple[LostSplits, ...] = ()
        self.skipped_workers: tuple[str, ...] = ()
        """Addresses of workers that this client must not read."""
        self.abandoned_splits: tuple[tuple[int, int], ...] = ()
        """Splits of the stream that are no longer assigned, in ordered reading."""
        self.urgent_tasks: frozenset[int] = frozenset()
        """Tasks that can deliver the awaited element, according to the dispatcher."""
        #: Finished tasks whose connections are still open.
        self._disconnects: list[int] = []
        self._warnings: list[str] = []
        self.failure: HeadraceError | None = None
        #: Time at which the last `act` asked to be called again.
        self._expected_wake_at = math.inf

    # --- dispatcher -------------------------------------------------------------------------------

    @abstractmethod
    def iteration_opened(self, reply: OpenIterationReply, now: float) -> None:
        """Start with the dispatcher's reply to `OpenIteration`."""

    def dispatcher_replied(
        self, request: DispatcherRequest | None, reply: DispatcherReply | Exception, now: float
    ) -> None:
        """Handle a reply of the dispatcher, or the error of a call.

        Args:
            request: The call; None if it is unknown, or for all calls in flight.
            reply: The reply or error.
            now: Current time.
        """
        if isinstance(reply, ClientHeartbeatReply):
            self.update_received(reply, now)
        elif isinstance(reply, UnavailableError):
            is_journal_error = isinstance(reply, JournalUnavailableError)
            self._journal_problem = str(reply) if is_journal_error else ""
            self.dispatcher_unreachable(now)
        elif isinstance(request, ReportDelivery):
            self._report_acknowledged(request)
        elif isinstance(request, ReportUnreachable):
            self._unreachable_acknowledged(request.task_id)
            self._heartbeats.expedite()
        elif isinstance(reply, NotFoundError):
            self.fail(
                JobLostError(
                    f"the dispatcher at {self._dispatcher} no longer knows this client "
                    f"({reply}): it was restarted without `fault_tolerant_mode`, or it received "
                    f"no heartbeat of this process for too long. {self._remedy}"
                )
            )
        elif isinstance(reply, HeadraceError):
            self.fail(reply)

    @abstractmethod
    def update_received(self, update: ClientHeartbeatReply, now: float) -> None:
        """Handle the reply to a heartbeat."""

    @abstractmethod
    def _report_acknowledged(self, report: ReportDelivery) -> None:
        """Record that the dispatcher acknowledged a delivery report."""

    @abstractmethod
    def _unreachable_acknowledged(self, task_id: int) -> None:
        """Record that the dispatcher knows that a task's worker is unreachable."""

    def dispatcher_unreachable(self, now: float) -> None:
        """Record that the dispatcher did not reply to a call."""
        self._heartbeats.reply_lost(now)

    def fail(self, error: HeadraceError) -> None:
        """End the reading with an error; the first error is kept."""
        self.failure = self.failure or error

    def _warn_of_retry(self, address: TaskAddress, lost: str) -> None:
        self._warnings.append(
            f"{lost} was lost (loss {address.attempt}): the worker at {address.worker_address} "
            "starts again from the beginning, so elements are redelivered. See the workers' logs "
            "if a function of the dataset terminates its process"
        )

    # --- workers ----------------------------------------------------------------------------------

    def measure_reply(self, task_id: int, buffers: Sequence[Buffer], now: float) -> None:
        """Measure the elements of a reply, before the reply is handled."""

    @abstractmethod
    def worker_replied(
        self,
        task_id: int,
        number: int,
        reply: GetElementsReply | Exception,
        payload: Any,
        now: float,
    ) -> list[ReceivedBatch]:
        """Handle the reply to a request, and return the batches to deliver now.

        Args:
            task_id: Task of the request.
            number: Number of the request.
            reply: The worker's reply; an exception concerns the request, not an element.
            payload: Decoded elements for the consumer, or an element's error to raise.
            now: Current time.
        """

    def take_due(self, now: float) -> list[ReceivedBatch]:
        """Return the batches to deliver now, independently of new replies."""
        return []

    @abstractmethod
    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        """Record that the connection to a task's worker was lost or could not be opened."""

    @property
    def active_tasks(self) -> set[int]:
        """Tasks that are being read."""
        return set(self._active_tasks)

    def restrict_requests(
        self, task_ids: set[int] | None, awaited_split: int | None, now: float
    ) -> bool:
        """Restrict requests to some tasks, and return whether that changes anything.

        Args:
            task_ids: The tasks that may be sent requests; None allows all.
            awaited_split: Split that the consumer waits for; None if it waits for none.
            now: Current time.
        """
        return False

    @property
    def skipped(self) -> int:
        """Number of elements that had left the cache window before this client read them."""
        return 0

    @property
    def unfinished_tasks(self) -> tuple[list[TaskAddress], list[TaskAddress]]:
        """Tasks without a known end: those being read, and those that were abandoned.

        A lost shard that another worker reads again is not abandoned.
        """
        return [], []

    # --- consumer ---------------------------------------------------------------------------------

    @abstractmethod
    def batch_consumed(self, task_id: int, number: int) -> bool:
        """Record that a batch was consumed completely; return whether to act at once."""

    def set_waiting(self, now: float | None) -> None:
        """Record that the consumer has waited since `now`; None ends the wait."""
        if now is None:
            self._wait.end()
        elif not self._wait.is_waiting:
            self._wait.begin(now)

    def add_wait(self, seconds: float) -> None:
        """End the wait, which lasted `seconds`."""
        self._waited_seconds += seconds
        self.set_waiting(None)

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether nothing more will be delivered."""

    def may_consume(self, now: float) -> bool:
        """Return whether delivered elements still belong to this client.

        After a pause of more than half the client lease, the dispatcher must confirm first that the
        client has not expired.
        """
        if self._heartbeats.note_pause(now - self._expected_wake_at):
            self._expected_wake_at = now
        return not self._heartbeats.may_be_expired or self.is_finished

    @abstractmethod
    def final_reports(self, partial: tuple[int, int, int] | None) -> list[ReportDelivery]:
        """Return the reports to send before this client leaves.

        Args:
            partial: Task and number of the batch that is partly consumed, and the number of its
                consumed elements.
        """

    # --- actions ----------------------------------------------------------------------------------

    def act(self, now: float) -> ClientActions:
        """Return the actions for now. Returned actions count as executed."""
        actions = ClientActions(disconnects=self._disconnects, warnings=self._warnings)
        self._disconnects, self._warnings = [], []
        if self.is_finished:
            return actions
        if now - self._expected_wake_at > _MAX_WAKE_DELAY:
            self._exclude_pause(now - self._expected_wake_at, now)
        self._request_elements(now, actions)
        self._call_dispatcher(now, actions)
        self._check_wait(now, actions)
        self._expected_wake_at = now + actions.wake_in
        return actions

    def _exclude_pause(self, pause: float, now: float) -> None:
        """Exclude a pause of this process from all waiting times."""
        self.may_consume(now)
        self._heartbeats.exclude_pause(pause, now)
        self._wait.exclude_pause(pause, now)
        for task in self._active_tasks.values():
            task.disconnected_at = min(now, task.disconnected_at + pause)

    @abstractmethod
    def _request_elements(self, now: float, actions: ClientActions) -> None:
        """Add the requests to workers that are due."""

    @abstractmethod
    def _call_dispatcher(self, now: float, actions: ClientActions) -> None:
        """Add the calls to the dispatcher that are due, with all pending reports."""

    def _make_heartbeat(
        self, now: float, *, elements: int, buffers: int, horizon: int = 0, wanted_split: int = -1
    ) -> ClientHeartbeat:
        return ClientHeartbeat(
            client_id=self.client_id,
            known_version=self._known_version,
            horizon=horizon,
            elements=elements,
            wait_seconds=self._waited_seconds + self._wait.seconds(now),
            buffered_batches=buffers,
            wanted_split=wanted_split,
            accepts_changes=True,
        )

    def _check_wait(self, now: float, actions: ClientActions) -> None:
        wait = self._wait
        if any(self._can_deliver(task, now) for task in self._active_tasks.values()):
            wait.worker_available()
        else:
            wait.no_worker_available(now)
        wait.set_idle(
            now,
            is_idle=not (self._active_tasks or self._redeliverable_tasks or self._awaited_clients),
        )
        if not wait.is_waiting:
            return
        error = self._wait_error(now)
        if error is not None:
            self.fail(error)
            return
        if wait.should_warn(now):
            actions.warnings.append(
                f"waited {wait.seconds(now):.0f} s for {self._awaited}: "
                f"{self._describe_missing(now)}"
            )
        actions.wake_within(wait.seconds_until_check(now))

    def _can_deliver(self, task: T, now: float) -> bool:
        if task.connection_error:
            return False
        dispatcher_fails = self._heartbeats.silence(now) or self._journal_problem
        return not (dispatcher_fails and self._needs_dispatcher(task))

    @abstractmethod
    def _needs_dispatcher(self, task: T) -> bool:
        """Return whether a task may be blocked until its worker reaches the dispatcher."""

    def _wait_error(self, now: float) -> HeadraceError | None:
        """Return the error that ends the wait, or None to continue."""
        if not self._wait.has_timed_out(now):
            return None
        return UnavailableError(
            f"no element for {self._wait.seconds(now):.0f} s, and no worker can deliver one: "
            f"{self._describe_missing(now)}"
        )

    @property
    def _awaited(self) -> str:
        return "an element"

    @abstractmethod
    def _describe_missing(self, now: float) -> str:
        """Return a description of what delays the next element."""
