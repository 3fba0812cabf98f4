"""Iterations that a dispatcher of another version began, in a way that this one does not offer.

The journal is read all the same: what facts mean does not depend on what is offered now. What runs
of such an iteration is ended, and the iteration given up.
"""

from __future__ import annotations

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.policy import Policy, Post
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task
from headrace.service.dispatcher.updates import Update
from headrace.service.messages import GetSplit, LostUnits

__all__ = ["Unoffered"]


class Unoffered(Policy):
    """Nobody gets a task.

    Args:
        why: What is not offered, in words that can stand in an error.
    """

    deals = False

    def __init__(self, why: str) -> None:
        self._why = why

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return nothing."""
        return []

    def loose_end(self, state: DispatcherState, iteration: Iteration) -> Update | None:
        """Return the end of a task that runs."""
        running = next(iter(state.running_tasks(iteration)), None)
        if running is None or iteration.finished:
            return None
        return updates.TaskLost(task_id=running.task_id, reason=self._why)

    def is_over(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Say that it is."""
        return True

    def failure(self, state: DispatcherState, iteration: Iteration) -> str:
        """Return what is not offered."""
        return self._why

    def next_units(
        self,
        state: DispatcherState,
        iteration: Iteration,
        task: Task,
        request: GetSplit,
        *,
        is_impatient: bool,
    ) -> tuple[int, int] | None:
        """Deal nothing."""
        return None

    def lost(self, state: DispatcherState, iteration: Iteration) -> tuple[LostUnits, ...]:
        """Return nothing: why it was given up says enough."""
        return ()

    def is_kept(self, state: DispatcherState, iteration: Iteration, task: Task) -> bool:
        """Nobody asks again."""
        return False
