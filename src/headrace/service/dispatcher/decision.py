"""What a decider is given, and what it gives back.

    decider(state, request, moment) -> Decision

A decider reads and never writes, raises an error of `headrace.errors` (or ValueError) to refuse,
and for a request that it has decided before finds the same reply without new facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.service import messages
from headrace.service.dispatcher.limits import Limits
from headrace.service.dispatcher.presence import Presence, Upload
from headrace.service.dispatcher.updates import Update

__all__ = ["Decision", "Moment", "PlanPart", "PlanPlace"]


@dataclass(frozen=True)
class Moment:
    """When a decision is made, and under what circumstances."""

    now: float
    presence: Presence
    limits: Limits


class PlanPart(NamedTuple):
    """Bytes of a plan, and where they begin in it."""

    digest: bytes
    offset: int
    part: bytes


class PlanPlace(NamedTuple):
    """A place in a stored plan."""

    digest: bytes
    offset: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows from a request."""

    updates: tuple[Update, ...] = ()
    """Facts, in order: durable before anyone hears of them."""
    reply: messages.DispatcherReply = field(default_factory=messages.Done)
    """The answer. A `PlanBytes` leaves here empty: plans are kept beside the state, and
    `plan_to_send` says from where."""
    plan_to_store: PlanPart | None = None
    plan_to_send: PlanPlace | None = None
    upload: tuple[bytes, Upload] | None = None
    """How far the plan with this digest has arrived."""
    suspect: str | None = None
    """A worker that refuses connections."""
