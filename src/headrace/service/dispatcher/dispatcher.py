"""The dispatcher as a state machine: one state, and a table from requests to deciders.

    request -> decide(state, request, context) -> events -> apply, derive events -> reply

`apply` applies each event, then the events that follow from it (`assignment.derive_events`). The
dispatcher has no lock, clock, thread or file: `core` supplies them, and makes events durable before
it sends the replies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from headrace.service import messages
from headrace.service.dispatcher import (
    checkpoint_barrier,
    clients,
    departed_clients,
    garbage_collection,
    jobs,
    liveness,
    plans,
    registration,
    splits,
    status,
    tasks,
)
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.assignment import affected_iterations, derive_events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.events import AnyEvent, WorkerLost
from headrace.service.dispatcher.invalid_event import invalid_event_error
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.losses import log_message
from headrace.service.dispatcher.policy_selection import policy_of
from headrace.service.dispatcher.service_load import measure_load
from headrace.service.dispatcher.soft_state import SoftState
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.unsupported_modes import UnsupportedMode
from headrace.service.modes.distributed_save import requests
from headrace.serving.heartbeats import PauseDetector

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_DECIDERS: dict[type, Callable[[DispatcherState, Any, DecisionContext], DispatcherDecision]] = {
    messages.Ping: registration.ping,
    messages.RegisterDataset: registration.register_dataset,
    messages.GetDataset: registration.get_dataset,
    messages.RegisterWorker: registration.register_worker,
    messages.PutPlan: plans.put_plan,
    messages.GetPlan: plans.get_plan,
    messages.OpenIteration: jobs.open_iteration,
    messages.ClientHeartbeat: clients.client_heartbeat,
    messages.ReportDelivery: clients.report_delivery,
    messages.CloseIteration: clients.close_iteration,
    messages.ReportDepartedClient: departed_clients.report_departed_client,
    messages.GetTask: tasks.get_task,
    messages.FinishTask: tasks.finish_task,
    messages.FailTask: tasks.fail_task,
    messages.GetSplit: splits.get_split,
    messages.ReturnSplits: splits.return_splits,
    messages.WorkerHeartbeat: liveness.worker_heartbeat,
    messages.DrainWorker: liveness.drain_worker,
    messages.UnregisterWorker: liveness.unregister_worker,
    messages.ReportUnreachable: liveness.report_unreachable,
    messages.ContributeCheckpoint: checkpoint_barrier.contribute_checkpoint,
    messages.GetStatus: status.get_status,
    messages.StartSave: requests.start_save,
    messages.GetSaveStatus: requests.get_save_status,
    messages.CommitFiles: requests.commit_files,
    requests.ListOpenSaves: requests.list_open_saves,
    requests.ReportDirectory: requests.report_directory,
}

#: In this order: each function sees the changes of the previous ones.
_MAINTENANCE: tuple[Callable[[DispatcherState, DecisionContext], list[AnyEvent]], ...] = (
    liveness.expire_workers,
    liveness.give_up_unreachable,
    liveness.mark_stable_copies,
    clients.expire_clients,
    clients.expire_reports,
    garbage_collection.discard_idle_iterations,
    garbage_collection.forget_lost_tasks,
    garbage_collection.forget_unused,
)


class Dispatcher:
    """State machine that decides requests; times are in seconds of any monotonic clock."""

    def __init__(self, state: DispatcherState, limits: DispatcherLimits, now: float) -> None:
        self.state = state
        self.soft_state: SoftState = SoftState.from_state(state, now)
        self.limits = limits
        self._pause_detector = PauseDetector(limits.tick_interval, now)

    @property
    def blobs(self) -> Collection[bytes]:
        """Digests of the plans that are stored or being received."""
        return self.state.plan_sizes.keys() | self.soft_state.uploads.keys()

    def handle(
        self, request: messages.DispatcherRequest, now: float
    ) -> tuple[DispatcherDecision, list[AnyEvent]]:
        """Decide a request and apply its events; return the decision and all applied events.

        Raises:
            HeadraceError: If the request is rejected; nothing changed.
        """
        decision = self.decide(request, now)
        return decision, self.apply(decision, now)

    def decide(self, request: messages.DispatcherRequest, now: float) -> DispatcherDecision:
        """Decide a request; only its sender's liveness and activity are recorded.

        Raises:
            HeadraceError: If the request is rejected.
        """
        self.soft_state.record_contact(request, now)
        self.soft_state.activity.record_heartbeat(self.state, request, now)
        context = self._context(now)
        return _DECIDERS[type(request)](self.state, request, context)

    def apply(self, decision: DispatcherDecision, now: float) -> list[AnyEvent]:
        """Apply a decision before anything else changes; return all applied events.

        The decision then has its reply.

        Raises:
            InvalidEventError: If an event contradicts the state, which may be half changed.
        """
        for soft_event in decision.soft_events:
            self.soft_state.apply(soft_event, now)
        applied = self._apply(decision.events, now)
        decision.finish_reply(self.state)
        return applied

    def tick(self, now: float) -> list[AnyEvent]:
        """Do the maintenance that depends on time; return the events, which are already applied.

        Must be called every `limits.tick_interval` seconds. A late call means that this process was
        paused and received nothing: the pause does not count as silence, and requests sent during
        it are handled before any peer is declared lost.

        Raises:
            InvalidEventError: If an event contradicts the state, which may be half changed.
        """
        pause = self._pause_detector.measure_pause(now)
        if pause:
            self.soft_state.exclude_pause(pause, now)
            return []
        self.soft_state.forget_old(now - self.limits.client_timeout, now)
        context = self._context(now)
        applied: list[AnyEvent] = []
        for maintain in _MAINTENANCE:
            applied += self._apply(maintain(self.state, context), now)
        for message in liveness.describe_late_heartbeats(self.state, context):
            _log.warning("%s", message)
        demand = self.soft_state.worker_demand
        if demand.is_due(now, reports_missing=bool(self.soft_state.activity.unreported)):
            demand.evaluate(measure_load(self.state, context))
        return applied

    def end_unsupported_iterations(self, now: float) -> list[AnyEvent]:
        """Abandon iterations whose mode this version does not support.

        Returns:
            The events, which are already applied.
        """
        applied: list[AnyEvent] = []
        for iteration_id, iteration in [*self.state.iterations.items()]:
            if isinstance(policy_of(self.state, iteration), UnsupportedMode):
                is_unheard = self._context(now).is_unheard
                applied += self._apply(derive_events(self.state, iteration_id, is_unheard), now)
        return applied

    def describe(self, now: float) -> messages.DispatcherStatus:
        """Return the status of the service."""
        return status.describe(self.state, self._context(now))

    def _context(self, now: float) -> DecisionContext:
        return DecisionContext(now, self.soft_state, self.limits)

    def _apply(self, events: Sequence[AnyEvent], now: float) -> list[AnyEvent]:
        """Apply events, each followed by those derived from it; return all of them.

        Losses of workers are applied together: workers that were lost at the same time get no task
        of each other, and the derived events are found once.
        """
        applied: list[AnyEvent] = []
        # A stack: with many tasks, chains of derived events are longer than Python's call stack.
        pending: list[_Pending] = [*reversed(_group_losses(events))]
        while pending:
            group = pending.pop()
            if isinstance(group, int):
                if group in self.state.iterations:
                    is_unheard = self._context(now).is_unheard
                    pending.append(derive_events(self.state, group, is_unheard))
                continue
            affected: dict[int, None] = {}
            for event in group:
                affected.update(dict.fromkeys(self._apply_one(event, now)))
            applied += group
            pending += reversed(affected)
        return applied

    def _apply_one(self, event: AnyEvent, now: float) -> tuple[int, ...]:
        """Apply one event; return the iterations that it affects."""
        try:
            affected = affected_iterations(self.state, event)
            self.soft_state.observe(event, self.state, now)
            message = log_message(self.state, event)
        except Exception as error:
            raise invalid_event_error(self.state, event, error) from error
        apply(self.state, event)
        if message is not None:
            _log.warning("%s", message)
        return affected


_Pending: TypeAlias = Sequence[AnyEvent] | int
"""Events to apply together, or an iteration whose derived events are due."""


def _group_losses(events: Sequence[AnyEvent]) -> list[Sequence[AnyEvent]]:
    """Return the losses of several workers as one group, other events separately."""
    if all(isinstance(event, WorkerLost) for event in events):
        return [events]
    return [(event,) for event in events]
