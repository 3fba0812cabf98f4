"""Runner of the worker's core: one lock, one I/O thread, and a thread per producer.

The thread that passes an input to the core, of a server or producer, executes the replies and
grants that result. Calls to the dispatcher are made by the I/O thread, which also runs the core's
timers. Commands for producers are executed under the lock, so that they stay in order; requests are
answered without it, because that may take a while.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.errors import CancelledError, UnavailableError
from headrace.execution.iterator import ElementIterator
from headrace.service.messages import (
    DispatcherRequest,
    Done,
    GetElements,
    TaskActivity,
)
from headrace.service.modes.distributed_save.producer import FileProducer
from headrace.service.worker.client_errors import format_error, to_client_error
from headrace.service.worker.core import DataWorkerCore
from headrace.service.worker.delivery_policy import BufferedByTask
from headrace.service.worker.hang_detector import HangDetector
from headrace.service.worker.pending_actions import StartProducer, WorkerActions
from headrace.service.worker.producer import MAX_BATCH_ELEMENTS, Producer
from headrace.service.worker.producer_channel import ProducerChannel
from headrace.service.worker.registry import is_ordered
from headrace.service.worker.replies import send_reply
from headrace.service.worker.reply_compressor import ReplyCompressor
from headrace.service.worker.result_batch import BatchReply, ResultBatch
from headrace.service.worker.step_profiler import StepProfiler
from headrace.service.worker.task_iterator import open_plan
from headrace.service.worker.task_metrics import WorkerMetrics, WorkerTotals
from headrace.serving.connections import PeerLost, ReplyReceived
from headrace.serving.session_runner import SessionRunner
from headrace.transport.channel import Buffer, Channel, Request

__all__ = ["DataWorkerRunner"]

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.8
_STOP_SECONDS = 0.95
"""Maximum seconds for closing, and the part of it in which the core must have stopped."""
_DISPATCHER = "dispatcher"
_EXPIRY_SECONDS = 30.0
"""Calls are repeated much earlier, so late replies do not matter."""
_MAX_WAIT = 5.0
_RECOVERY_SECONDS = 0.05


class DataWorkerRunner:
    """Runs a worker's core from `open` to `close`.

    Args:
        connect: Opens a channel to the dispatcher; called on the I/O thread.
        hang_timeout: Seconds without progress after which a task counts as hung; 0.0 disables this.
    """

    def __init__(self, connect: Callable[[], Channel], hang_timeout: float = 0.0) -> None:
        self._connect = connect
        self._address = ""
        self._runner = SessionRunner("headrace-worker", self._process_events, self._recover)
        self._metrics = WorkerMetrics()
        self._profiler = StepProfiler(
            self._metrics, HangDetector(self._metrics, hang_timeout).check
        )
        #: This attribute and those below are protected by the runner's lock.
        self._core: DataWorkerCore[Request] | None = None
        self._channels: dict[int, ProducerChannel] = {}
        self._producers: dict[int, Producer | FileProducer] = {}
        self._outgoing_calls: deque[DispatcherRequest] = deque()
        #: Time of the next check by the I/O thread.
        self._next_check_at = 0.0
        self._is_finished = False
        self._compressor = ReplyCompressor(_send_reply)

    @property
    def is_finished(self) -> bool:
        """Whether the core has stopped."""
        return self._is_finished

    @property
    def num_tasks(self) -> int:
        """Number of tasks that are not finished."""
        with self._runner.lock:
            return 0 if self._core is None else len(self._core.tasks.running)

    @property
    def is_registered(self) -> bool:
        """Whether the dispatcher accepted this worker, as far as known."""
        with self._runner.lock:
            return self._core is not None and self._core.is_registered

    def take_changes(self, buffered: BufferedByTask) -> tuple[TaskActivity, ...]:
        """Return the activity of tasks that changed since the last call."""
        return self._metrics.take_changes(buffered)

    def totals(self) -> WorkerTotals:
        """Return the totals of all tasks since the start."""
        with self._runner.lock:
            buffered: BufferedByTask = {} if self._core is None else self._core.tasks.buffered
        return self._metrics.totals(buffered)

    # --- lifecycle --------------------------------------------------------------------------------

    def open(self, core: DataWorkerCore[Request]) -> None:
        """Start. `close` must be called afterwards, even if this raises."""
        with self._runner.lock:
            if self._is_finished:
                raise _stopped_early_error()
            self._address, self._core = core.address, core
            self._runner.start()
        self._profiler.start()

    def register(self) -> None:
        """Wait until the worker is registered.

        Raises:
            HeadraceError: If the dispatcher rejects the worker or does not reply.
            CancelledError: If the worker was stopped.
        """
        core = self._core
        assert core is not None
        self._runner.wait(lambda: core.is_registered or self._is_finished)
        if core.failure is not None:
            raise core.failure
        if not core.is_registered:
            raise _stopped_early_error()

    def drain(self, seconds: float) -> None:
        """Deliver buffered output for at most `seconds`; return when that is done."""
        if self._handle_event(lambda core, now: core.drain(seconds, now)):
            self._runner.wait(lambda: self._is_finished)

    def close(self) -> None:
        """Stop the worker and its threads, within a time limit. Idempotent."""
        deadline = time.monotonic() + _STOP_SECONDS
        self._profiler.stop()
        if self._runner.is_current_thread:
            # The garbage collector found a dropped server; there is no thread to unregister with.
            self._is_finished = self._runner.is_closed = True
            return
        if self._handle_event(lambda core, now: core.stop(now)):
            self._runner.wait(lambda: self._is_finished, _LEAVE_SECONDS)
        with self._runner.lock:
            self._is_finished = self._runner.is_closed = True
            self._runner.notify()
            channels, producers = list(self._channels.values()), list(self._producers.values())
        self._runner.wake()
        for channel in channels:
            channel.close()
        self._compressor.close()
        for producer in producers:
            producer.join(deadline - time.monotonic())
        self._runner.close(deadline - time.monotonic())
        self._profiler.join(deadline - time.monotonic())

    # --- clients ----------------------------------------------------------------------------------

    def handle(self, requests: Sequence[Request]) -> None:
        """Answer requests of clients, now or later (`transport.channel.Handler`)."""
        element_requests: list[tuple[Request, GetElements]] = []
        for request in requests:
            if isinstance(request.message, GetElements):
                element_requests.append((request, request.message))
            else:
                request.reply(Done())

        def handle_requests(core: DataWorkerCore[Request], now: float) -> None:
            for request, message in element_requests:
                core.request_received(request, message, now)

        if element_requests and not self._handle_event(handle_requests):
            for request, _ in element_requests:
                request.fail(UnavailableError("the worker is not ready yet"))

    # --- inputs -----------------------------------------------------------------------------------

    def _handle_event(self, event: Callable[[DataWorkerCore[Request], float], None]) -> bool:
        """Pass an input to the core and execute the actions; return False without a core."""
        with self._runner.lock:
            core = self._core
            if core is None:
                return False
            now = time.monotonic()
            event(core, now)
            actions = self._run_actions(core, now)
            must_wake = bool(self._outgoing_calls) or now + actions.wake_in < self._next_check_at
        if must_wake:
            self._runner.wake()
        self._send_replies(actions)
        return True

    def _run_actions(self, core: DataWorkerCore[Request], now: float) -> WorkerActions[Request]:
        """Execute the actions whose order matters; return the rest, to run unlocked."""
        actions = core.act(now)
        self._outgoing_calls += actions.calls
        failed = [each for each in map(self._start_producer, actions.starts) if each is not None]
        for producer in actions.resumes:
            self._channels[producer].resume(actions.max_elements.get(producer))
        for grant in actions.grants:
            self._channels[grant.producer].grant(grant)
        for producer in actions.deferrals:
            self._channels[producer].defer()
        for producer in actions.stops:
            self._channels[producer].stop()
        for producer in actions.cancellations:
            self._channels[producer].close()
        self._is_finished = self._is_finished or actions.is_finished
        self._runner.is_closed = self._is_finished
        self._runner.notify()
        if not failed:
            return actions
        for producer, error in failed:
            core.tasks.batch_produced(
                producer, ResultBatch(first_element=0, error=to_client_error(error)), now
            )
            core.tasks.producer_ended(producer, f"it cannot be started: {format_error(error)}", now)
        later_actions = self._run_actions(core, now)
        for producer, _ in failed:
            del self._channels[producer], self._producers[producer]
            self._metrics.end_task(producer)
        later_actions.replies[:0], later_actions.warnings[:0] = actions.replies, actions.warnings
        return later_actions

    # --- producers --------------------------------------------------------------------------------

    def _start_producer(self, start: StartProducer) -> tuple[int, BaseException] | None:
        """Start a producer; if that fails, return its number and the error."""
        definition = start.definition
        name, destination = f"task-{definition.task_id}", definition.save_destination
        metrics = self._metrics.start_task(start.producer, definition.task_id)
        channel = ProducerChannel(start.producer, self, metrics)

        def open_task(flush: Callable[[], None]) -> ElementIterator:
            next_splits = partial(channel.next_splits, flush) if definition.assigns_splits else None
            return open_plan(
                start.plan,
                definition,
                next_splits,
                worker=self._address,
                instrument=metrics.register_step,
                cost_plan=start.cost_plan,
            )

        producer: Producer | FileProducer
        if destination is None:
            producer = Producer(
                name,
                open_task,
                channel,
                counts_splits=definition.assigns_splits,
                # Each part of a round is a separate reply.
                max_elements=MAX_BATCH_ELEMENTS if definition.num_consumers is None else 1,
                reports_element_ids=definition.has_element_ids,
                is_ordered=is_ordered(definition),
                max_batch_bytes=start.max_batch_bytes,
            )
        else:
            stream = definition.task_id
            producer = FileProducer(
                name, open_task, channel, destination=destination, stream=stream
            )
        self._channels[start.producer], self._producers[start.producer] = channel, producer
        try:
            producer.start()
        except Exception as error:
            return start.producer, error
        metrics.thread_id = producer.ident
        return None

    def batch_produced(self, producer: int, batch: ResultBatch) -> None:
        """Handle a producer's batch (`producer_channel.ProducerListener`)."""
        self._handle_event(lambda core, now: core.tasks.batch_produced(producer, batch, now))

    def splits_needed(self, producer: int) -> None:
        """Handle a producer's wait for splits (`producer_channel.ProducerListener`)."""
        self._handle_event(lambda core, now: core.tasks.splits_needed(producer, now))

    def producer_ended(self, producer: int, failure: str | None) -> None:
        """Handle the end of a producer (`producer_channel.ProducerListener`)."""

        def end(core: DataWorkerCore[Request], now: float) -> None:
            core.tasks.producer_ended(producer, failure, now)
            self._producers.pop(producer, None)
            self._metrics.end_task(producer)
            channel = self._channels.pop(producer, None)
            if channel is not None:
                # A read-ahead thread of the plan may still wait for splits or request them.
                channel.close()

        self._handle_event(end)

    def _send_replies(self, actions: WorkerActions[Request]) -> None:
        """Log warnings and answer requests."""
        for warning in actions.warnings:
            _log.warning("%s", warning)
        for request, content in actions.replies:
            self._compressor.send(request, content)

    # --- I/O thread -------------------------------------------------------------------------------

    def _process_events(self, events: Sequence[ReplyReceived | PeerLost]) -> float:
        """Pass replies to the core and send its calls; return the seconds until the next run."""
        connections = self._runner.connections
        if _DISPATCHER not in connections:
            connections.add(_DISPATCHER, self._connect())
        results = [each for event in events for each in _call_results(event)]
        for message, outcome in results:
            if isinstance(outcome, Exception):
                _log.debug(
                    "the dispatcher replied to %s with an error: %s",
                    type(message).__name__,
                    outcome,
                )
        with self._runner.lock:
            core, now = self._core, time.monotonic()
            assert core is not None
            for message, outcome in results:
                core.reply_received(message, outcome, now)
            actions = self._run_actions(core, now)
            self._next_check_at = now + min(_MAX_WAIT, actions.wake_in)
            outgoing = list(self._outgoing_calls)
            self._outgoing_calls.clear()
        self._send_replies(actions)
        for call in outgoing:
            connections.send(_DISPATCHER, call, call, expires=_EXPIRY_SECONDS)
        return actions.wake_in

    def _recover(self, error: BaseException) -> bool:
        # Without this thread, the worker would be considered lost while it still delivers elements.
        # Scarce resources (memory, file descriptors) may be available again soon.
        _log.warning("error on the I/O thread, heartbeats are delayed: %s", format_error(error))
        with contextlib.suppress(Exception):
            self._runner.connections.drop(_DISPATCHER)
        time.sleep(_RECOVERY_SECONDS)
        return True


def _call_results(event: ReplyReceived | PeerLost) -> list[tuple[DispatcherRequest, Any]]:
    """Return requests, each with its reply or error."""
    if isinstance(event, PeerLost):
        return [(request, event.error) for request in event.requests]
    return [(event.request, event.reply.message)]


def _send_reply(
    request: Request, content: BatchReply, encode: Callable[[ResultBatch], Sequence[Buffer]]
) -> None:
    try:
        send_reply(request, content, encode)
    except Exception as error:
        # The other requests must still be answered, and this one must not wait forever.
        _log.exception("a reply could not be sent")
        with contextlib.suppress(Exception):
            request.fail(to_client_error(error))


def _stopped_early_error() -> CancelledError:
    return CancelledError("the worker was stopped before it was registered")
