"""Messages about datasets and their plans, which clients send and workers request."""

from __future__ import annotations

import msgspec

from headrace.serving.rpc import Message, TypedRequest
from headrace.versions import Versions, own_versions

__all__ = [
    "MAX_PLAN_STEPS",
    "MAX_STEP_NAME",
    "PLAN_CHUNK_BYTES",
    "DatasetDescription",
    "GetDataset",
    "GetPlan",
    "GetPlanReply",
    "PlanStep",
    "PutPlan",
    "PutPlanReply",
    "RegisterDataset",
    "RegisterDatasetReply",
]

PLAN_CHUNK_BYTES = 4 << 20
"""Maximum size in bytes of one part of a plan."""
MAX_PLAN_STEPS = 200
"""Maximum number of steps in the outline of a plan."""
MAX_STEP_NAME = 200
"""Maximum number of characters in the name of a step."""


class PlanStep(msgspec.Struct, frozen=True, array_like=True):
    """Step of a plan as it is executed, for pictures of the plan."""

    name: str
    """Name, as in `StepStatus.step`."""
    inputs: tuple[int, ...] = ()
    """Indices of the steps whose elements it takes."""


class RegisterDatasetReply(Message, frozen=True):
    """Reply to `RegisterDataset`."""

    dataset_id: str
    """Id of the dataset; empty if the plan is needed."""
    plan_needed: bool = False
    """True if nothing was registered: the plan must be sent first."""
    versions: Versions = msgspec.field(default_factory=own_versions)
    """Versions of the dispatcher."""


class RegisterDataset(TypedRequest[RegisterDatasetReply], frozen=True):
    """Register a dataset.

    The plan is not part of the message: if the reply has `plan_needed`, the dispatcher has no plan
    with this digest and has registered nothing; send the plan (`PutPlan`), then repeat this
    request.
    """

    token: str
    digest: bytes
    """SHA-256 of the pickled plan."""
    fingerprint: str
    """Fingerprint, equal for equivalent plans."""
    element_spec: bytes
    """The encoded spec (`element.spec.encode_spec`)."""
    cardinality: int
    num_splits: int | None
    """Number of splits; INFINITE (-1) if infinite; None if the plan cannot be divided into splits.
    """
    compression: str | None = "AUTO"
    dataset_id: str | None = None
    anonymous: bool = False
    """True if no caller gets the id to keep: the dataset may be forgotten when it was unused for
    long."""
    has_element_ids: bool = False
    """True if each element comes from one split, or is made of elements of splits, so that it can
    be delivered exactly once."""
    steps: tuple[tuple[str, str], ...] = ()
    """Names of its steps, each with a fingerprint, for messages about differences."""
    plan_steps: tuple[PlanStep, ...] = ()
    """Steps of the plan as it is executed, inputs first; empty if unknown, or if there are too
    many."""
    versions: Versions = msgspec.field(default_factory=own_versions)
    """Versions of the client, which pickled the plan."""


class PutPlanReply(Message, frozen=True):
    """Reply to `PutPlan`."""

    received_bytes: int
    """Number of bytes stored, from the start: the offset of the next part, which may be before the
    last one if the dispatcher was restarted. Equal to the total if the plan is complete."""


class PutPlan(TypedRequest[PutPlanReply], frozen=True):
    """Store a part of a plan's bytes, of at most `PLAN_CHUNK_BYTES`.

    Parts are sent in order, each from the offset in the last reply; for a plan that is already
    stored, the first reply says so. The dispatcher never unpickles plans.
    """

    digest: bytes
    offset: int
    total_bytes: int
    """Size of the whole plan in bytes."""
    chunk: bytes


class GetPlanReply(Message, frozen=True):
    """Reply to `GetPlan`."""

    chunk: bytes
    """At most `PLAN_CHUNK_BYTES`."""
    total_bytes: int
    """Size of the whole plan in bytes."""


class GetPlan(TypedRequest[GetPlanReply], frozen=True):
    """Request a plan's bytes from `offset` on; the next part starts where this one ends."""

    digest: bytes
    offset: int = 0


class DatasetDescription(Message, frozen=True):
    """Reply to `GetDataset`; the fields are those of `RegisterDataset`."""

    dataset_id: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    num_splits: int | None
    compression: str | None
    has_element_ids: bool = False
    plan_steps: tuple[PlanStep, ...] = ()


class GetDataset(TypedRequest[DatasetDescription], frozen=True):
    """Request the description of a dataset."""

    dataset_id: str
