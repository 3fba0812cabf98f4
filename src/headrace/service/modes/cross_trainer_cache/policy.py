"""Jobs whose trainers share what workers make: the same policies, for data without an end.

Each trainer reads all elements of every task; what one of them did not get when a worker died is
not dealt again, for others had it. Copies of endless data are never whole. So, other than in
`copies`, the iteration goes on as long as no copy ended by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.policy import Policy
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task, TaskPhase
from headrace.service.modes.dynamic.policy import Dealing
from headrace.service.modes.no_sharding.policy import Copies
from headrace.service.modes.static.policy import Static

__all__ = ["shared_by_trainers"]


class _SharedCopies(Copies):
    """Copies of endless data."""

    hand_out = "shared"

    def is_over(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether nobody reads, and somebody's copy ended by itself; or copies kill workers."""
        tasks = state.tasks_of(iteration)
        if all(task.phase is TaskPhase.LOST or _was_asked_to_end(task) for task in tasks):
            return super().is_over(state, iteration) and not any(map(_was_asked_to_end, tasks))
        return super().is_over(state, iteration)


class _SharedDealing(Dealing):
    """Each unit is made by one worker, for all trainers."""

    hand_out = "shared"
    says_what_is_whole = False


class _SharedStatic(Static):
    """Each worker makes its share, for all trainers."""

    hand_out = "shared"


def shared_by_trainers(policy: Policy) -> Policy:
    """Return how a job is shared by its workers, where trainers share what those make."""
    return _SHARED[type(policy)](policy)


def _was_asked_to_end(task: Task) -> bool:
    return task.phase is TaskPhase.FINISHED and task.cut


_SHARED: dict[type[Policy], Callable[[Any], Policy]] = {
    Copies: lambda _: _SharedCopies(),
    Dealing: lambda _: _SharedDealing(),
    Static: lambda static: _SharedStatic(static.part),
}
