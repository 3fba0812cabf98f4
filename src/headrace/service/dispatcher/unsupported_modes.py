"""Iterations that a dispatcher of another version began, in a way that this one does not offer.

The journal is read all the same: what facts mean does not depend on what is offered now. What runs
of such an iteration is ended, and the iteration given up.
"""

from __future__ import annotations

from headrace.service.dispatcher import events
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy import IterationPolicy, TaskAssignment
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, JobIteration
from headrace.service.messages import GetSplit, LostSplits

__all__ = ["UnsupportedMode"]


class UnsupportedMode(IterationPolicy):
    """Nobody gets a task.

    Args:
        reason: What is not offered, in words that can stand in an error.
    """

    assigns_splits = False

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return nothing."""
        return []

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return the end of a task that runs."""
        running = next(iter(state.running_tasks(iteration)), None)
        if running is None or iteration.finished:
            return None
        return events.TaskLost(task_id=running.task_id, reason=self._reason)

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Say that it is."""
        return True

    def failure_reason(self, state: DispatcherState, iteration: JobIteration) -> str:
        """Return what is not offered."""
        return self._reason

    def choose_splits(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        task: DispatcherTask,
        request: GetSplit,
        *,
        is_stalled: bool,
    ) -> tuple[int, int] | None:
        """Deal nothing."""
        return None

    def lost_splits(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[LostSplits, ...]:
        """Return nothing: why it was given up says enough."""
        return ()

    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Nobody asks again."""
        return False
