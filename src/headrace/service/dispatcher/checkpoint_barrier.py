"""Decider that determines the common iterator position of an iteration's clients."""

from __future__ import annotations

from headrace.errors import FailedPreconditionError
from headrace.service import messages
from headrace.service.dispatcher.checkpoint_contributions import (
    CheckpointCompleted,
    CheckpointContribution,
    DeliveredSet,
    merge_delivered,
)
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.start_positions import check_delivered
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.epochs import format_epoch

__all__ = ["contribute_checkpoint"]


def contribute_checkpoint(
    state: DispatcherState, request: messages.ContributeCheckpoint, context: DecisionContext
) -> DispatcherDecision:
    """Return the common position of an iteration's clients once each has contributed its own.

    Raises:
        NotFoundError: If the client reads no iteration.
        ValueError: If the contributed position is invalid.
        FailedPreconditionError: If a client has left: what it consumed is not known.
    """
    gathered = context.soft_state.checkpoint_contributions
    known = gathered.result(request.token)
    if known is not None:
        return DispatcherDecision(reply=_reply(known))
    iteration = state.client_iteration(request.client_id)
    check_delivered(request.delivered, request.partial_splits, iteration.pool.num_splits)
    readers = iteration.readers
    if readers is not None and readers.num_clients > len(iteration.clients):
        raise FailedPreconditionError(
            f"{readers.num_clients - len(iteration.clients)} of {readers.num_clients} clients that "
            "read "
            f"{format_epoch(iteration.epoch)} have left, and what they used is not "
            "known, so that the place of all has no state. Take states while all clients read"
        )
    said = CheckpointContribution(
        iteration.iteration_id,
        request.client_id,
        request.token,
        DeliveredSet(request.delivered, request.partial_splits),
    )
    waiting = gathered.pending(iteration.iteration_id, context.now)
    waiting[request.client_id] = said
    missing = iteration.clients - waiting.keys()
    if missing:
        reply = messages.ContributeCheckpointReply(missing_clients=tuple(sorted(missing)))
        return DispatcherDecision(reply=reply, soft_events=(said,))
    together = [waiting[each] for each in sorted(iteration.clients)]
    place = merge_delivered([each.delivered for each in together])
    tokens = tuple(each.token for each in together)
    answered = CheckpointCompleted(iteration.iteration_id, tokens, place)
    return DispatcherDecision(reply=_reply(place), soft_events=(answered,))


def _reply(place: DeliveredSet) -> messages.ContributeCheckpointReply:
    return messages.ContributeCheckpointReply(
        delivered=place.splits, partial_splits=place.partial_splits
    )
