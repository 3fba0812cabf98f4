"""Deciders for plans, which are received and sent in parts, under the digest of all their bytes."""

from __future__ import annotations

import hashlib

from headrace.errors import DataLossError, NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import (
    DecisionContext,
    DispatcherDecision,
    PlanChunk,
    PlanOffset,
)
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.garbage_collection import make_room_for_plan
from headrace.service.dispatcher.soft_state import PlanChunkReceived, PlanUpload
from headrace.service.dispatcher.state import DispatcherState

__all__ = ["check_digest", "get_plan", "put_plan"]

_DIGEST_BYTES = 32
_MAX_BYTES = 1 << 36


def check_digest(digest: bytes) -> None:
    """Reject a value that cannot be a SHA-256 digest.

    Raises:
        ValueError: If its length is wrong.
    """
    if len(digest) != _DIGEST_BYTES:
        raise ValueError(f"the digest of a plan must have {_DIGEST_BYTES} bytes; got {len(digest)}")


def put_plan(
    state: DispatcherState, request: messages.PutPlan, context: DecisionContext
) -> DispatcherDecision:
    """Store the next part of a plan; reply with the number of bytes received.

    A part that is not the next one is dropped, and the reply names the expected offset.

    Raises:
        ValueError: If the part does not fit the plan.
        FailedPreconditionError: If there is no room for the plan.
        DataLossError: If the received bytes do not have this digest.
    """
    check_digest(request.digest)
    end = request.offset + len(request.chunk)
    if not 0 < len(request.chunk) <= messages.PLAN_CHUNK_BYTES:
        raise ValueError(
            f"a chunk of a plan must have 1 to {messages.PLAN_CHUNK_BYTES} bytes; "
            f"got {len(request.chunk)}"
        )
    if not 0 <= request.offset < end <= request.total_bytes <= _MAX_BYTES:
        raise ValueError(
            f"chunk of bytes [{request.offset}, {end}) is outside a plan of total_bytes="
            f"{request.total_bytes}, or total_bytes exceeds {_MAX_BYTES}"
        )
    stored = state.plan_sizes.get(request.digest)
    if stored is not None:
        return DispatcherDecision(reply=messages.PutPlanReply(received_bytes=stored))
    upload = context.soft_state.uploads.get(request.digest)
    new_events: list[AnyEvent] = []
    if request.offset == 0:
        new_events += make_room_for_plan(state, request.digest, request.total_bytes, context)
        # Even if more was received: the first attempt may have sent damaged bytes.
        upload = PlanUpload(0, request.total_bytes, hashlib.sha256(), context.now)
    if upload is None or (request.offset, request.total_bytes) != (
        upload.received_bytes,
        upload.total_bytes,
    ):
        received = (
            0
            if upload is None or request.total_bytes != upload.total_bytes
            else upload.received_bytes
        )
        return DispatcherDecision(reply=messages.PutPlanReply(received_bytes=received))
    digest = upload.digest.copy()
    digest.update(request.chunk)
    if end == request.total_bytes:
        if digest.digest() != request.digest:
            raise DataLossError(
                f"the received plan has digest {digest.hexdigest()}, expected "
                f"{request.digest.hex()}: it was damaged in transit; send it again from offset 0"
            )
        new_events.append(events.PlanStored(digest=request.digest, size=request.total_bytes))
    return DispatcherDecision(
        events=tuple(new_events),
        reply=messages.PutPlanReply(received_bytes=end),
        plan_to_store=PlanChunk(request.digest, request.offset, request.chunk),
        soft_events=(
            PlanChunkReceived(
                request.digest, PlanUpload(end, request.total_bytes, digest, context.now)
            ),
        ),
    )


def get_plan(
    state: DispatcherState, request: messages.GetPlan, context: DecisionContext
) -> DispatcherDecision:
    """Return the next part of a plan.

    Raises:
        NotFoundError: If no plan is stored under this digest.
        ValueError: If the offset is outside the plan.
    """
    check_digest(request.digest)
    total_bytes = state.plan_sizes.get(request.digest)
    if total_bytes is None:
        raise NotFoundError(
            f"no plan is stored under digest {request.digest.hex()}: the dispatcher was restarted "
            "without its journal; register the dataset again"
        )
    if not 0 <= request.offset < total_bytes:
        raise ValueError(
            f"offset must be in [0, {total_bytes}), the size of the plan; got {request.offset}"
        )
    return DispatcherDecision(
        reply=messages.GetPlanReply(chunk=b"", total_bytes=total_bytes),
        plan_to_send=PlanOffset(request.digest, request.offset),
    )
