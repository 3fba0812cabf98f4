"""What one run of the dispatcher's process knows beside its facts: who was heard from when.

Rule. Whatever holds a time is here, so that `forgive` reaches it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.activity import Activity
from headrace.service.dispatcher.connections import Connections
from headrace.service.dispatcher.gathered import Answered, Gathered, Said
from headrace.service.dispatcher.last_use import LastUse
from headrace.service.dispatcher.state import DispatcherState, TaskPhase
from headrace.service.dispatcher.unreachable import Unreachable
from headrace.service.dispatcher.updates import Update
from headrace.service.ranges import Ranges, united
from headrace.serving.presence import Stamps

__all__ = [
    "Dismissed",
    "GotOn",
    "Left",
    "Note",
    "Paced",
    "Presence",
    "Refused",
    "Unreached",
    "Upload",
    "Uploaded",
]


@dataclass(frozen=True)
class Upload:
    """A plan of which the first `received` bytes are here."""

    received: int
    total: int
    digest: hashlib._Hash
    """Of those bytes."""
    at: float
    """When the last of them came."""


class Left(NamedTuple):
    """A worker said that it has left: its id is used no more."""

    worker_id: str


class Refused(NamedTuple):
    """A worker refuses connections."""

    worker_id: str


class Unreached(NamedTuple):
    """A client cannot reach the worker of a task."""

    task_id: int
    client_id: str


class Paced(NamedTuple):
    """A worker was asked for a heartbeat each so many seconds."""

    worker_id: str
    interval: float


class Uploaded(NamedTuple):
    """More of the plan with this digest has arrived."""

    digest: bytes
    upload: Upload


class GotOn(NamedTuple):
    """Units of a task before a number, in dealt order, are done."""

    task_id: int
    done: int


class Dismissed(NamedTuple):
    """A task was told that nothing is left for it."""

    task_id: int


Note: TypeAlias = (
    Answered | Dismissed | GotOn | Left | Paced | Refused | Said | Unreached | Uploaded
)
"""What a request says that this run of the process keeps in mind, and no other."""


@dataclass
class Presence:
    """Who was heard from when, and what else is not journaled (`serving.presence`)."""

    workers: Stamps[str] = field(default_factory=Stamps)
    clients: Stamps[str] = field(default_factory=Stamps)
    idle: Stamps[int] = field(default_factory=Stamps)
    """Iteration -> when it was last made, left by a client or finished."""
    dealt: Stamps[int] = field(default_factory=Stamps)
    """Iteration -> when units of it were last dealt."""
    got_on: Stamps[int] = field(default_factory=Stamps)
    """Task -> when more of its units were last done, or it was dealt some and held none."""
    reported: dict[int, int] = field(default_factory=dict)
    """Task -> units that it said are done."""
    dismissed: set[int] = field(default_factory=set)
    """Tasks that run and were told that nothing is left: a request of theirs that comes after that
    was late, and what it was dealt nobody would hear of."""
    backed: dict[int, Ranges] = field(default_factory=dict)
    """Iteration -> units that were taken from tasks which run on, and are slow (`backups`)."""
    ended: Stamps[int] = field(default_factory=Stamps)
    """Iteration -> when a task of it last ended, or it was made."""
    lost: Stamps[int] = field(default_factory=Stamps)
    """Iteration -> when a task of it was last lost or failed, if one was."""
    left: dict[str, float] = field(default_factory=dict)
    """Workers that have said that they left, and when: a request of theirs that comes after that
    was late."""
    suspects: set[str] = field(default_factory=set)
    """Workers that refuse a client's connection, and that were not heard from since."""
    reported_late: Stamps[str] = field(default_factory=Stamps)
    """Workers whose heartbeats are very late -> when that was last logged."""
    paces: dict[str, float] = field(default_factory=dict)
    """Worker -> seconds between heartbeats that it was asked to keep, by this run."""
    uploads: dict[bytes, Upload] = field(default_factory=dict)
    """Digest -> a plan that has not arrived whole."""
    unreachable: Unreachable = field(default_factory=Unreachable)
    last_use: LastUse = field(default_factory=LastUse)
    """Of datasets and plans that are idle."""
    copies: LastUse = field(default_factory=LastUse)
    """Since when copies run."""
    wanting: Stamps[str] = field(default_factory=Stamps)
    """Address of a worker that waits for a slot -> since when."""
    activity: Activity = field(default_factory=Activity)
    connections: Connections = field(default_factory=Connections)
    gathered: Gathered = field(default_factory=Gathered)
    """Where clients said that they stand."""

    @classmethod
    def of(cls, state: DispatcherState, now: float) -> Presence:
        """Take everyone in the state as heard from at `now`."""
        return cls(
            workers=Stamps.of(state.workers, now),
            clients=Stamps.of(state.clients, now),
            idle=Stamps.of(state.iterations, now),
            dealt=Stamps.of(state.iterations, now),
            ended=Stamps.of(state.iterations, now),
            got_on=Stamps.of(
                (task.task_id for task in state.tasks.values() if task.phase is TaskPhase.RUNNING),
                now,
            ),
            lost=Stamps.of((task.iteration_id for task in state.tasks.values() if task.gone), now),
            activity=Activity.of(state, now),
        )

    def hear(self, request: messages.DispatcherRequest, now: float) -> None:
        """Remember that the request's sender is alive, if it is somebody known."""
        worker_id = getattr(request, "worker_id", None)
        if self.workers.hear(worker_id, now):
            self.suspects.discard(worker_id)
        self.clients.hear(getattr(request, "client_id", None), now)
        self.last_use.use(getattr(request, "dataset_id", None), now)

    def wait_for_slot(self, address: str, now: float) -> float:
        """Return for how long a worker has waited for a slot, from now on if it had not."""
        return now - self.wanting.setdefault(address, now)

    def forgive(self, pause: float, now: float) -> None:
        """Take `pause` seconds, in which nobody could be heard, off everyone's silence."""
        for stamps in (
            self.workers,
            self.clients,
            self.idle,
            self.dealt,
            self.got_on,
            self.ended,
            self.lost,
            self.wanting,
            self.reported_late,
        ):
            stamps.forgive(pause, now)
        for digest, upload in self.uploads.items():
            self.uploads[digest] = replace(upload, at=min(now, upload.at + pause))
        self.unreachable.forgive(pause, now)
        self.last_use.forgive(pause, now)
        self.copies.forgive(pause, now)

    def forget_old(self, before: float, now: float) -> None:
        """Forget what is older than `before`, and reports that nobody repeated.

        That is plans of which nothing came since, and workers that left before.
        """
        self.unreachable.forget_old(now)
        self.connections.forget_others(self.workers)
        for worker_id in [each for each, since in self.left.items() if since < before]:
            del self.left[worker_id]
        for digest, upload in list(self.uploads.items()):
            if upload.at < before:
                del self.uploads[digest]
        for address in [each for each, since in self.wanting.items() if since < before]:
            del self.wanting[address]

    def take(self, note: Note, now: float) -> None:
        """Keep in mind what a request said."""
        _TAKE[type(note)](self, note, now)

    def observe(self, update: Update, state: DispatcherState, now: float) -> None:
        """Follow a fact that is about to be applied to `state`."""
        self.activity.observe(update, state, now)
        follow = _FOLLOW.get(type(update))
        if follow is not None:
            follow(self, update, state, now)


def _plan_stored(
    presence: Presence, fact: updates.PlanStored, state: DispatcherState, now: float
) -> None:
    presence.uploads.pop(fact.digest, None)


def _worker_registered(
    presence: Presence, fact: updates.WorkerRegistered, state: DispatcherState, now: float
) -> None:
    presence.workers[fact.worker_id] = now
    presence.wanting.pop(fact.address, None)


def _worker_gone(
    presence: Presence,
    fact: updates.WorkerLost | updates.WorkerLeft,
    state: DispatcherState,
    now: float,
) -> None:
    worker = state.workers[fact.worker_id]
    for task_id in worker.tasks | worker.finished:
        presence.lost[state.tasks[task_id].iteration_id] = now
    del presence.workers[fact.worker_id]
    presence.suspects.discard(fact.worker_id)
    presence.reported_late.pop(fact.worker_id, None)
    presence.paces.pop(fact.worker_id, None)


def _client_joined(
    presence: Presence, fact: updates.ClientJoined, state: DispatcherState, now: float
) -> None:
    presence.clients[fact.client_id] = now


def _client_left(
    presence: Presence, fact: updates.ClientLeft, state: DispatcherState, now: float
) -> None:
    del presence.clients[fact.client_id]
    presence.idle[state.clients[fact.client_id]] = now


def _iteration_created(
    presence: Presence, fact: updates.IterationCreated, state: DispatcherState, now: float
) -> None:
    presence.idle[fact.iteration_id] = presence.dealt[fact.iteration_id] = now
    presence.ended[fact.iteration_id] = now


def _iteration_finished(
    presence: Presence, fact: updates.IterationFinished, state: DispatcherState, now: float
) -> None:
    presence.idle[fact.iteration_id] = now


def _iteration_gone(
    presence: Presence,
    fact: updates.IterationCollected | updates.IterationForgotten,
    state: DispatcherState,
    now: float,
) -> None:
    del presence.idle[fact.iteration_id], presence.dealt[fact.iteration_id]
    del presence.ended[fact.iteration_id]
    presence.lost.pop(fact.iteration_id, None)
    presence.gathered.forget(fact.iteration_id)
    presence.backed.pop(fact.iteration_id, None)
    _forget_tasks(presence, state.iterations[fact.iteration_id].tasks)


def _tasks_forgotten(
    presence: Presence, fact: updates.TasksForgotten, state: DispatcherState, now: float
) -> None:
    _forget_tasks(presence, fact.task_ids)


def _forget_tasks(presence: Presence, task_ids: Iterable[int]) -> None:
    for task_id in task_ids:
        presence.got_on.pop(task_id, None)
        presence.reported.pop(task_id, None)
        presence.dismissed.discard(task_id)


def _task_finished(
    presence: Presence, fact: updates.TaskFinished, state: DispatcherState, now: float
) -> None:
    presence.ended[state.tasks[fact.task_id].iteration_id] = now
    presence.dismissed.discard(fact.task_id)


def _task_failed(
    presence: Presence,
    fact: updates.TaskFailed | updates.TaskLost,
    state: DispatcherState,
    now: float,
) -> None:
    iteration_id = state.tasks[fact.task_id].iteration_id
    presence.lost[iteration_id] = presence.ended[iteration_id] = now
    presence.dismissed.discard(fact.task_id)


def _units_dealt(
    presence: Presence, fact: updates.UnitsDealt, state: DispatcherState, now: float
) -> None:
    task = state.tasks[fact.task_id]
    presence.dealt[task.iteration_id] = now
    held = fact.done < task.splits.dealt
    if fact.done > presence.reported.get(fact.task_id, -1) or not held:
        presence.got_on[fact.task_id] = now
    presence.reported[fact.task_id] = fact.done


def _units_taken_over(
    presence: Presence, fact: updates.UnitsTakenOver, state: DispatcherState, now: float
) -> None:
    task = state.tasks[fact.task_id]
    known = presence.backed.get(task.iteration_id, ())
    places = task.splits.located(fact.units)
    presence.backed[task.iteration_id] = united((*known, *places))


_FOLLOW: dict[type, Callable[[Presence, Any, DispatcherState, float], None]] = {
    updates.PlanStored: _plan_stored,
    updates.WorkerRegistered: _worker_registered,
    updates.WorkerLost: _worker_gone,
    updates.WorkerLeft: _worker_gone,
    updates.ClientJoined: _client_joined,
    updates.ClientLeft: _client_left,
    updates.IterationCreated: _iteration_created,
    updates.IterationFinished: _iteration_finished,
    updates.IterationCollected: _iteration_gone,
    updates.IterationForgotten: _iteration_gone,
    updates.TaskFinished: _task_finished,
    updates.TaskFailed: _task_failed,
    updates.TaskLost: _task_failed,
    updates.UnitsDealt: _units_dealt,
    updates.UnitsTakenOver: _units_taken_over,
    updates.TasksForgotten: _tasks_forgotten,
}


def _left(presence: Presence, note: Left, now: float) -> None:
    presence.left[note.worker_id] = now


def _paced(presence: Presence, note: Paced, now: float) -> None:
    presence.paces[note.worker_id] = note.interval


def _refused(presence: Presence, note: Refused, now: float) -> None:
    presence.suspects.add(note.worker_id)


def _unreached(presence: Presence, note: Unreached, now: float) -> None:
    presence.unreachable.report(note.task_id, note.client_id, now)


def _dismissed(presence: Presence, note: Dismissed, now: float) -> None:
    presence.dismissed.add(note.task_id)


def _got_on(presence: Presence, note: GotOn, now: float) -> None:
    if note.done > presence.reported.get(note.task_id, -1):
        presence.got_on[note.task_id] = now
        presence.reported[note.task_id] = note.done


def _uploaded(presence: Presence, note: Uploaded, now: float) -> None:
    presence.uploads[note.digest] = note.upload


def _said(presence: Presence, note: Said, now: float) -> None:
    presence.gathered.say(note, now)


def _answered(presence: Presence, note: Answered, now: float) -> None:
    presence.gathered.conclude(note)


_TAKE: dict[type, Callable[[Presence, Any, float], None]] = {
    Answered: _answered,
    Left: _left,
    Paced: _paced,
    Said: _said,
    Refused: _refused,
    Unreached: _unreached,
    Uploaded: _uploaded,
    Dismissed: _dismissed,
    GotOn: _got_on,
}
