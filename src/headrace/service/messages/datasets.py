"""Datasets and their plans: said by clients, and asked for by workers."""

from __future__ import annotations

import msgspec

from headrace.serving.call import Message, Question
from headrace.versions import Versions, own_versions

__all__ = [
    "PLAN_CHUNK_BYTES",
    "DatasetDescription",
    "GetDataset",
    "GetPlan",
    "GetPlanReply",
    "PutPlan",
    "PutPlanReply",
    "RegisterDataset",
    "RegisterDatasetReply",
]

PLAN_CHUNK_BYTES = 4 << 20
"""A plan travels in parts of at most so many bytes."""


class RegisterDatasetReply(Message, frozen=True):
    """The reply to `RegisterDataset`."""

    dataset_id: str
    """Empty where the plan is wanted."""
    plan_needed: bool = False
    """Nothing was registered: the plan must be put first."""
    versions: Versions = msgspec.field(default_factory=own_versions)
    """Of the dispatcher."""


class RegisterDataset(Question[RegisterDatasetReply], frozen=True):
    """Make a dataset known. The plan does not travel with it: where the reply says `plan_needed`,
    the dispatcher has no plan with this digest and has registered nothing; put the plan
    (`PutPlan`), then repeat this request."""

    token: str
    digest: bytes
    """SHA-256 of the pickled plan."""
    fingerprint: str
    """Equal for plans that say the same."""
    element_spec: bytes
    """The encoded spec (`element.spec.encode_spec`)."""
    cardinality: int
    num_splits: int | None
    """Number of units that can be dealt; INFINITE (-1): without end; None: the plan cannot be
    dealt."""
    compression: str | None = "AUTO"
    dataset_id: str | None = None
    anonymous: bool = False
    """Nobody is given the id to keep: the dataset may be forgotten when nobody has used it for
    long."""
    has_element_ids: bool = False
    """Each element comes from one unit, or is made of elements of units: it can be visited exactly
    once."""
    steps: tuple[tuple[str, str], ...] = ()
    """Its steps by name, each with a fingerprint of its own: for messages about what differs."""
    versions: Versions = msgspec.field(default_factory=own_versions)
    """Of the client, which pickled the plan."""


class PutPlanReply(Message, frozen=True):
    """The reply to `PutPlan`."""

    received_bytes: int
    """Bytes that the dispatcher has, from the beginning: the next part starts here, which may be
    before the last one if the dispatcher was restarted. Equal to the total: the plan is stored."""


class PutPlan(Question[PutPlanReply], frozen=True):
    """Store a part of a plan's bytes, of at most `PLAN_CHUNK_BYTES`. Parts are put in order, each
    from where the last reply stood; a plan that is stored already is all there after one. The
    dispatcher never opens them."""

    digest: bytes
    offset: int
    total_bytes: int
    """Bytes of the whole plan."""
    chunk: bytes


class GetPlanReply(Message, frozen=True):
    """The reply to `GetPlan`."""

    chunk: bytes
    """At most `PLAN_CHUNK_BYTES`."""
    total_bytes: int
    """Bytes of the whole plan."""


class GetPlan(Question[GetPlanReply], frozen=True):
    """Ask for a plan's bytes from `offset` on; the next part starts where this one ends."""

    digest: bytes
    offset: int = 0


class DatasetDescription(Message, frozen=True):
    """The reply to `GetDataset`; the fields are those of `RegisterDataset`."""

    dataset_id: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    num_splits: int | None
    compression: str | None
    has_element_ids: bool = False


class GetDataset(Question[DatasetDescription], frozen=True):
    """Ask what is known of a dataset."""

    dataset_id: str
