"""The dispatcher without its shell: one state, and a table from requests to deciders.

    request -> decide(state, request, moment) -> facts -> apply, with what follows -> reply

It has no lock, clock, thread or file: `core` brings those, and makes facts durable before it sends
the replies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from headrace.service import messages
from headrace.service.dispatcher import (
    clients,
    departures,
    gathering,
    jobs,
    liveness,
    plans,
    registration,
    retention,
    splits,
    status,
    tasks,
)
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.assignment import consequences, struck_by
from headrace.service.dispatcher.contradiction import illegal
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.limits import Limits
from headrace.service.dispatcher.losses import notice
from headrace.service.dispatcher.modes import policy_of
from headrace.service.dispatcher.presence import Presence
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.unoffered import Unoffered
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.distributed_save import saves
from headrace.serving.presence import Pulse

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_DECIDERS: dict[type, Callable[[DispatcherState, Any, Moment], Decision]] = {
    messages.Ping: registration.ping,
    messages.RegisterDataset: registration.register_dataset,
    messages.GetDataset: registration.get_dataset,
    messages.RegisterWorker: registration.register_worker,
    messages.PutPlan: plans.put_plan,
    messages.GetPlan: plans.get_plan,
    messages.OpenIteration: jobs.open_iteration,
    messages.ClientHeartbeat: clients.client_heartbeat,
    messages.SettleTask: clients.settle_task,
    messages.CloseIteration: clients.close_iteration,
    messages.DropClient: departures.drop_client,
    messages.GetTask: tasks.get_task,
    messages.FinishTask: tasks.finish_task,
    messages.FailTask: tasks.fail_task,
    messages.GetSplit: splits.get_split,
    messages.HandBack: splits.hand_back,
    messages.WorkerHeartbeat: liveness.worker_heartbeat,
    messages.WorkerLeaving: liveness.worker_leaving,
    messages.WorkerLeft: liveness.worker_left,
    messages.ReportUnreachable: liveness.report_unreachable,
    messages.GatherPlace: gathering.gather_place,
    messages.GetStatus: status.get_status,
    messages.BeginSave: saves.begin_save,
    messages.GetSave: saves.get_save,
    messages.SaveFiles: saves.save_files,
    saves.LookAtSaves: saves.look_at_saves,
    saves.NoteSave: saves.note_save,
}

#: In this order: each sees what the one before it did.
_CHORES: tuple[Callable[[DispatcherState, Moment], list[Update]], ...] = (
    liveness.expire_workers,
    liveness.give_up_unreachable,
    liveness.note_lasting_copies,
    clients.expire_clients,
    clients.settle_for_silent,
    retention.collect_idle,
    retention.forget_tasks,
    retention.forget_unused,
)


class Dispatcher:
    """Feed it requests, take its decisions; times are in seconds of any steady clock."""

    def __init__(self, state: DispatcherState, limits: Limits, now: float) -> None:
        self.state = state
        self.presence = Presence.of(state, now)
        self.limits = limits
        self._pulse = Pulse(limits.tick_interval, now)

    @property
    def blobs(self) -> Collection[bytes]:
        """Digests of the plans that are here, or arriving."""
        return self.state.plans.keys() | self.presence.uploads.keys()

    def handle(
        self, request: messages.DispatcherRequest, now: float
    ) -> tuple[Decision, list[Update]]:
        """Decide a request and apply what follows; return all the facts beside the decision.

        Raises:
            HeadraceError: The request is refused; nothing changed.
        """
        decision = self.decide(request, now)
        return decision, self.apply(decision, now)

    def decide(self, request: messages.DispatcherRequest, now: float) -> Decision:
        """Say what follows from a request; that its sender is alive is all that is noted.

        Raises:
            HeadraceError: The request is refused.
        """
        self.presence.hear(request, now)
        self.presence.activity.hear(self.state, request, now)
        moment = self._moment(now)
        return _DECIDERS[type(request)](self.state, request, moment)

    def apply(self, decision: Decision, now: float) -> list[Update]:
        """Apply what `decide` found, before anything else happens; return all facts of it.

        The decision has its reply then, if it had none before.

        Raises:
            IllegalFactError: It contradicts the state, which may be half changed.
        """
        for note in decision.notes:
            self.presence.take(note, now)
        facts = self._apply(decision.updates, now)
        decision.conclude(self.state)
        return facts

    def tick(self, now: float) -> list[Update]:
        """Do what time alone asks for; return the facts, which are applied already.

        To be called every `limits.tick_interval` seconds. When a call is late, this process was
        paused, and nobody could be heard meanwhile: the pause is nobody's silence, and what was
        sent during it is heard before anybody is declared gone.

        Raises:
            IllegalFactError: A fact contradicts the state, which may be half changed.
        """
        pause = self._pulse.beat(now)
        if pause:
            self.presence.forgive(pause, now)
            return []
        self.presence.forget_old(now - self.limits.client_timeout, now)
        moment = self._moment(now)
        facts: list[Update] = []
        for chore in _CHORES:
            facts += self._apply(chore(self.state, moment), now)
        for words in liveness.late_heartbeats(self.state, moment):
            _log.warning("%s", words)
        return facts

    def end_unoffered(self, now: float) -> list[Update]:
        """Give up iterations that another version began and this one does not offer.

        Returns the facts, which are applied already.
        """
        facts: list[Update] = []
        for iteration_id, iteration in [*self.state.iterations.items()]:
            if isinstance(policy_of(self.state, iteration), Unoffered):
                silent = self._moment(now).is_silent
                facts += self._apply(consequences(self.state, iteration_id, silent), now)
        return facts

    def describe(self, now: float) -> messages.DispatcherStatus:
        """Return who is there, and what is going on."""
        return status.describe(self.state, self._moment(now))

    def _moment(self, now: float) -> Moment:
        return Moment(now, self.presence, self.limits)

    def _apply(self, facts: Sequence[Update], now: float) -> list[Update]:
        applied: list[Update] = []
        for fact in facts:
            try:
                struck = struck_by(self.state, fact)
                self.presence.observe(fact, self.state, now)
                said = notice(self.state, fact)
            except Exception as error:
                raise illegal(self.state, fact, error) from error
            apply(self.state, fact)
            applied.append(fact)
            if said is not None:
                _log.warning("%s", said)
            for iteration_id in struck:
                is_silent = self._moment(now).is_silent
                follows = consequences(self.state, iteration_id, is_silent)
                applied += self._apply(follows, now)
        return applied
