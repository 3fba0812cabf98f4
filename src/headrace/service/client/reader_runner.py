"""Runner of a client's session: one lock, one I/O thread.

    I/O thread   passes replies to the session, and sends the requests that the session returns
    consumer     takes delivered batches, reports their consumption, and waits for more

Rule 1. The session is used under the lock only; its `failure` and `losses` are read without it once
    it has ended. Channels and the inbox belong to the thread; other threads only wake it.
Rule 2. Batches are appended by the thread and taken by the consumer, which removes the first batch
    only after it has stored it elsewhere.
Rule 3. The consumer may be interrupted at any point. The lock is implemented in C and is never left
    locked. A wake-up may be lost, so it only means that a check is due.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from headrace.errors import (
    CancelledError,
    FailedPreconditionError,
    HeadraceError,
    UnavailableError,
)
from headrace.execution.threads import input_wait
from headrace.process_metrics import count_skipped
from headrace.service.client.actions import ClientActions, ReceivedBatch
from headrace.service.client.read_session import ReadSession
from headrace.service.client.task_list import TaskList
from headrace.service.client.task_selector import TaskSelector
from headrace.service.messages import (
    ClientHeartbeatReply,
    CloseIteration,
    GetElementsReply,
    LostSplits,
    OpenIterationReply,
    ReportDelivery,
    TaskAddress,
)
from headrace.service.modes.coordinated_reads.coordinated_session import CoordinatedReadSession
from headrace.serving.connections import PeerLost, ReplyReceived
from headrace.serving.session_runner import SessionRunner
from headrace.threads import start_thread
from headrace.transport.channel import Channel
from headrace.transport.envelope import decode_error

__all__ = ["ChannelHandover", "ReaderRunner"]

PartlyConsumed: TypeAlias = Callable[[], tuple[ReceivedBatch, int] | None]

_log = logging.getLogger(__name__)

_SHORT_WAIT = 0.05
"""Seconds of a consumer's wait after which the I/O thread must check it."""
_MAX_WAIT = 5.0
_CLOSE_SECONDS = 0.5
_EXPIRY_SECONDS = 30.0
"""Requests to the dispatcher are repeated much earlier, so later replies do not matter."""
_DISPATCHER = "dispatcher"


class ChannelHandover:
    """Passes a reader's channel to the dispatcher from one thread to another.

    The consumer's thread opens the iteration and leaves the channel to the I/O thread, which would
    otherwise connect again: that took a tenth of a short epoch.

    Args:
        connect: Opens a channel to the dispatcher.
    """

    def __init__(self, connect: Callable[[], Channel]) -> None:
        self._connect = connect
        self._channels: list[Channel] = []
        self._is_taken = False

    def put(self, channel: Channel) -> None:
        """Store a channel, or close it if a channel was already taken."""
        if self._is_taken:
            channel.close()
        else:
            self._channels.append(channel)

    def take(self) -> Channel:
        """Return the last stored channel, or a new one."""
        self._is_taken = True
        if not self._channels:
            return self._connect()
        channel = self._channels.pop()
        # An opening that was interrupted and repeated may have left another one.
        while self._channels:
            self._channels.pop().close()
        return channel


class ReaderRunner:
    """Runs a session from `start` to `close`.

    Args:
        session: The session, used only here from now on.
        dispatcher: Address of the dispatcher, for messages.
        connect_dispatcher: Opens a channel to the dispatcher; called on the I/O thread.
        connect_worker: Opens a channel to the worker of a task; called on the I/O thread.
        reports_consumption: Whether to report at the end what was consumed, because other clients
            read the rest.
        task_selector: Selects the tasks to read.
    """

    def __init__(
        self,
        session: ReadSession | CoordinatedReadSession,
        *,
        dispatcher: str,
        connect_dispatcher: Callable[[], Channel],
        connect_worker: Callable[[TaskAddress], Channel],
        reports_consumption: bool,
        task_selector: TaskSelector,
    ) -> None:
        self._session = session
        self._dispatcher = dispatcher
        self.channel_handover: ChannelHandover = ChannelHandover(connect_dispatcher)
        self._connect_worker = connect_worker
        self._task_selector = task_selector
        self._task_list = TaskList()
        self._reports_consumption = reports_consumption
        self._runner = SessionRunner(
            "headrace-client", self._process_events, self._fail, self._close_iteration
        )
        self._batches: deque[ReceivedBatch] = deque()
        #: Wake-ups for the consumer.
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: Since when the consumer has waited.
        self._waiting_since: float | None = None
        #: Number of interruptions of waiting threads.
        self._interruptions = 0
        #: Acquired by the thread when it starts; released when it ends.
        self._started_lock, self._running_lock = threading.Lock(), threading.Lock()
        self._running_lock.acquire()
        #: Set by the thread when it starts.
        self._partly_consumed: PartlyConsumed = _nothing_consumed

    @property
    def failure(self) -> HeadraceError | None:
        """Error that ended the reading, or None."""
        with self._runner.lock:
            failure = self._session.failure
            if failure or not (self._task_selector.is_local and self._session.is_finished):
                return failure
            _, abandoned = self._session.unfinished_tasks
        shards = [task for task in abandoned if task.shard_index is not None]
        if not shards:
            return None
        return UnavailableError(f"{_describe_stopped(shards)}. Iterate over the dataset again")

    @property
    def losses(self) -> tuple[LostSplits, ...]:
        """Splits lost with workers; known at the end of the iteration."""
        return self._session.losses

    @property
    def skipped(self) -> int:
        """Number of elements that had left the cache window before this client read them."""
        return self._session.skipped

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._runner.is_closed

    # --- lifecycle --------------------------------------------------------------------------------

    def iteration_opened(self, reply: OpenIterationReply) -> None:
        """Pass the tasks in the dispatcher's reply to `OpenIteration` to the session."""
        with self._runner.lock:
            self._session.skipped_workers = self._task_selector.skipped_workers
            self._session.iteration_opened(reply, time.monotonic())

    def start(self, partly_consumed: PartlyConsumed) -> None:
        """Start the thread, unless it was started.

        If an interrupt leaves that unknown, a second thread is started, and ends at once.

        Args:
            partly_consumed: Returns the batch that the consumer has started to consume, and the
                number of its consumed elements; called at the end. The thread holds it, and thereby
                the reader: an open reader stays alive even if it is dropped.
        """
        if not self._started_lock.locked():
            start_thread(
                threading.Thread(
                    target=self._run, args=(partly_consumed,), name="headrace-client", daemon=True
                )
            )

    def close(self, partly_consumed: PartlyConsumed, *, is_known: bool) -> None:
        """Stop delivery, and wait until the thread has left the iteration and ended.

        Args:
            partly_consumed: As for `start`.
            is_known: Whether the dispatcher may know this client.
        """
        with self._runner.lock:
            self._runner.is_closed = True
            self._batches.clear()
        if not is_known:
            return
        self.start(partly_consumed)
        self._wake_consumer()
        self._runner.wake()
        if not self._runner.is_current_thread:
            with self._running_lock:
                pass

    # --- consumer ---------------------------------------------------------------------------------

    def wait_for_batch(self) -> ReceivedBatch | None:
        """Return the next batch without removing it; None at the end."""
        if not self._batches:
            self._wait(lambda: bool(self._batches) or self._session.is_finished)
        return self._batches[0] if self._batches else None

    @property
    def available_elements(self) -> int:
        """Number of elements of the first batch; 0 if there is none, or if it is an error."""
        try:
            return self._batches[0].num_elements
        except IndexError:
            return 0

    def take(self, batch: ReceivedBatch) -> None:
        """Remove the first batch, if it is this one."""
        if self._batches and self._batches[0] is batch:
            self._batches.popleft()

    def consume(self, batch: ReceivedBatch) -> None:
        """Record that a batch was consumed completely. Idempotent."""
        with self._runner.lock:
            is_urgent = self._session.batch_consumed(batch.task.task_id, batch.request_number)
        if is_urgent:
            self._runner.wake()

    def take_all(self) -> list[ReceivedBatch]:
        """Remove and return all delivered batches, without waiting; they count as consumed."""
        batches = []
        is_urgent = False
        with self._runner.lock:
            while self._batches:
                batch = self._batches.popleft()
                batches.append(batch)
                is_urgent |= self._session.batch_consumed(batch.task.task_id, batch.request_number)
        if is_urgent:
            self._runner.wake()
        return batches

    def wait_for_change(self) -> bool:
        """Wait for a batch or an abandoned split; return False at the end."""
        with self._runner.lock:
            known_splits = self._session.abandoned_splits
            known_tasks = self._session.urgent_tasks
        self._wait(
            lambda: (
                bool(self._batches)
                or self._session.is_finished
                or self._session.abandoned_splits is not known_splits
                or self._session.urgent_tasks != known_tasks
            ),
            continues=True,
        )
        with self._runner.lock:
            return not self._runner.is_closed and (
                bool(self._batches) or not self._session.is_finished
            )

    def read_status(self) -> tuple[set[int], tuple[tuple[int, int], ...], frozenset[int]]:
        """Return the tasks that are being read, the abandoned splits, and the urgent tasks."""
        with self._runner.lock:
            return (
                self._session.active_tasks,
                self._session.abandoned_splits,
                self._session.urgent_tasks,
            )

    def restrict_requests(self, task_ids: set[int] | None, awaited_split: int | None) -> None:
        """Restrict requests to some tasks.

        Args:
            task_ids: The tasks that may be sent requests; None allows all.
            awaited_split: Split that the consumer waits for; None if it waits for none.
        """
        with self._runner.lock:
            changed = self._session.restrict_requests(task_ids, awaited_split, time.monotonic())
        if changed:
            self._runner.wake()

    def renew_lease(self) -> bool:
        """Wait, after a long pause of this process, until the client's lease is confirmed.

        Returns:
            Whether delivered elements may be consumed; if not, `failure` has the reason.
        """
        with self._runner.lock:
            if self._session.may_consume(time.monotonic()):
                return True
        self._wait(lambda: self._session.may_consume(time.monotonic()))
        return self._session.failure is None

    def interrupt_waiters(self) -> None:
        """Interrupt the threads that wait here."""
        self._interruptions += 1
        self._wake_consumer()

    def end_wait(self) -> None:
        """Record that the wait of `wait_for_change` has ended."""
        with self._runner.lock:
            if self._waiting_since is not None:
                self._session.add_wait(time.monotonic() - self._waiting_since)
                self._waiting_since = None

    def _wait(self, condition: Callable[[], bool], *, continues: bool = False) -> None:
        """Wait for a condition, the end of the I/O thread, or `close`.

        Args:
            condition: Function that returns whether the condition holds.
            continues: Whether the consumer may wait again afterwards; all waits until `end_wait`
                then count as one.

        Raises:
            CancelledError: If the wait was interrupted.
        """
        interruptions = self._interruptions
        with self._runner.lock:
            if condition():
                return
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
                self._session.set_waiting(self._waiting_since)
        try:
            self._wait_until(condition, interruptions)
        except BaseException:
            self.end_wait()
            raise
        if not continues or self._interruptions != interruptions:
            self.end_wait()
        if self._interruptions != interruptions:
            raise CancelledError("the iterator was interrupted")

    @input_wait
    def _wait_until(self, condition: Callable[[], bool], interruptions: int) -> None:
        """Wait until the condition holds, or until there are more interruptions."""
        # Usually the wait is short, so the I/O thread need not check it.
        timeout = _SHORT_WAIT
        while not self._runner.is_closed and self._interruptions == interruptions:
            # With a timeout, so that the death of the I/O thread is noticed.
            try:
                self._wakeups.get(timeout=timeout)
            except queue.Empty:
                timeout = _MAX_WAIT
                self._runner.wake()
            if not self._running_lock.locked():
                break
            with self._runner.lock:
                if condition():
                    break

    def _wake_consumer(self) -> None:
        """Wake the consumer if it waits."""
        if self._wakeups.empty():
            self._wakeups.put(None)

    # --- I/O thread -------------------------------------------------------------------------------

    def _run(self, partly_consumed: PartlyConsumed) -> None:
        if not self._started_lock.acquire(blocking=False):
            return
        self._partly_consumed = partly_consumed
        try:
            self._runner.run()
        except BaseException as error:
            self._fail(error)
        finally:
            self._running_lock.release()
            self._wake_consumer()

    def _fail(self, error: BaseException) -> bool:
        _log.error("reading from the dispatcher at %s failed", self._dispatcher, exc_info=error)
        with self._runner.lock:
            self._session.fail(HeadraceError(f"reading failed with an internal error: {error!r}"))
        return False

    def _process_events(self, events: Sequence[ReplyReceived | PeerLost]) -> float:
        self._connect_dispatcher()
        self._handle_events(events)
        if self._runner.is_closed:
            return 0.0
        with self._runner.lock:
            actions = self._session.act(time.monotonic())
            is_finished = self._session.is_finished
        if is_finished:
            self._wake_consumer()
        self._run_actions(actions)
        return actions.wake_in

    def _connect_dispatcher(self) -> None:
        connections = self._runner.connections
        if _DISPATCHER not in connections:
            connections.add(_DISPATCHER, self.channel_handover.take())

    def _close_iteration(self) -> None:
        """Leave the iteration, and wait briefly for the dispatcher's reply."""
        self._log_final_warnings()
        self._connect_dispatcher()
        connections = self._runner.connections
        reports = self._final_reports(self._partly_consumed)
        for peer in connections:
            if peer != _DISPATCHER:
                connections.drop(peer)
        with contextlib.suppress(HeadraceError):
            for message in [*reports, CloseIteration(client_id=self._session.client_id)]:
                connections.send(_DISPATCHER, message, message)
            deadline = time.monotonic() + _CLOSE_SECONDS
            while (remaining := deadline - time.monotonic()) > 0:
                for event in connections.wait(remaining):
                    if isinstance(event, PeerLost) or event.request is message:
                        return

    def _log_final_warnings(self) -> None:
        """Log the session's final warnings, in case the consumer closed at once."""
        with self._runner.lock:
            warnings = (
                self._session.act(time.monotonic()).warnings if self._session.is_finished else []
            )
        for warning in warnings:
            _log.warning("%s", warning)

    def _final_reports(self, partly_consumed: PartlyConsumed) -> list[ReportDelivery]:
        """Return the reports of consumed elements, if other clients read the rest."""
        if not self._reports_consumption:
            return []
        with self._runner.lock:
            partial = partly_consumed()
            if partial is None:
                return self._session.final_reports(None)
            batch, num_consumed = partial
            return self._session.final_reports(
                (batch.task.task_id, batch.request_number, num_consumed)
            )

    def _run_actions(self, actions: ClientActions) -> None:
        connections = self._runner.connections
        for warning in actions.warnings:
            _log.warning("%s", warning)
        for task_id in actions.disconnects:
            connections.drop(task_id)
        for task, number, message in actions.requests:
            try:
                if task.task_id not in connections:
                    connections.add(task.task_id, self._connect_worker(task))
                connections.send(task.task_id, message, number)
            except UnavailableError as error:
                with self._runner.lock:
                    self._session.disconnected(task.task_id, error, time.monotonic())
            except (HeadraceError, ValueError) as error:
                # An unreadable worker affects only itself, unless the user chose the transfer
                # protocol.
                with self._runner.lock:
                    self._task_unreadable(task, error)
        for request in actions.calls:
            connections.send(_DISPATCHER, request, request, expires=_EXPIRY_SECONDS)

    def _task_unreadable(self, task: TaskAddress, error: Exception) -> None:
        if isinstance(error, FailedPreconditionError):
            self._session.fail(error)
        else:
            problem = UnavailableError(f"invalid worker address {task.worker_address!r}: {error}")
            self._session.disconnected(task.task_id, problem, time.monotonic())

    # --- events -----------------------------------------------------------------------------------

    def _handle_events(self, events: Sequence[ReplyReceived | PeerLost]) -> None:
        now = time.monotonic()
        with self._runner.lock:
            num_batches = len(self._batches)
            from_dispatcher = any(event.peer == _DISPATCHER for event in events)
            for event in events:
                if event.peer == _DISPATCHER:
                    self._dispatcher_replied(event, now)
                elif isinstance(event, PeerLost):
                    self._connection_lost(event, now)
                else:
                    self._worker_replied(event, now)
            self._batches += self._session.take_due(now)
            is_finished = self._session.is_finished
        # Also without batches: a consumer may be waiting for the renewal of the lease.
        if len(self._batches) > num_batches or is_finished or from_dispatcher:
            self._wake_consumer()

    def _connection_lost(self, event: PeerLost, now: float) -> None:
        self._runner.connections.drop(event.peer)
        if isinstance(event.error, UnavailableError):
            self._session.disconnected(event.peer, event.error, now)
        else:
            self._session.fail(event.error)

    def _worker_replied(self, event: ReplyReceived, now: float) -> None:
        task_id, number, (_, reply, buffers) = event
        if not isinstance(reply, GetElementsReply | Exception):
            reply = HeadraceError(f"unexpected reply of the worker: {type(reply).__name__}")
        payload = _decode_element_error(reply) or buffers
        if buffers:
            self._session.measure_reply(task_id, buffers, now)
        skipped_before = self._session.skipped
        self._batches += self._session.worker_replied(task_id, number, reply, payload, now)
        if self._session.skipped > skipped_before:
            count_skipped(self._session.skipped - skipped_before)

    def _dispatcher_replied(self, event: ReplyReceived | PeerLost, now: float) -> None:
        reply: Any
        if isinstance(event, PeerLost):
            request, reply = None, event.error
        else:
            request, reply = event.request, event.reply.message
        if isinstance(reply, UnavailableError):
            _log.debug(
                "no reply from the dispatcher at %s: %s; reading continues",
                self._dispatcher,
                reply,
            )
        if isinstance(reply, ClientHeartbeatReply):
            full_update = self._task_list.complete(reply)
            reply = self._task_selector.select(full_update)
            self._session.skipped_workers = self._task_selector.skipped_workers
            if self._task_selector.is_local:
                reply = self._local_update(full_update, reply)
        self._session.dispatcher_replied(request, reply, now)

    def _local_update(
        self, update: ClientHeartbeatReply, local: ClientHeartbeatReply
    ) -> ClientHeartbeatReply:
        """Remove the tasks of other processes, which end when the local tasks end.

        The rest of a stopped worker's task is awaited, because another local worker may replace it.
        A copy of the dataset ends with its worker.
        """
        if update.unchanged:
            return update
        active, abandoned = self._session.unfinished_tasks
        if local.finished and not update.finished:
            if active or (abandoned and not self._task_selector.is_copy):
                # Version -1 requests another update, although the dispatcher has no news of it.
                return msgspec.structs.replace(local, finished=False, version=-1)
            if abandoned:
                _log.warning("%s. The rest of its copy is missing", _describe_stopped(abandoned))
        return local


def _describe_stopped(tasks: Sequence[TaskAddress]) -> str:
    addresses = sorted({task.worker_address for task in tasks})
    workers = "the worker at " if len(addresses) == 1 else "the workers at "
    return (
        f"{workers}{' and '.join(addresses)} in this process stopped before all elements were "
        'delivered, and only workers of this process are read (target_workers="LOCAL", or "AUTO" '
        "with a static policy)"
    )


def _decode_element_error(reply: GetElementsReply | Exception) -> Exception | None:
    """Return the error in place of an element, if the reply has one."""
    if not isinstance(reply, GetElementsReply) or reply.error is None:
        return None
    try:
        return decode_error(reply.error)
    except msgspec.DecodeError as error:
        return HeadraceError(f"the worker sent an error that cannot be decoded: {error}")


def _nothing_consumed() -> None:
    """Return that no batch is partly consumed."""
