"""What a decider is given, and what it gives back.

    decider(state, request, moment) -> Decision

A decider reads and never writes, raises an error of `headrace.errors` (or ValueError) to refuse,
and for a request that it has decided before comes to the same reply without new facts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update

__all__ = ["Decision", "Limits", "Moment", "Presence"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long what is waited for; all in seconds."""

    check_interval: float = 1.0
    """Between looks for what is silent or no longer needed."""
    gc_timeout: float | None = 300.0
    """An iteration without clients is kept for so long; None: for ever."""
    worker_timeout: float = 10.0
    client_timeout: float = 300.0
    heartbeat_interval: float = 1.0
    """What workers are asked to keep."""
    suspect_timeout: float = 2.0
    """A worker that a client cannot reach is lost after so much silence: two heartbeats missed."""
    gc_dynamic: bool = False

    @classmethod
    def of(cls, config: DispatcherConfig) -> Limits:
        """Read the limits from a dispatcher's configuration."""
        worker_timeout = _seconds(config.worker_timeout_ms, cls.worker_timeout)
        gc_timeout = (
            None
            if config.job_gc_timeout_ms == -1
            else _seconds(config.job_gc_timeout_ms, cls.gc_timeout or 0.0)
        )
        # Four heartbeats to a timeout: one that is late or lost does not cost the worker its tasks.
        heartbeat_interval = min(cls.heartbeat_interval, worker_timeout / 4)
        return cls(
            check_interval=_seconds(config.job_gc_check_interval_ms, cls.check_interval),
            gc_timeout=gc_timeout,
            worker_timeout=worker_timeout,
            client_timeout=_seconds(config.client_timeout_ms, cls.client_timeout),
            heartbeat_interval=heartbeat_interval,
            suspect_timeout=min(worker_timeout, 2 * heartbeat_interval),
            gc_dynamic=config.gc_dynamic_sharding_jobs,
        )


def _seconds(milliseconds: int | None, default: float) -> float:
    return default if milliseconds is None else max(milliseconds, 1) / 1000


@dataclass
class Presence:
    """Who was heard from when, in this run of the process; in seconds of its steady clock.

    Not journaled: after a restart everyone is taken as heard from just now, since nobody could
    have spoken to a dispatcher that was not there.
    """

    workers: dict[str, float] = field(default_factory=dict)
    clients: dict[str, float] = field(default_factory=dict)
    idle: dict[int, float] = field(default_factory=dict)
    """Iteration -> when it was last made, left by a client or finished."""
    suspects: set[str] = field(default_factory=set)
    """Workers that a client cannot reach, and that were not heard from since."""

    @classmethod
    def of(cls, state: DispatcherState, now: float) -> Presence:
        """Take everyone in the state as heard from at `now`."""
        return cls(
            workers=dict.fromkeys(state.workers, now),
            clients=dict.fromkeys(state.clients, now),
            idle=dict.fromkeys(state.iterations, now),
        )

    def hear(self, request: messages.DispatcherRequest, now: float) -> None:
        """Remember that the request's sender is alive, if it is somebody known."""
        worker_id = getattr(request, "worker_id", None)
        if worker_id in self.workers:
            self.workers[worker_id] = now
            self.suspects.discard(worker_id)
        client_id = getattr(request, "client_id", None)
        if client_id in self.clients:
            self.clients[client_id] = now

    def observe(self, update: Update, state: DispatcherState, now: float) -> None:
        """Follow a fact that is about to be applied to `state`."""
        follow = _FOLLOW.get(type(update))
        if follow is not None:
            follow(self, update, state, now)


def _worker_registered(
    presence: Presence, fact: updates.WorkerRegistered, state: DispatcherState, now: float
) -> None:
    presence.workers[fact.worker_id] = now


def _worker_lost(
    presence: Presence, fact: updates.WorkerLost, state: DispatcherState, now: float
) -> None:
    del presence.workers[fact.worker_id]
    presence.suspects.discard(fact.worker_id)


def _client_joined(
    presence: Presence, fact: updates.ClientJoined, state: DispatcherState, now: float
) -> None:
    presence.clients[fact.client_id] = now


def _client_left(
    presence: Presence, fact: updates.ClientLeft, state: DispatcherState, now: float
) -> None:
    del presence.clients[fact.client_id]
    presence.idle[state.clients[fact.client_id]] = now


def _iteration_idle(
    presence: Presence,
    fact: updates.IterationCreated | updates.IterationFinished,
    state: DispatcherState,
    now: float,
) -> None:
    presence.idle[fact.iteration_id] = now


def _iteration_gone(
    presence: Presence,
    fact: updates.IterationCollected | updates.IterationForgotten,
    state: DispatcherState,
    now: float,
) -> None:
    del presence.idle[fact.iteration_id]


_FOLLOW: dict[type, Callable[[Presence, Any, DispatcherState, float], None]] = {
    updates.WorkerRegistered: _worker_registered,
    updates.WorkerLost: _worker_lost,
    updates.ClientJoined: _client_joined,
    updates.ClientLeft: _client_left,
    updates.IterationCreated: _iteration_idle,
    updates.IterationFinished: _iteration_idle,
    updates.IterationCollected: _iteration_gone,
    updates.IterationForgotten: _iteration_gone,
}


@dataclass(frozen=True)
class Moment:
    """When a decision is made, and under what circumstances."""

    now: float
    presence: Presence
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows from a request."""

    updates: tuple[Update, ...] = ()
    """Facts, in order: durable before anyone hears of them."""
    reply: messages.DispatcherReply = field(default_factory=messages.Done)
    """The answer. A `PlanBytes` leaves here empty: the plan is kept beside the state, and
    `plan_to_send` tells which."""
    plan_to_store: bytes | None = None
    """A plan that a `DatasetRegistered` among the updates refers to."""
    plan_to_send: bytes | None = None
    """Digest of the plan that the answer consists of."""
    suspect: str | None = None
    """A worker that somebody cannot reach."""
