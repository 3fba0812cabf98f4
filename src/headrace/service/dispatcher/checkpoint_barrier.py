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
    contributions = context.soft_state.checkpoint_contributions
    result = contributions.result(request.token)
    if result is not None:
        return DispatcherDecision(reply=_reply(result))
    iteration = state.client_iteration(request.client_id)
    check_delivered(request.delivered, request.partial_splits, iteration.pool.num_splits)
    readers = iteration.readers
    if readers is not None and readers.num_clients > len(iteration.clients):
        raise FailedPreconditionError(
            f"no common state of {format_epoch(iteration.epoch)}: "
            f"{readers.num_clients - len(iteration.clients)} of {readers.num_clients} clients have "
            "left, and the elements that they consumed are not known. Save states while all "
            "clients read"
        )
    contribution = CheckpointContribution(
        iteration.iteration_id,
        request.client_id,
        request.token,
        DeliveredSet(request.delivered, request.partial_splits),
    )
    pending = contributions.pending(iteration.iteration_id, context.now)
    pending[request.client_id] = contribution
    missing = iteration.clients - pending.keys()
    if missing:
        reply = messages.ContributeCheckpointReply(missing_clients=tuple(sorted(missing)))
        return DispatcherDecision(reply=reply, soft_events=(contribution,))
    contributed = [pending[each] for each in sorted(iteration.clients)]
    delivered = merge_delivered([each.delivered for each in contributed])
    tokens = tuple(each.token for each in contributed)
    completed = CheckpointCompleted(iteration.iteration_id, tokens, delivered)
    return DispatcherDecision(reply=_reply(delivered), soft_events=(completed,))


def _reply(delivered: DeliveredSet) -> messages.ContributeCheckpointReply:
    return messages.ContributeCheckpointReply(
        delivered=delivered.splits, partial_splits=delivered.partial_splits
    )
