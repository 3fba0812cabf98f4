"""What a reading mode adds to the records of the dispatcher's state: base classes without fields.

A mode that needs fields of its own defines subclasses in `modes/<mode>/records.py`; `state` names
them in `IterationMode` and `TaskMode`, so that journals can be read. `apply` calls the methods, and
does not know which mode it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.service.messages import TaskAddress

if TYPE_CHECKING:
    from headrace.service.dispatcher.state import Iteration, Task

__all__ = ["IterationModeState", "TaskModeState"]


class IterationModeState(msgspec.Struct, tag=True):
    """What the mode adds to an iteration."""

    def task_created(self, task: Task) -> None:
        """Check a task that begins."""

    def client_joined(self, iteration: Iteration, client_id: str, index: int | None) -> None:
        """Note a client that begins to read, perhaps as the consumer with an index."""

    def client_left(self, iteration: Iteration, tasks: Sequence[Task], client_id: str) -> None:
        """Note a client that has left, while its tasks may still wait for its report."""


class TaskModeState(msgspec.Struct, tag=True):
    """What the mode adds to a task."""

    def address(self, address: TaskAddress) -> TaskAddress:
        """Return what clients hear of the task, with what the mode adds."""
        return address

    def gone(self, iteration: Iteration, task: Task) -> None:
        """Note that the task's worker is lost or has left, or that the task failed."""
