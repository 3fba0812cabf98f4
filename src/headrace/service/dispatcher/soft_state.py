"""In-memory state of one dispatcher process, such as the times of heartbeats. It is not journaled.

Rule. This module contains everything that has a time, so that `exclude_pause` reaches it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.activity import ServiceActivity
from headrace.service.dispatcher.checkpoint_contributions import (
    CheckpointCompleted,
    CheckpointContribution,
    CheckpointContributions,
)
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.idle_times import IdleTimes
from headrace.service.dispatcher.reachability import Reachability
from headrace.service.dispatcher.state import DispatcherState, TaskPhase
from headrace.service.dispatcher.task_addresses import TaskAddresses
from headrace.service.dispatcher.worker_connections import WorkerConnections
from headrace.service.dispatcher.worker_demand import WorkerDemand
from headrace.service.ranges import Ranges, union
from headrace.serving.heartbeats import LastHeard

__all__ = [
    "HeartbeatIntervalSet",
    "NoMoreWork",
    "PlanChunkReceived",
    "PlanUpload",
    "ProgressReported",
    "SoftEvent",
    "SoftState",
    "TaskUnreachable",
    "WorkerRefusedConnection",
    "WorkerUnregistered",
]


@dataclass(frozen=True)
class PlanUpload:
    """A plan whose first `received_bytes` bytes have been received."""

    received_bytes: int
    total_bytes: int
    digest: hashlib._Hash
    """Digest of the bytes received so far."""
    updated_at: float
    """Time of the last chunk."""


class WorkerUnregistered(NamedTuple):
    """A worker unregistered; its id is not used again."""

    worker_id: str


class WorkerRefusedConnection(NamedTuple):
    """A worker refused a connection."""

    worker_id: str


class TaskUnreachable(NamedTuple):
    """A client cannot reach the worker of a task."""

    task_id: int
    client_id: str


class HeartbeatIntervalSet(NamedTuple):
    """A heartbeat interval, in seconds, was sent to a worker."""

    worker_id: str
    interval: float


class PlanChunkReceived(NamedTuple):
    """Another chunk of the plan with this digest was received."""

    digest: bytes
    upload: PlanUpload


class ProgressReported(NamedTuple):
    """All splits of a task before `num_done`, in assignment order, are done."""

    task_id: int
    num_done: int


class NoMoreWork(NamedTuple):
    """The dispatcher replied to a task that nothing is left for it."""

    task_id: int


SoftEvent: TypeAlias = (
    CheckpointCompleted
    | NoMoreWork
    | ProgressReported
    | WorkerUnregistered
    | HeartbeatIntervalSet
    | WorkerRefusedConnection
    | CheckpointContribution
    | TaskUnreachable
    | PlanChunkReceived
)
"""Information in a request that only this process remembers."""


@dataclass
class SoftState:
    """Times of heartbeats and other state that is not journaled (`serving.heartbeats`)."""

    worker_heartbeats: LastHeard[str] = field(default_factory=LastHeard)
    client_heartbeats: LastHeard[str] = field(default_factory=LastHeard)
    idle_since: LastHeard[int] = field(default_factory=LastHeard)
    """Iteration -> when it was last created, left by a client or finished."""
    last_assignments: LastHeard[int] = field(default_factory=LastHeard)
    """Iteration -> when splits of it were last assigned."""
    last_progress: LastHeard[int] = field(default_factory=LastHeard)
    """Task -> when more of its splits were last done, or it was assigned some while it held none.
    """
    reported_done: dict[int, int] = field(default_factory=dict)
    """Task -> number of splits that it reported as done."""
    tasks_without_work: set[int] = field(default_factory=set)
    """Running tasks that received the end of their splits: a later request was delayed, and its
    reply would be ignored."""
    reassigned_splits: dict[int, Ranges] = field(default_factory=dict)
    """Iteration -> splits taken from slow tasks that still run (speculative execution)."""
    last_task_ends: LastHeard[int] = field(default_factory=LastHeard)
    """Iteration -> when a task of it last ended, or it was created."""
    last_task_losses: LastHeard[int] = field(default_factory=LastHeard)
    """Iteration -> when a task of it was last lost or failed, if one was."""
    unregistered_workers: dict[str, float] = field(default_factory=dict)
    """Worker that unregistered -> when; a later request of it was delayed."""
    refusing_workers: set[str] = field(default_factory=set)
    """Workers that refused a client's connection and have sent nothing since."""
    last_late_warnings: LastHeard[str] = field(default_factory=LastHeard)
    """Worker whose heartbeats are very late -> when that was last logged."""
    heartbeat_intervals: dict[str, float] = field(default_factory=dict)
    """Worker -> heartbeat interval in seconds that this process sent to it."""
    uploads: dict[bytes, PlanUpload] = field(default_factory=dict)
    """Digest -> a plan that is not complete."""
    reachability: Reachability = field(default_factory=Reachability)
    idle_times: IdleTimes = field(default_factory=IdleTimes)
    """Times since which datasets and plans are unused."""
    copy_run_times: IdleTimes = field(default_factory=IdleTimes)
    """Times since which copies run."""
    slot_waits: LastHeard[str] = field(default_factory=LastHeard)
    """Address of a worker that waits for a slot -> since when."""
    activity: ServiceActivity = field(default_factory=ServiceActivity)
    connections: WorkerConnections = field(default_factory=WorkerConnections)
    worker_demand: WorkerDemand = field(default_factory=WorkerDemand)
    checkpoint_contributions: CheckpointContributions = field(
        default_factory=CheckpointContributions
    )
    """Iterator positions that clients contributed to checkpoints."""
    task_addresses: TaskAddresses = field(default_factory=TaskAddresses)

    @classmethod
    def from_state(cls, state: DispatcherState, now: float) -> SoftState:
        """Create the soft state for a state, with all heartbeats at `now`."""
        return cls(
            worker_heartbeats=LastHeard.all_at(state.workers, now),
            client_heartbeats=LastHeard.all_at(state.clients, now),
            idle_since=LastHeard.all_at(state.iterations, now),
            last_assignments=LastHeard.all_at(state.iterations, now),
            last_task_ends=LastHeard.all_at(state.iterations, now),
            last_progress=LastHeard.all_at(
                (task.task_id for task in state.tasks.values() if task.phase is TaskPhase.RUNNING),
                now,
            ),
            last_task_losses=LastHeard.all_at(
                (task.iteration_id for task in state.tasks.values() if task.is_unavailable), now
            ),
            activity=ServiceActivity.from_state(state, now),
            worker_demand=WorkerDemand(
                started_at=now,
                # Until peers have reported, the service keeps the workers that it has.
                wanted_workers=sum(not worker.draining for worker in state.workers.values()),
            ),
        )

    def record_contact(self, request: messages.DispatcherRequest, now: float) -> None:
        """Record that the request's sender is alive, if it is known."""
        worker_id = getattr(request, "worker_id", None)
        if self.worker_heartbeats.record(worker_id, now):
            self.refusing_workers.discard(worker_id)
        self.client_heartbeats.record(getattr(request, "client_id", None), now)
        self.idle_times.record_use(getattr(request, "dataset_id", None), now)

    def wait_for_slot(self, address: str, now: float) -> float:
        """Return how long a worker has waited for a slot; its first call starts the wait."""
        return now - self.slot_waits.setdefault(address, now)

    def exclude_pause(self, pause: float, now: float) -> None:
        """Subtract `pause` seconds, in which nothing was received, from every peer's silence."""
        for times in (
            self.worker_heartbeats,
            self.client_heartbeats,
            self.idle_since,
            self.last_assignments,
            self.last_progress,
            self.last_task_ends,
            self.last_task_losses,
            self.slot_waits,
            self.last_late_warnings,
        ):
            times.extend(pause, now)
        for digest, upload in self.uploads.items():
            self.uploads[digest] = replace(upload, updated_at=min(now, upload.updated_at + pause))
        self.reachability.exclude_pause(pause, now)
        self.idle_times.exclude_pause(pause, now)
        self.copy_run_times.exclude_pause(pause, now)
        self.worker_demand.exclude_pause(pause)

    def forget_old(self, before: float, now: float) -> None:
        """Forget records older than `before`, and reports that were not repeated.

        These are incomplete plans without new chunks, and workers that unregistered.
        """
        self.reachability.forget_old(now)
        self.connections.keep_only(self.worker_heartbeats)
        for worker_id in [
            each for each, since in self.unregistered_workers.items() if since < before
        ]:
            del self.unregistered_workers[worker_id]
        for digest, upload in list(self.uploads.items()):
            if upload.updated_at < before:
                del self.uploads[digest]
        for address in [each for each, since in self.slot_waits.items() if since < before]:
            del self.slot_waits[address]

    def apply(self, event: SoftEvent, now: float) -> None:
        """Record information from a request."""
        _APPLY[type(event)](self, event, now)

    def observe(self, event: AnyEvent, state: DispatcherState, now: float) -> None:
        """Follow an event that is about to be applied to `state`."""
        self.activity.observe(event, state, now)
        follow = _OBSERVE.get(type(event))
        if follow is not None:
            follow(self, event, state, now)


def _plan_stored(
    soft_state: SoftState, event: events.PlanStored, state: DispatcherState, now: float
) -> None:
    soft_state.uploads.pop(event.digest, None)


def _worker_registered(
    soft_state: SoftState, event: events.WorkerRegistered, state: DispatcherState, now: float
) -> None:
    soft_state.worker_heartbeats[event.worker_id] = now
    soft_state.slot_waits.pop(event.address, None)
    known = state.workers.get(event.worker_id)
    if known is not None and known.tags != event.tags:
        soft_state.task_addresses.tags_changed()


def _worker_removed(
    soft_state: SoftState,
    event: events.WorkerLost | events.WorkerLeft,
    state: DispatcherState,
    now: float,
) -> None:
    worker = state.workers[event.worker_id]
    for task_id in worker.tasks | worker.finished_tasks:
        soft_state.last_task_losses[state.tasks[task_id].iteration_id] = now
    del soft_state.worker_heartbeats[event.worker_id]
    soft_state.refusing_workers.discard(event.worker_id)
    soft_state.last_late_warnings.pop(event.worker_id, None)
    soft_state.heartbeat_intervals.pop(event.worker_id, None)


def _client_joined(
    soft_state: SoftState, event: events.ClientJoined, state: DispatcherState, now: float
) -> None:
    soft_state.client_heartbeats[event.client_id] = now


def _client_left(
    soft_state: SoftState, event: events.ClientLeft, state: DispatcherState, now: float
) -> None:
    del soft_state.client_heartbeats[event.client_id]
    soft_state.idle_since[state.clients[event.client_id]] = now


def _iteration_created(
    soft_state: SoftState, event: events.IterationCreated, state: DispatcherState, now: float
) -> None:
    soft_state.idle_since[event.iteration_id] = soft_state.last_assignments[event.iteration_id] = (
        now
    )
    soft_state.last_task_ends[event.iteration_id] = now


def _iteration_finished(
    soft_state: SoftState, event: events.IterationFinished, state: DispatcherState, now: float
) -> None:
    soft_state.idle_since[event.iteration_id] = now


def _iteration_removed(
    soft_state: SoftState,
    event: events.IterationDiscarded | events.IterationForgotten,
    state: DispatcherState,
    now: float,
) -> None:
    del soft_state.idle_since[event.iteration_id], soft_state.last_assignments[event.iteration_id]
    del soft_state.last_task_ends[event.iteration_id]
    soft_state.last_task_losses.pop(event.iteration_id, None)
    soft_state.checkpoint_contributions.forget(event.iteration_id)
    soft_state.task_addresses.forget(event.iteration_id)
    soft_state.reassigned_splits.pop(event.iteration_id, None)
    _forget_tasks(soft_state, state.iterations[event.iteration_id].tasks)


def _tasks_forgotten(
    soft_state: SoftState, event: events.TasksForgotten, state: DispatcherState, now: float
) -> None:
    _forget_tasks(soft_state, event.task_ids)
    soft_state.task_addresses.forget(event.iteration_id)


def _forget_tasks(soft_state: SoftState, task_ids: Iterable[int]) -> None:
    for task_id in task_ids:
        soft_state.last_progress.pop(task_id, None)
        soft_state.reported_done.pop(task_id, None)
        soft_state.tasks_without_work.discard(task_id)


def _task_finished(
    soft_state: SoftState, event: events.TaskFinished, state: DispatcherState, now: float
) -> None:
    soft_state.last_task_ends[state.tasks[event.task_id].iteration_id] = now
    soft_state.tasks_without_work.discard(event.task_id)


def _task_failed(
    soft_state: SoftState,
    event: events.TaskFailed | events.TaskLost,
    state: DispatcherState,
    now: float,
) -> None:
    iteration_id = state.tasks[event.task_id].iteration_id
    soft_state.last_task_losses[iteration_id] = soft_state.last_task_ends[iteration_id] = now
    soft_state.tasks_without_work.discard(event.task_id)


def _splits_assigned(
    soft_state: SoftState, event: events.SplitsAssigned, state: DispatcherState, now: float
) -> None:
    task = state.tasks[event.task_id]
    soft_state.last_assignments[task.iteration_id] = now
    holds_splits = event.num_done < task.assigned.num_assigned
    if event.num_done > soft_state.reported_done.get(event.task_id, -1) or not holds_splits:
        soft_state.last_progress[event.task_id] = now
    soft_state.reported_done[event.task_id] = event.num_done


def _splits_reassigned(
    soft_state: SoftState, event: events.SplitsReassigned, state: DispatcherState, now: float
) -> None:
    task = state.tasks[event.task_id]
    known = soft_state.reassigned_splits.get(task.iteration_id, ())
    split_indices = task.assigned.to_split_indices(event.splits)
    soft_state.reassigned_splits[task.iteration_id] = union((*known, *split_indices))


_OBSERVE: dict[type, Callable[[SoftState, Any, DispatcherState, float], None]] = {
    events.PlanStored: _plan_stored,
    events.WorkerRegistered: _worker_registered,
    events.WorkerLost: _worker_removed,
    events.WorkerLeft: _worker_removed,
    events.ClientJoined: _client_joined,
    events.ClientLeft: _client_left,
    events.IterationCreated: _iteration_created,
    events.IterationFinished: _iteration_finished,
    events.IterationDiscarded: _iteration_removed,
    events.IterationForgotten: _iteration_removed,
    events.TaskFinished: _task_finished,
    events.TaskFailed: _task_failed,
    events.TaskLost: _task_failed,
    events.SplitsAssigned: _splits_assigned,
    events.SplitsReassigned: _splits_reassigned,
    events.TasksForgotten: _tasks_forgotten,
}


def _worker_unregistered(soft_state: SoftState, event: WorkerUnregistered, now: float) -> None:
    soft_state.unregistered_workers[event.worker_id] = now


def _heartbeat_interval_set(soft_state: SoftState, event: HeartbeatIntervalSet, now: float) -> None:
    soft_state.heartbeat_intervals[event.worker_id] = event.interval


def _worker_refused_connection(
    soft_state: SoftState, event: WorkerRefusedConnection, now: float
) -> None:
    soft_state.refusing_workers.add(event.worker_id)


def _task_unreachable(soft_state: SoftState, event: TaskUnreachable, now: float) -> None:
    soft_state.reachability.report(event.task_id, event.client_id, now)


def _no_more_work(soft_state: SoftState, event: NoMoreWork, now: float) -> None:
    soft_state.tasks_without_work.add(event.task_id)


def _progress_reported(soft_state: SoftState, event: ProgressReported, now: float) -> None:
    if event.num_done > soft_state.reported_done.get(event.task_id, -1):
        soft_state.last_progress[event.task_id] = now
        soft_state.reported_done[event.task_id] = event.num_done


def _plan_chunk_received(soft_state: SoftState, event: PlanChunkReceived, now: float) -> None:
    soft_state.uploads[event.digest] = event.upload


def _checkpoint_contribution(
    soft_state: SoftState, event: CheckpointContribution, now: float
) -> None:
    soft_state.checkpoint_contributions.add(event, now)


def _checkpoint_completed(soft_state: SoftState, event: CheckpointCompleted, now: float) -> None:
    soft_state.checkpoint_contributions.complete(event)


_APPLY: dict[type, Callable[[SoftState, Any, float], None]] = {
    CheckpointCompleted: _checkpoint_completed,
    WorkerUnregistered: _worker_unregistered,
    HeartbeatIntervalSet: _heartbeat_interval_set,
    CheckpointContribution: _checkpoint_contribution,
    WorkerRefusedConnection: _worker_refused_connection,
    TaskUnreachable: _task_unreachable,
    PlanChunkReceived: _plan_chunk_received,
    NoMoreWork: _no_more_work,
    ProgressReported: _progress_reported,
}
