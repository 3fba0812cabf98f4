"""Which policy a job has: chosen here, and nowhere else, from all that its opener asks for."""

from __future__ import annotations

from headrace.errors import FailedPreconditionError
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.policy import Policy
from headrace.service.dispatcher.state import DispatcherState, Iteration
from headrace.service.dispatcher.unoffered import Unoffered
from headrace.service.messages import Terms
from headrace.service.modes.coordinated_reads.policy import RoundCopies, RoundDealing
from headrace.service.modes.cross_trainer_cache.policy import shared_by_trainers
from headrace.service.modes.distributed_save.policy import Saving
from headrace.service.modes.dynamic.policy import Dealing, ExactDealing
from headrace.service.modes.no_sharding.policy import Copies
from headrace.service.modes.ordered.policy import OrderedDealing
from headrace.service.modes.static.policy import Static

__all__ = ["OFFERED", "SAVING", "name_of", "policy_for", "policy_of"]

OFFERED: dict[int, Policy] = {
    ShardingPolicy.OFF: Copies(),
    ShardingPolicy.DYNAMIC: Dealing(),
    ShardingPolicy.FILE: Static("files"),
    ShardingPolicy.DATA: Static("elements"),
    ShardingPolicy.FILE_OR_DATA: Static("files_or_elements"),
    ShardingPolicy.HINT: Static("hints"),
}
"""The policy of each processing mode, where nothing else is asked for."""
_IN_ROUNDS: dict[int, Policy] = {
    ShardingPolicy.OFF: RoundCopies(),
    ShardingPolicy.DYNAMIC: RoundDealing(),
}
"""The policy of each mode whose elements several consumers may read together."""

_EXACT = ExactDealing()
_ORDERED = OrderedDealing()
_SHARED = {mode: shared_by_trainers(policy) for mode, policy in OFFERED.items()}
"""The same where trainers share what workers make."""

_NAMES = {int(mode): mode.name for mode in ShardingPolicy}

SAVING = Saving()
"""How the iterations of saves are shared, whose mode is DYNAMIC."""


def policy_for(terms: Terms) -> Policy:
    """Return how the iterations of a job with these terms are shared.

    Raises:
        FailedPreconditionError: This dispatcher does not offer that.
    """
    if terms.cross_trainer_cache and terms.num_consumers is not None:
        raise FailedPreconditionError(
            "a cross-trainer cache does not go with coordinated reads; got num_consumers="
            f"{terms.num_consumers}: consumers use a round together, trainers each read everything"
        )
    offered = OFFERED if terms.num_consumers is None else _IN_ROUNDS
    policies = _SHARED if terms.cross_trainer_cache else offered
    policy = policies.get(terms.processing_mode)
    if terms.visitation == "exactly_once":
        if terms.processing_mode != ShardingPolicy.DYNAMIC or terms.cross_trainer_cache:
            cache = " and a cross-trainer cache" * terms.cross_trainer_cache
            raise FailedPreconditionError(
                'visitation="exactly_once" goes with ShardingPolicy.DYNAMIC alone; got '
                f"{name_of(terms.processing_mode)}{cache}"
            )
        if terms.num_consumers is not None:
            raise FailedPreconditionError(
                f'visitation="exactly_once" does not go with num_consumers={terms.num_consumers}: '
                "what only some consumers received of a round is used by none, and the batches of "
                "rounds are composed otherwise when it is computed again"
            )
        policy = _ORDERED if terms.ordered else _EXACT
    if policy is None:
        *names, last = map(name_of, offered)
        together = "" if offered is OFFERED else f" for num_consumers={terms.num_consumers}"
        raise FailedPreconditionError(
            f"this dispatcher offers the processing modes {', '.join(names)} and {last}{together}; "
            f"got {name_of(terms.processing_mode)}"
        )
    return policy


def policy_of(state: DispatcherState, iteration: Iteration) -> Policy:
    """Return how an iteration is shared.

    What this dispatcher does not offer, one of another version began (`Unoffered`).
    """
    job = state.jobs[iteration.job_id]
    if job.save:
        return SAVING
    try:
        return policy_for(job.terms)
    except FailedPreconditionError as error:
        return Unoffered(str(error))


def name_of(mode: int) -> str:
    """Return what a processing mode is called."""
    return _NAMES.get(mode, str(mode))
