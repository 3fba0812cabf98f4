"""Iterations started by a dispatcher of another version in an unsupported mode.

The journal is still readable, since the meaning of events does not depend on the supported modes.
Running tasks of such an iteration are stopped, and the iteration is abandoned.
"""

from __future__ import annotations

from headrace.service.dispatcher import events
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy import IterationPolicy, TaskAssignment
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, JobIteration
from headrace.service.messages import GetSplit, LostSplits

__all__ = ["UnsupportedMode"]


class UnsupportedMode(IterationPolicy):
    """Policy that creates no tasks.

    Args:
        reason: Error message about the unsupported mode.
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
        """Return the end of a running task."""
        running = next(iter(state.running_tasks(iteration)), None)
        if running is None or iteration.finished:
            return None
        return events.TaskLost(task_id=running.task_id, reason=self._reason)

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return True."""
        return True

    def failure_reason(self, state: DispatcherState, iteration: JobIteration) -> str:
        """Return the error message about the unsupported mode."""
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
        """Assign nothing."""
        return None

    def lost_splits(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[LostSplits, ...]:
        """Return nothing: `failure_reason` is sufficient."""
        return ()

    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Return False: no client requests anything again."""
        return False
