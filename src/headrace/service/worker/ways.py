"""What a task's definition says by name, and what that means to a worker.

Rule. A name that is not in its table is one of a later version: the task cannot be started, and the
      error says which name it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from headrace.errors import FailedPreconditionError
from headrace.service.messages import TaskDefinition
from headrace.service.modes.coordinated_reads.delivery import Rounds
from headrace.service.modes.cross_trainer_cache.delivery import Shared
from headrace.service.modes.distributed_save.delivery import FileDelivery
from headrace.service.worker.first_come import FirstCome
from headrace.service.worker.hand_out import Bounds, HandOut

__all__ = ["found_by_name", "hand_out_of", "is_in_order"]

V = TypeVar("V")


def hand_out_of(definition: TaskDefinition, bounds: Bounds | None) -> HandOut[Any]:
    """Return what hands out a task's elements.

    Raises:
        FailedPreconditionError: The way that the definition names is not known here.
    """
    what = "way to hand out elements"
    return found_by_name(_HAND_OUTS, definition.delivery_policy, definition, what)(
        definition, bounds
    )


def is_in_order(definition: TaskDefinition) -> bool:
    """Whether a task's elements are wanted in order, unit by unit."""
    return definition.partition_mode.startswith("in order")


def found_by_name(table: dict[str, V], name: str, definition: TaskDefinition, what: str) -> V:
    """Return what a name in a task's definition means.

    Raises:
        FailedPreconditionError: It is not known here.
    """
    found = table.get(name)
    if found is None:
        known = ", ".join(str(each) for each in table)
        raise FailedPreconditionError(
            f"task {definition.task_id} has the {what} {name!r}, which this worker does not know "
            f"(it knows {known}): is the dispatcher of another version of Headrace?"
        )
    return found


def _files(definition: TaskDefinition, bounds: Bounds | None) -> FileDelivery[Any]:
    return FileDelivery(bounds)


def _first_come(definition: TaskDefinition, bounds: Bounds | None) -> FirstCome[Any]:
    return FirstCome(
        bounds, origins=definition.has_element_ids, says_dealt=definition.has_element_ids
    )


def _shared(definition: TaskDefinition, bounds: Bounds | None) -> Shared[Any]:
    return Shared(bounds)


def _rounds(definition: TaskDefinition, bounds: Bounds | None) -> Rounds[Any]:
    return Rounds(definition.num_consumers or 1, bounds)


_HAND_OUTS: dict[str, Callable[[TaskDefinition, Bounds | None], HandOut[Any]]] = {
    "first_come": _first_come,
    "shared": _shared,
    "files": _files,
    "rounds": _rounds,
}
