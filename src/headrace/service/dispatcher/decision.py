"""What a decider is given, and what it gives back.

    decider(state, request, moment) -> Decision

A decider reads and never writes, raises an error of `headrace.errors` (or ValueError) to refuse,
and for a request that it has decided before finds the same reply without new facts. It need not
foresee what its facts lead to: a reply that depends on that is made of the state after them
(`DispatcherDecision.compose_reply`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from headrace.service import messages
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.soft_state import SoftEvent, SoftState
from headrace.service.dispatcher.state import DispatcherState
from headrace.serving.blobs import BlobPart, BlobPlace

__all__ = ["DecisionContext", "DispatcherDecision", "PlanChunk", "PlanOffset"]

_HEARTBEAT_ALIGNMENT_SECONDS = 0.05
"""Seconds of which the heartbeats of many peers come at a time."""

PlanChunk: TypeAlias = BlobPart
"""Bytes of a plan; its key is the digest of the whole."""
PlanOffset: TypeAlias = BlobPlace
"""A place in a stored plan."""


@dataclass(frozen=True)
class DecisionContext:
    """When a decision is made, and under what circumstances."""

    now: float
    soft_state: SoftState
    limits: DispatcherLimits

    def next_heartbeat(self, interval: float, shortest: float) -> float:
        """Return the seconds until a peer is to speak again.

        Where peers are many, some are asked for the same moment: of a heartbeat that comes by
        itself, most of the cost is that somebody has to wake up for it.

        Args:
            interval: How long after this one.
            shortest: The same where peers are few.
        """
        if interval <= shortest:
            return interval
        return (
            math.ceil((self.now + interval) / _HEARTBEAT_ALIGNMENT_SECONDS)
            * _HEARTBEAT_ALIGNMENT_SECONDS
            - self.now
        )

    def is_unheard(self, client_id: str, iteration_id: int) -> bool:
        """Whether a client was not heard of since a task of its iteration ended: it may be gone."""
        ended = self.soft_state.last_task_ends[iteration_id]
        return self.soft_state.client_heartbeats.get(client_id, ended) < ended


@dataclass(kw_only=True)
class DispatcherDecision:
    """What follows from a request."""

    events: tuple[AnyEvent, ...] = ()
    """Facts, in order: durable before anyone hears of them."""
    reply: messages.DispatcherReply = field(default_factory=messages.Done)
    """The answer. A `GetPlanReply` leaves here empty: plans are kept beside the state, and
    `plan_to_send` says from where."""
    compose_reply: Callable[[DispatcherState], messages.DispatcherReply] | None = None
    """Makes the answer of the state after the facts, and after what followed from them."""
    plan_to_store: PlanChunk | None = None
    plan_to_send: PlanOffset | None = None
    soft_events: tuple[SoftEvent, ...] = ()
    """What is kept in mind beside the facts, and lost with this run of the process."""

    def finish_reply(self, state: DispatcherState) -> None:
        """Make the reply, where it waits for the state after the facts."""
        if self.compose_reply is not None:
            self.reply, self.compose_reply = self.compose_reply(state), None

    @property
    def blobs(self) -> Sequence[PlanChunk]:
        """What is to be kept beside the facts."""
        return () if self.plan_to_store is None else (self.plan_to_store,)

    def answer(self, read_blob: Callable[[PlanOffset], bytes]) -> msgspec.Struct:
        """Return the reply, with what is read from a stored plan, if anything is."""
        if self.plan_to_send is None:
            return self.reply
        return msgspec.structs.replace(self.reply, chunk=read_blob(self.plan_to_send))
