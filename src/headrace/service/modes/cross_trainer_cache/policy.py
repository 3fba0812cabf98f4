"""Jobs whose trainers share what workers make: the same policies, for data without an end.

Each trainer reads all elements of every task; what one of them did not get when a worker died is
not dealt again, for others had it. Copies of endless data are never whole. So, other than in
`copies`, the iteration goes on as long as no copy ended by itself.
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

__all__ = ["shared_by_trainers"]


class _SharedCopies(NoSharding):
    """Copies of endless data."""

    delivery_policy = "shared"

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Whether nobody reads, and somebody's copy ended by itself; or copies kill workers."""
        tasks = state.tasks_of(iteration)
        if all(task.phase is TaskPhase.LOST or _was_asked_to_end(task) for task in tasks):
            return super().is_complete(state, iteration) and not any(map(_was_asked_to_end, tasks))
        return super().is_complete(state, iteration)


class _SharedDealing(DynamicSharding):
    """Each unit is made by one worker, for all trainers."""

    delivery_policy = "shared"
    reports_complete_splits = False


class _SharedStatic(StaticSharding):
    """Each worker makes its share, for all trainers."""

    delivery_policy = "shared"


def shared_by_trainers(policy: IterationPolicy) -> IterationPolicy:
    """Return how a job is shared by its workers, where trainers share what those make."""
    return _SHARED[type(policy)](policy)


def _was_asked_to_end(task: DispatcherTask) -> bool:
    return task.phase is TaskPhase.FINISHED and task.cut_short


_SHARED: dict[type[IterationPolicy], Callable[[Any], IterationPolicy]] = {
    NoSharding: lambda _: _SharedCopies(),
    DynamicSharding: lambda _: _SharedDealing(),
    StaticSharding: lambda static: _SharedStatic(static.shard_kind),
}
