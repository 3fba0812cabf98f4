"""Sharding policies of jobs with a cross-trainer cache, for infinite datasets.

Each trainer reads all elements of every task. Elements that a trainer missed when a worker died are
not computed again, because other trainers received them. Copies of an infinite dataset are never
complete, so, unlike in `no_sharding`, the iteration continues as long as no copy reached its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.policy import IterationPolicy
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    TaskPhase,
)
from headrace.service.modes.dynamic.policy import DynamicSharding
from headrace.service.modes.no_sharding.policy import NoSharding
from headrace.service.modes.static.policy import StaticSharding

__all__ = ["make_shared_policy"]


class _SharedNoSharding(NoSharding):
    """A copy of an infinite dataset per worker."""

    delivery_policy = "shared"

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return whether reading has stopped and a copy reached its end, or copies kill workers."""
        tasks = state.tasks_of(iteration)
        if all(task.phase is TaskPhase.LOST or _was_drained(task) for task in tasks):
            return super().is_complete(state, iteration) and not any(map(_was_drained, tasks))
        return super().is_complete(state, iteration)


class _SharedDynamicSharding(DynamicSharding):
    """Each split is computed by one worker, for all trainers."""

    delivery_policy = "shared"
    reports_complete_splits = False


class _SharedStaticSharding(StaticSharding):
    """Each worker computes its dataset shard, for all trainers."""

    delivery_policy = "shared"


def make_shared_policy(policy: IterationPolicy) -> IterationPolicy:
    """Return the variant of a policy for jobs whose trainers share elements."""
    return _SHARED_POLICIES[type(policy)](policy)


def _was_drained(task: DispatcherTask) -> bool:
    return task.phase is TaskPhase.FINISHED and task.cut_short


_SHARED_POLICIES: dict[type[IterationPolicy], Callable[[Any], IterationPolicy]] = {
    NoSharding: lambda _: _SharedNoSharding(),
    DynamicSharding: lambda _: _SharedDynamicSharding(),
    StaticSharding: lambda static: _SharedStaticSharding(static.shard_kind),
}
