"""Inputs and results of deciders.

    decider(state, request, context) -> DispatcherDecision

A decider only reads the state, raises an error of `headrace.errors` (or ValueError) to reject a
request, and returns the same reply without new events for a request that was decided before. It
need not know the events that are derived from its own (`assignment.derive_events`): a reply that
depends on them is made from the state after them (`DispatcherDecision.compose_reply`).
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
from headrace.serving.blobs import BlobPart, BlobPosition

__all__ = ["DecisionContext", "DispatcherDecision", "PlanChunk", "PlanOffset"]

_HEARTBEAT_ALIGNMENT_SECONDS = 0.05
"""Grid, in seconds, that aligns the heartbeats of many peers."""

PlanChunk: TypeAlias = BlobPart
"""Bytes of a plan; the key is the digest of the whole plan."""
PlanOffset: TypeAlias = BlobPosition
"""Offset in a stored plan."""


@dataclass(frozen=True)
class DecisionContext:
    """Time, soft state and limits for a decision."""

    now: float
    soft_state: SoftState
    limits: DispatcherLimits

    def next_heartbeat(self, interval: float, shortest: float) -> float:
        """Return the seconds until a peer must send its next heartbeat.

        With many peers, heartbeats are aligned to common times: most of the cost of a single one is
        waking up the process.

        Args:
            interval: Seconds between two heartbeats.
            shortest: The same if there are few peers.
        """
        if interval <= shortest:
            return interval
        return (
            math.ceil((self.now + interval) / _HEARTBEAT_ALIGNMENT_SECONDS)
            * _HEARTBEAT_ALIGNMENT_SECONDS
            - self.now
        )

    def is_unheard(self, client_id: str, iteration_id: int) -> bool:
        """Return whether a client has sent nothing since a task of its iteration ended."""
        last_end = self.soft_state.last_task_ends[iteration_id]
        return self.soft_state.client_heartbeats.get(client_id, last_end) < last_end


@dataclass(kw_only=True)
class DispatcherDecision:
    """Result of a request."""

    events: tuple[AnyEvent, ...] = ()
    """Events, in order; made durable before any reply is sent."""
    reply: messages.DispatcherReply = field(default_factory=messages.Done)
    """Reply to the request. The chunk of a `GetPlanReply` is empty here: plans are stored outside
    the state, and `plan_to_send` locates the chunk."""
    compose_reply: Callable[[DispatcherState], messages.DispatcherReply] | None = None
    """Makes the reply from the state after the events and those derived from them."""
    plan_to_store: PlanChunk | None = None
    plan_to_send: PlanOffset | None = None
    soft_events: tuple[SoftEvent, ...] = ()
    """Changes of the soft state, which are not journaled."""

    def finish_reply(self, state: DispatcherState) -> None:
        """Make the reply if it depends on the state after the events."""
        if self.compose_reply is not None:
            self.reply, self.compose_reply = self.compose_reply(state), None

    @property
    def blobs(self) -> Sequence[PlanChunk]:
        """Bytes to store beside the events."""
        return () if self.plan_to_store is None else (self.plan_to_store,)

    def make_reply(self, read_blob: Callable[[PlanOffset], bytes]) -> msgspec.Struct:
        """Return the reply, with the chunk of a stored plan if there is one."""
        if self.plan_to_send is None:
            return self.reply
        return msgspec.structs.replace(self.reply, chunk=read_blob(self.plan_to_send))
