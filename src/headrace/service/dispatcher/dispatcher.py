"""The dispatcher without its shell: one state, and a table from requests to deciders.

    request -> decide(state, request, moment) -> facts -> apply -> reply

It has no lock, clock, thread or file: `server` brings those, and makes facts durable before it
sends the replies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service import messages
from headrace.service.dispatcher import jobs, liveness, registration, splits
from headrace.service.dispatcher.decision import Decision, Limits, Moment, Presence
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update

__all__ = ["Dispatcher"]

_DECIDERS: dict[type, Callable[[DispatcherState, Any, Moment], Decision]] = {
    messages.Ping: registration.ping,
    messages.RegisterDataset: registration.register_dataset,
    messages.GetDataset: registration.get_dataset,
    messages.GetPlan: registration.get_plan,
    messages.RegisterWorker: registration.register_worker,
    messages.OpenIteration: jobs.open_iteration,
    messages.ClientHeartbeat: jobs.client_heartbeat,
    messages.CloseIteration: jobs.close_iteration,
    messages.GetTask: jobs.get_task,
    messages.FinishTask: jobs.finish_task,
    messages.GetSplit: splits.get_split,
    messages.WorkerHeartbeat: liveness.worker_heartbeat,
    messages.ReportUnreachable: liveness.report_unreachable,
    messages.GetStatus: liveness.get_status,
}

#: In this order: each sees what the one before it did.
_CHORES: tuple[Callable[[DispatcherState, Moment], list[Update]], ...] = (
    liveness.expire_workers,
    liveness.expire_clients,
    liveness.collect_idle,
)


class Dispatcher:
    """Feed it requests, take its decisions; times are in seconds of any steady clock."""

    def __init__(self, state: DispatcherState, limits: Limits, now: float) -> None:
        self.state = state
        self.presence = Presence.of(state, now)
        self.limits = limits

    def handle(self, request: messages.DispatcherRequest, now: float) -> Decision:
        """Decide a request and apply what follows.

        Raises:
            HeadraceError: The request is refused; nothing changed.
        """
        decision = self.decide(request, now)
        self.apply(decision, now)
        return decision

    def decide(self, request: messages.DispatcherRequest, now: float) -> Decision:
        """Say what follows from a request; that its sender is alive is all that is noted.

        Raises:
            HeadraceError: The request is refused.
        """
        self.presence.hear(request, now)
        moment = Moment(now, self.presence, self.limits)
        return _DECIDERS[type(request)](self.state, request, moment)

    def apply(self, decision: Decision, now: float) -> None:
        """Apply what `decide` came to; nothing may come between the two."""
        self._apply(decision.updates, now)
        if decision.suspect is not None:
            self.presence.suspects.add(decision.suspect)

    def tick(self, now: float) -> list[Update]:
        """Do what time alone asks for; return the facts, which are applied already."""
        moment = Moment(now, self.presence, self.limits)
        facts: list[Update] = []
        for chore in _CHORES:
            done = chore(self.state, moment)
            self._apply(done, now)
            facts += done
        return facts

    def _apply(self, facts: list[Update] | tuple[Update, ...], now: float) -> None:
        for fact in facts:
            self.presence.observe(fact, self.state, now)
            self.state.apply(fact)
