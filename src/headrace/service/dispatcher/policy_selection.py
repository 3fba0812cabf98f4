"""Selection of a job's policy from its options; the only place that does it."""

from __future__ import annotations

from headrace.errors import FailedPreconditionError
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.policy import IterationPolicy
from headrace.service.dispatcher.state import DispatcherState, JobIteration
from headrace.service.dispatcher.unsupported_modes import UnsupportedMode
from headrace.service.messages import JobOptions
from headrace.service.modes.coordinated_reads.policy import (
    CoordinatedDynamicSharding,
    CoordinatedNoSharding,
)
from headrace.service.modes.cross_trainer_cache.policy import make_shared_policy
from headrace.service.modes.distributed_save.policy import SaveSharding
from headrace.service.modes.dynamic.policy import DynamicSharding, ExactlyOnceSharding
from headrace.service.modes.no_sharding.policy import NoSharding
from headrace.service.modes.ordered.policy import OrderedSharding
from headrace.service.modes.static.policy import StaticSharding

__all__ = ["POLICIES", "SAVE_POLICY", "mode_name", "policy_for", "policy_of"]

POLICIES: dict[int, IterationPolicy] = {
    ShardingPolicy.OFF: NoSharding(),
    ShardingPolicy.DYNAMIC: DynamicSharding(),
    ShardingPolicy.FILE: StaticSharding("files"),
    ShardingPolicy.DATA: StaticSharding("elements"),
    ShardingPolicy.FILE_OR_DATA: StaticSharding("files_or_elements"),
    ShardingPolicy.HINT: StaticSharding("hints"),
}
"""Policy of each processing mode without further options."""
_COORDINATED: dict[int, IterationPolicy] = {
    ShardingPolicy.OFF: CoordinatedNoSharding(),
    ShardingPolicy.DYNAMIC: CoordinatedDynamicSharding(),
}
"""Policy of each mode that supports coordinated reads."""

_EXACTLY_ONCE = ExactlyOnceSharding()
_ORDERED = OrderedSharding()
_SHARED = {mode: make_shared_policy(policy) for mode, policy in POLICIES.items()}
"""Policy of each mode with a cross-trainer cache."""

_NAMES = {int(mode): mode.name for mode in ShardingPolicy}

SAVE_POLICY = SaveSharding()
"""Policy of saves, whose processing mode is DYNAMIC."""


def policy_for(options: JobOptions) -> IterationPolicy:
    """Return the policy for a job's options.

    Raises:
        FailedPreconditionError: If this dispatcher does not support the options.
    """
    if options.cross_trainer_cache and options.num_consumers is not None:
        raise FailedPreconditionError(
            "a cross-trainer cache cannot be combined with coordinated reads; got num_consumers="
            f"{options.num_consumers}: consumers of coordinated reads share each round, but every "
            "trainer of a cache reads all elements"
        )
    supported = POLICIES if options.num_consumers is None else _COORDINATED
    policies = _SHARED if options.cross_trainer_cache else supported
    policy = policies.get(options.processing_mode)
    if options.visitation == "exactly_once":
        if options.processing_mode != ShardingPolicy.DYNAMIC or options.cross_trainer_cache:
            cache = " and a cross-trainer cache" * options.cross_trainer_cache
            raise FailedPreconditionError(
                'visitation="exactly_once" requires ShardingPolicy.DYNAMIC without a cross-trainer '
                "cache; got "
                f"{mode_name(options.processing_mode)}{cache}"
            )
        if options.num_consumers is not None:
            raise FailedPreconditionError(
                'visitation="exactly_once" cannot be combined with '
                f"num_consumers={options.num_consumers}: a round that only some consumers received "
                "is consumed by none of them, and its batches differ when it is recomputed"
            )
        policy = _ORDERED if options.ordered else _EXACTLY_ONCE
    if policy is None:
        *names, last = map(mode_name, supported)
        scope = "" if supported is POLICIES else f" for num_consumers={options.num_consumers}"
        raise FailedPreconditionError(
            f"this dispatcher supports the processing modes {', '.join(names)} and {last}{scope}; "
            f"got {mode_name(options.processing_mode)}"
        )
    return policy


def policy_of(state: DispatcherState, iteration: JobIteration) -> IterationPolicy:
    """Return the policy of an iteration.

    An iteration started by another version may have an unsupported mode (`UnsupportedMode`).
    """
    job = state.jobs[iteration.job_id]
    if job.save_id:
        return SAVE_POLICY
    try:
        return policy_for(job.options)
    except FailedPreconditionError as error:
        return UnsupportedMode(str(error))


def mode_name(mode: int) -> str:
    """Return the name of a processing mode."""
    return _NAMES.get(mode, str(mode))
