"""What a decider is given, and what it gives back.

    decider(state, request, moment) -> Decision

A decider reads and never writes, raises an error of `headrace.errors` (or ValueError) to refuse,
and for a request that it has decided before finds the same reply without new facts. It need not
foresee what its facts lead to: a reply that depends on that is made of the state after them
(`Decision.compose`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from headrace.service import messages
from headrace.service.dispatcher.limits import Limits
from headrace.service.dispatcher.presence import Note, Presence
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update
from headrace.serving.blobs import BlobPart, BlobPlace

__all__ = ["Decision", "Moment", "PlanPart", "PlanPlace"]

_TOGETHER = 0.05
"""Seconds of which the heartbeats of many peers come at a time."""

PlanPart: TypeAlias = BlobPart
"""Bytes of a plan; its key is the digest of the whole."""
PlanPlace: TypeAlias = BlobPlace
"""A place in a stored plan."""


@dataclass(frozen=True)
class Moment:
    """When a decision is made, and under what circumstances."""

    now: float
    presence: Presence
    limits: Limits

    def next_heartbeat(self, interval: float, usual: float) -> float:
        """Return the seconds until a peer is to speak again.

        Where peers are many, some are asked for the same moment: of a heartbeat that comes by
        itself, most of the cost is that somebody has to wake up for it.

        Args:
            interval: How long after this one.
            usual: The same where peers are few.
        """
        if interval <= usual:
            return interval
        return math.ceil((self.now + interval) / _TOGETHER) * _TOGETHER - self.now

    def is_silent(self, client_id: str, iteration_id: int) -> bool:
        """Whether a client was not heard of since a task of its iteration ended: it may be gone."""
        ended = self.presence.ended[iteration_id]
        return self.presence.clients.get(client_id, ended) < ended


@dataclass(kw_only=True)
class Decision:
    """What follows from a request."""

    updates: tuple[Update, ...] = ()
    """Facts, in order: durable before anyone hears of them."""
    reply: messages.DispatcherReply = field(default_factory=messages.Done)
    """The answer. A `PlanBytes` leaves here empty: plans are kept beside the state, and
    `plan_to_send` says from where."""
    compose: Callable[[DispatcherState], messages.DispatcherReply] | None = None
    """Makes the answer of the state after the facts, and after what followed from them."""
    plan_to_store: PlanPart | None = None
    plan_to_send: PlanPlace | None = None
    notes: tuple[Note, ...] = ()
    """What is kept in mind beside the facts, and lost with this run of the process."""

    def conclude(self, state: DispatcherState) -> None:
        """Make the reply, where it waits for the state after the facts."""
        if self.compose is not None:
            self.reply, self.compose = self.compose(state), None

    @property
    def blobs(self) -> Sequence[PlanPart]:
        """What is to be kept beside the facts."""
        return () if self.plan_to_store is None else (self.plan_to_store,)

    def answer(self, read_blob: Callable[[PlanPlace], bytes]) -> msgspec.Struct:
        """Return the reply, with what is read from a stored plan, if anything is."""
        if self.plan_to_send is None:
            return self.reply
        return msgspec.structs.replace(self.reply, part=read_blob(self.plan_to_send))
