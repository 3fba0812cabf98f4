"""Base classes for the fields that a reading mode adds to iterations and tasks.

A mode with such fields defines subclasses in its package; `state` lists them in
`AnyIterationModeState` and `AnyTaskModeState`, so that journals can be decoded. `apply` calls the
methods without knowing the mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from headrace.service.messages import TaskAddress

if TYPE_CHECKING:
    from headrace.service.dispatcher.state import DispatcherTask, JobIteration

__all__ = ["IterationModeState", "TaskModeState"]


class IterationModeState(msgspec.Struct, tag=True):
    """Base class of the fields that a mode adds to an iteration."""

    clients_read_together: ClassVar[bool] = False
    """Whether every client must know every task, and clients wait for each other."""

    def task_created(self, task: DispatcherTask) -> None:
        """Check a new task."""

    def client_joined(self, iteration: JobIteration, client_id: str, index: int | None) -> None:
        """Record a client that joins, as consumer `index` if that is given."""

    def client_left(
        self, iteration: JobIteration, tasks: Sequence[DispatcherTask], client_id: str
    ) -> None:
        """Record that a client left; `awaiting_reports` of its tasks still contains it."""


class TaskModeState(msgspec.Struct, tag=True):
    """Base class of the fields that a mode adds to a task."""

    def extend_address(self, address: TaskAddress) -> TaskAddress:
        """Add the fields of the mode to the address that clients receive."""
        return address

    def task_unavailable(self, iteration: JobIteration, task: DispatcherTask) -> None:
        """Record that the worker was lost or left, or that the task failed."""
