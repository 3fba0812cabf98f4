"""The processing modes that this dispatcher offers: a table from a mode to its policy."""

from __future__ import annotations

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.copies import Copies
from headrace.service.dispatcher.dealing import Dealing
from headrace.service.dispatcher.policy import Policy
from headrace.service.dispatcher.state import DispatcherState, Iteration, Job
from headrace.service.dispatcher.static import Static

__all__ = ["OFFERED", "policy_of", "policy_of_job"]

OFFERED: dict[int, Policy] = {
    ShardingPolicy.OFF: Copies(),
    ShardingPolicy.DYNAMIC: Dealing(),
    ShardingPolicy.FILE: Static(),
    ShardingPolicy.DATA: Static(),
    ShardingPolicy.FILE_OR_DATA: Static(),
    ShardingPolicy.HINT: Static(),
}


def policy_of_job(job: Job) -> Policy:
    """Return how the iterations of a job are shared.

    This is the one place that chooses: today by the mode alone.
    """
    return OFFERED[job.processing_mode]


def policy_of(state: DispatcherState, iteration: Iteration) -> Policy:
    """Return how an iteration is shared."""
    return policy_of_job(state.jobs[iteration.job_id])
