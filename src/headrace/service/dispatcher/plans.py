"""Deciders: plans arrive and leave in parts, under the digest of all their bytes."""

from __future__ import annotations

import hashlib

from headrace.errors import DataLossError, NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment, PlanPart, PlanPlace
from headrace.service.dispatcher.presence import Upload, Uploaded
from headrace.service.dispatcher.retention import room_for_plan
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update

__all__ = ["check_digest", "get_plan", "put_plan"]

_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 36


def check_digest(digest: bytes) -> None:
    """Refuse what cannot be a SHA-256 digest."""
    if len(digest) != _DIGEST_BYTES:
        raise ValueError(f"a plan's digest has {_DIGEST_BYTES} bytes; got {len(digest)}")


def put_plan(state: DispatcherState, request: messages.PutPlan, moment: Moment) -> Decision:
    """Take the next part of a plan; say how much of it is here.

    A part that is not the next one is dropped, and the reply says which one is.

    Raises:
        ValueError: The part cannot be one of this plan.
        FailedPreconditionError: There is no room for it.
        DataLossError: The bytes that arrived do not have this digest.
    """
    check_digest(request.digest)
    end = request.offset + len(request.part)
    if not 0 < len(request.part) <= messages.PLAN_PART_BYTES:
        raise ValueError(
            f"a part of a plan has 1 to {messages.PLAN_PART_BYTES} bytes; got {len(request.part)}"
        )
    if not 0 <= request.offset < end <= request.total <= _MOST_BYTES:
        raise ValueError(
            f"bytes {request.offset} to {end} are no part of a plan of {request.total} bytes"
        )
    stored = state.plans.get(request.digest)
    if stored is not None:
        return Decision(reply=messages.PlanReceived(received=stored))
    upload = moment.presence.uploads.get(request.digest)
    facts: list[Update] = []
    if request.offset == 0:
        facts += room_for_plan(state, request.digest, request.total, moment)
        # Also where more is here: the first try may have been of damaged bytes.
        upload = Upload(0, request.total, hashlib.sha256(), moment.now)
    if upload is None or (request.offset, request.total) != (upload.received, upload.total):
        received = 0 if upload is None or request.total != upload.total else upload.received
        return Decision(reply=messages.PlanReceived(received=received))
    digest = upload.digest.copy()
    digest.update(request.part)
    if end == request.total:
        if digest.digest() != request.digest:
            raise DataLossError(
                f"the plan that arrived has digest {digest.hexdigest()}, not "
                f"{request.digest.hex()}: it changed on its way; put it again from the beginning"
            )
        facts.append(updates.PlanStored(digest=request.digest, size=request.total))
    return Decision(
        updates=tuple(facts),
        reply=messages.PlanReceived(received=end),
        plan_to_store=PlanPart(request.digest, request.offset, request.part),
        notes=(Uploaded(request.digest, Upload(end, request.total, digest, moment.now)),),
    )


def get_plan(state: DispatcherState, request: messages.GetPlan, moment: Moment) -> Decision:
    """Hand out the next part of a plan.

    Raises:
        NotFoundError: No plan is stored under this digest.
        ValueError: The plan has no byte there.
    """
    check_digest(request.digest)
    total = state.plans.get(request.digest)
    if total is None:
        raise NotFoundError(
            f"no plan is stored under {request.digest.hex()}: the dispatcher was restarted without "
            "its journal; register the dataset again"
        )
    if not 0 <= request.offset < total:
        raise ValueError(f"a plan of {total} bytes has none at offset {request.offset}")
    return Decision(
        reply=messages.PlanBytes(part=b"", total=total),
        plan_to_send=PlanPlace(request.digest, request.offset),
    )
