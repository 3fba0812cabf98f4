"""State machine of a worker: its registration, tasks and shutdown. No thread, socket or clock.

    reply_received                    the dispatcher's reply to a call, or a failure
    request_received                  a client's request for elements
    tasks.batch_produced, ...         output of producers
    drain, stop                       shutdown by the owner
    act(now) -> WorkerActions         what to send, reply, start, assign and log now

Rule 1. A call to the dispatcher is repeated until it is answered, so lost connections do no harm.
Rule 2. A worker registers under a new id each time; the tasks of the earlier id are cancelled.
Rule 3. A draining worker takes no splits and delivers its output; a stopping one returns
    undelivered splits and unregisters. It stops after one second in any case.
Rule 4. If the dispatcher does not reply for ten seconds, a warning is logged. Time in which the
worker did not run does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from headrace.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    HeadraceError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.service.messages import (
    CommitFiles,
    DispatcherReply,
    DispatcherRequest,
    DrainWorker,
    FailTask,
    FinishTask,
    GetElements,
    GetPlan,
    GetSplit,
    GetSplitReply,
    GetTask,
    RegisterWorker,
    RegisterWorkerReply,
    ReportDepartedClient,
    ReturnSplits,
    TaskActivity,
    UnregisterWorker,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)
from headrace.service.worker.client_errors import format_error
from headrace.service.worker.delivery_policy import BufferedByTask, BufferLimits
from headrace.service.worker.draining import DrainPhase, DrainState, UndeliveredTotals
from headrace.service.worker.pending_actions import PendingActions, PendingCalls, WorkerActions
from headrace.service.worker.plan_lookups import PlanBytesCache
from headrace.service.worker.registration import ProcessorUse, Registration
from headrace.service.worker.task_table import TaskTable
from headrace.serving.rpc import reply_type

__all__ = ["DataWorkerCore"]

R = TypeVar("R")

_RETRYABLE_ERRORS = (UnavailableError, DeadlineExceededError, UnauthenticatedError)


class DataWorkerCore(Generic[R]):
    """State of one worker. `R` is the type that represents a client's request.

    Every `now` is the time in seconds of one monotonic clock. All actions are returned by `act`,
    which must be called after every input, and when the time it last returned has passed.

    Args:
        address: Address at which clients reach the worker.
        dispatcher: Address of the dispatcher, for messages.
        now: Current time.
        new_id: Returns a new id for each registration.
        random: Returns a random number 0 <= x < 1.
        tags: See `WorkerConfig.worker_tags`.
        heartbeat_interval: Seconds between heartbeats; None lets the dispatcher decide.
        dispatcher_timeout: Seconds without a reply of the dispatcher after which requests that wait
            for one fail.
        limits: Memory limits of each task.
        plan_cache: Cache of plans.
        take_activity: Returns the activity that changed since its last call, given the output of
            each task that waits for clients.
        measure_processor_use: Returns the processor use of the process, for heartbeats.

    Attributes:
        address: Address at which clients reach the worker.
        tasks: The worker's tasks, which handle requests, batches and ends.
    """

    def __init__(
        self,
        address: str,
        dispatcher: str,
        now: float,
        *,
        new_id: Callable[[], str],
        random: Callable[[], float],
        tags: tuple[str, ...] = (),
        heartbeat_interval: float | None = None,
        dispatcher_timeout: float = 3600.0,
        limits: BufferLimits | None = None,
        plan_cache: PlanBytesCache | None = None,
        take_activity: Callable[[BufferedByTask], tuple[TaskActivity, ...]] | None = None,
        measure_processor_use: Callable[[], ProcessorUse] = ProcessorUse,
    ) -> None:
        self.address = address
        self._measure_processor_use = measure_processor_use
        self._take_activity = take_activity
        self._dispatcher = dispatcher
        self._dispatcher_timeout = dispatcher_timeout
        self._pending_calls = PendingCalls(dispatcher_timeout, now, random)
        self._pending_actions: PendingActions[R] = PendingActions(self._pending_calls)
        self._registration = Registration(address, tags, new_id, heartbeat_interval)
        self.tasks: TaskTable[R] = TaskTable(
            self._pending_actions, plan_cache or PlanBytesCache(), limits
        )
        self._drain_state = DrainState(address, dispatcher)
        self._failure: HeadraceError | None = None
        self._last_failure = ""
        self._register(now)

    # --- state ------------------------------------------------------------------------------------

    @property
    def is_registered(self) -> bool:
        """Whether the dispatcher accepted this worker, as far as known."""
        return self._registration.is_registered

    @property
    def failure(self) -> HeadraceError | None:
        """Why the first registration failed; the worker stops with it."""
        return self._failure

    # --- dispatcher -------------------------------------------------------------------------------

    def reply_received(
        self, call: DispatcherRequest, reply: DispatcherReply | Exception, now: float
    ) -> None:
        """Handle the dispatcher's reply to a call, or its error.

        A late or duplicate reply changes nothing. A lost reply need not be reported; if the loss is
        known, an `UnavailableError` repeats the call sooner.
        """
        if isinstance(call, RegisterWorker) and isinstance(reply, AbortedError):
            # The worker waits for a slot in the fixed list of workers.
            self._pending_calls.note_reply(now)
            self._call_failed(call, reply, now)
        elif isinstance(reply, _RETRYABLE_ERRORS) and not self._is_rejected(call, reply):
            self._call_failed(call, reply, now)
        elif self._pending_calls.resolve(call, now):
            self._drain_state.is_dispatcher_unreachable = False
            self._handle_reply(call, reply, now)

    def _is_rejected(self, call: DispatcherRequest, reply: Exception) -> bool:
        """Return whether the dispatcher denies access to a worker that never registered."""
        first = isinstance(call, RegisterWorker) and not self._registration.was_ever_registered
        return first and isinstance(reply, UnauthenticatedError)

    def _call_failed(self, call: DispatcherRequest, error: Exception, now: float) -> None:
        failures = self._pending_calls.note_failure(call, now)
        if not failures:
            return
        self._last_failure = f" Last error: {error}"
        self._pending_actions.check_at(self._pending_calls.next_deadline)
        if isinstance(call, FinishTask | FailTask):
            # The call is repeated, but clients need not wait for it.
            self.tasks.end_reported(call, error, now)
        # While the worker stops, there is no time to wait for a lost dispatcher.
        self._drain_state.is_dispatcher_unreachable |= failures > 1

    def _handle_reply(self, call: DispatcherRequest, reply: Any, now: float) -> None:
        expected = reply_type(type(call))
        if not isinstance(reply, expected | Exception):
            reply = HeadraceError(
                f"dispatcher {self._dispatcher} replied to {type(call).__name__} with "
                f"{type(reply).__name__}, expected {expected.__name__}; check that it and worker "
                f"{self.address} run the same version of Headrace"
            )
        _REPLY_HANDLERS[type(call)](self, call, reply, now)

    # --- registration -----------------------------------------------------------------------------

    def _register(self, now: float) -> None:
        message = self._registration.start()
        self.tasks.reset(message.worker_id)
        self._pending_actions.call_dispatcher(message, now)

    def _registration_answered(
        self, call: RegisterWorker, reply: RegisterWorkerReply | Exception, now: float
    ) -> None:
        if isinstance(reply, RegisterWorkerReply):
            self._registration.accepted_by_dispatcher(reply, now)
            self.tasks.worker_registered(now)
        elif self._registration.was_ever_registered:
            self._pending_actions.actions.warnings.append(
                f"dispatcher {self._dispatcher} rejected the new registration of worker "
                f"{self.address}, which retries: {format_error(reply)}"
            )
            self._registration.rejected_by_dispatcher(now)
            self.tasks.registration_rejected()
        else:
            self._failure = HeadraceError(format_error(reply))
            if isinstance(reply, HeadraceError):
                self._failure = reply
            self._finish()
        self._pending_actions.check_at(self._registration.due_at)

    def _heartbeat_answered(
        self, call: WorkerHeartbeat, reply: WorkerHeartbeatReply | Exception, now: float
    ) -> None:
        self._registration.heartbeat_answered(reply, now)
        self._pending_actions.check_at(self._registration.due_at)
        if isinstance(reply, WorkerHeartbeatReply):
            is_known = self._registration.matches_dispatcher(reply)
        else:
            is_known = not isinstance(reply, NotFoundError)
        if not is_known:
            if self._drain_state.is_requested:
                # Its splits were reassigned, and clients no longer ask for them.
                self.stop(now)
            else:
                self._reregister(now)
        elif isinstance(reply, WorkerHeartbeatReply):
            for task_id, client_id in reply.departed_clients:
                self.tasks.client_departed(task_id, client_id, now)
            for task_id in reply.tasks_to_delete:
                self.tasks.delete(task_id)
            if not self._drain_state.is_requested:
                for task_id in reply.tasks_to_start:
                    self.tasks.start_task(task_id, now)

    def _reregister(self, now: float) -> None:
        self._pending_actions.actions.warnings.append(
            f"dispatcher {self._dispatcher} no longer knows worker {self.address} (it was "
            "restarted, or the worker's lease expired); the worker registers again"
        )
        self.tasks.cancel(
            CancelledError(
                f"worker {self.address} registers again, because the dispatcher no longer knows "
                "it; its earlier tasks are cancelled"
            )
        )
        self._pending_calls.discard()
        self._register(now)

    # --- tasks ------------------------------------------------------------------------------------

    def request_received(self, request: R, message: GetElements, now: float) -> None:
        """Handle a client's request; exactly one reply follows, now or later."""
        if self._drain_state.has_stopped_delivery and message.task_id not in self.tasks:
            self._pending_actions.actions.replies.append((request, _stopping_error()))
        else:
            self.tasks.request_received(request, message, now)

    def _split_request_answered(
        self, call: GetSplit, reply: GetSplitReply | Exception, now: float
    ) -> None:
        if not self.tasks.split_request_answered(call, reply, now):
            # The dispatcher may no longer know the worker, which a heartbeat finds out.
            self._registration.due_at = now
            self._pending_actions.check_at(now)

    # --- shutdown ---------------------------------------------------------------------------------

    def drain(self, seconds: float, now: float) -> None:
        """Deliver buffered output for at most `seconds`, then stop."""
        if self._drain_state.is_requested:
            return
        if not self.is_registered:
            self.stop(now)
            return
        self._drain_state.drain(seconds, now)
        self._pending_actions.call_dispatcher(
            DrainWorker(worker_id=self._registration.worker_id), now
        )
        self.tasks.drain(now)

    def stop(self, now: float) -> None:
        """Return undelivered splits and unregister, within one second."""
        if self._drain_state.has_stopped_delivery:
            return
        self._drain_state.await_splits(now)
        self.tasks.cancel(_stopping_error())
        self._registration.due_at = math.inf
        # Splits that are assigned from now on are returned, and ends of tasks are still reported.
        self._pending_calls.discard(
            lambda call: not isinstance(call, GetSplit | FinishTask | FailTask)
        )

    def _advance_drain(self, now: float) -> None:
        drain_state, calls = self._drain_state, self._pending_calls
        if drain_state.phase is DrainPhase.DRAINING:
            num_undelivered = self.tasks.undelivered_count
            self._pending_actions.actions.warnings += drain_state.drain_warnings(
                num_undelivered, now
            )
            if not num_undelivered or drain_state.is_phase_over(now):
                self.stop(now)
        if drain_state.phase is DrainPhase.AWAITING_SPLITS and (
            drain_state.is_phase_over(now) or not calls.pending_of(GetSplit)
        ):
            calls.discard(lambda call: isinstance(call, GetSplit))
            outputs, returns = self.tasks.undelivered()
            drain_state.return_splits(UndeliveredTotals.add_up(outputs, returns))
            for split_return in returns:
                self._pending_actions.call_dispatcher(split_return, now)
        if drain_state.phase is DrainPhase.RETURNING_SPLITS and not calls.pending_of(
            ReturnSplits, FinishTask, FailTask
        ):
            drain_state.phase = DrainPhase.UNREGISTERING
            self._pending_actions.call_dispatcher(
                UnregisterWorker(worker_id=self._registration.worker_id), now
            )
        has_unregistered = drain_state.phase is DrainPhase.UNREGISTERING and not calls.pending_of(
            UnregisterWorker
        )
        if has_unregistered or (
            drain_state.has_stopped_delivery and drain_state.is_phase_over(now)
        ):
            self._finish()
        self._pending_actions.check_at(drain_state.next_check_at)

    def _finish(self) -> None:
        self._pending_actions.actions.warnings += self._drain_state.finish()
        self._pending_calls.discard()
        self._registration.due_at = math.inf

    # --- actions ----------------------------------------------------------------------------------

    def act(self, now: float) -> WorkerActions[R]:
        """Return the actions for now. Returned actions count as executed."""
        if self._pending_actions.is_check_due(now):
            self._run_timers(now)
        if self._drain_state.is_requested and not self._drain_state.is_stopped:
            self._advance_drain(now)
        actions = self._pending_actions.take_actions(now)
        if self._drain_state.is_stopped:
            actions.is_finished, actions.wake_in = True, math.inf
        return actions

    def _run_timers(self, now: float) -> None:
        """Do what is due at this time."""
        pending_actions, registration = self._pending_actions, self._registration
        if now >= registration.due_at:
            if registration.is_registered:
                activity = (
                    () if self._take_activity is None else self._take_activity(self.tasks.buffered)
                )
                pending_actions.call_dispatcher(
                    registration.make_heartbeat(
                        self.tasks.running, activity, self._measure_processor_use()
                    ),
                    now,
                )
                self.tasks.drop_expired(now)
            else:
                self._register(now)
        self.tasks.run_timers(now)
        for call in self._pending_calls.take_expired(now):
            self._call_expired(call, now)
        pending_actions.actions.calls += self._pending_calls.take_retries(now)
        silence = self._pending_calls.silence_to_report(now)
        if silence:
            pending_actions.actions.warnings.append(
                f"dispatcher {self._dispatcher} has not replied to worker {self.address} for "
                f"{silence:.0f} s: is it running at this address?"
            )
        failing_call = self._pending_calls.failing_call_to_report(now)
        if failing_call is not None:
            pending_actions.actions.warnings.append(
                f"dispatcher {self._dispatcher}: {type(failing_call[0]).__name__} of worker "
                f"{self.address} has failed for {failing_call[1]:.0f} s, while other requests "
                f"succeed.{self._last_failure}"
            )
        pending_actions.check_at(min(registration.due_at, self._pending_calls.next_deadline))

    def _call_expired(self, call: DispatcherRequest, now: float) -> None:
        """Fail the requests that wait for an expired call, or else repeat the call."""
        is_first = isinstance(call, RegisterWorker) and not self._registration.was_ever_registered
        if not (is_first or isinstance(call, GetTask | GetPlan | GetSplit)):
            self._pending_actions.call_dispatcher(call, now)
            return
        error = UnavailableError(
            f"dispatcher {self._dispatcher} did not reply to {type(call).__name__} of worker "
            f"{self.address} for {self._dispatcher_timeout:g} s: is it running at this address?"
            f"{self._last_failure}"
        )
        self._handle_reply(call, error, now)


def _stopping_error() -> CancelledError:
    return CancelledError("the worker is shutting down")


def _ignore_reply(core: DataWorkerCore[Any], call: Any, reply: Any, now: float) -> None:
    """Ignore a reply whose arrival is all that matters."""


_REPLY_HANDLERS: dict[type, Callable[[DataWorkerCore[Any], Any, Any, float], None]] = {
    RegisterWorker: DataWorkerCore._registration_answered,
    WorkerHeartbeat: DataWorkerCore._heartbeat_answered,
    GetTask: lambda core, *reply: core.tasks.definition_received(*reply),
    GetPlan: lambda core, *reply: core.tasks.plan_part_received(*reply),
    GetSplit: DataWorkerCore._split_request_answered,
    # A rejected call counts as answered, too: the iteration was closed.
    FinishTask: lambda core, *reply: core.tasks.end_reported(*reply),
    FailTask: lambda core, *reply: core.tasks.end_reported(*reply),
    ReportDepartedClient: lambda core, *reply: core.tasks.departed_client_reported(*reply),
    CommitFiles: lambda core, *reply: core.tasks.files_reported(*reply),
    ReturnSplits: _ignore_reply,
    DrainWorker: _ignore_reply,
    UnregisterWorker: _ignore_reply,
}
"""Handlers of the replies by request type."""
