"""Implementations of the names in task definitions.

Rule. A name that is not in its table belongs to a later version: the task cannot be started, and
the error has the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from headrace.errors import FailedPreconditionError
from headrace.service.messages import TaskDefinition
from headrace.service.modes.coordinated_reads.round_delivery import RoundDelivery
from headrace.service.modes.cross_trainer_cache.shared_window import SharedWindowDelivery
from headrace.service.modes.distributed_save.delivery import FileDelivery
from headrace.service.worker.delivery_policy import BufferLimits, DeliveryPolicy
from headrace.service.worker.fifo_delivery import FifoDelivery

__all__ = ["create_delivery", "is_ordered", "look_up"]

V = TypeVar("V")


def create_delivery(definition: TaskDefinition, limits: BufferLimits | None) -> DeliveryPolicy[Any]:
    """Return the delivery policy of a task.

    Raises:
        FailedPreconditionError: If the policy in the definition is unknown.
    """
    create = look_up(_DELIVERY_POLICIES, definition.delivery_policy, definition, "delivery policy")
    return create(definition, limits)


def is_ordered(definition: TaskDefinition) -> bool:
    """Return whether a task's elements are read in order, split by split."""
    return definition.partition_mode.startswith("ordered")


def look_up(table: dict[str, V], name: str, definition: TaskDefinition, description: str) -> V:
    """Return the implementation of a name in a task's definition.

    Raises:
        FailedPreconditionError: If the name is unknown.
    """
    found = table.get(name)
    if found is None:
        known = ", ".join(str(each) for each in table)
        raise FailedPreconditionError(
            f"task {definition.task_id}: this worker does not support {description} {name!r}, only "
            f"{known}; check that it and the dispatcher run the same version of Headrace"
        )
    return found


def _create_file_delivery(
    definition: TaskDefinition, limits: BufferLimits | None
) -> FileDelivery[Any]:
    return FileDelivery(limits)


def _create_fifo(definition: TaskDefinition, limits: BufferLimits | None) -> FifoDelivery[Any]:
    return FifoDelivery(
        limits,
        tracks_elements=definition.has_element_ids,
        reports_assignments=definition.has_element_ids,
    )


def _create_shared_window(
    definition: TaskDefinition, limits: BufferLimits | None
) -> SharedWindowDelivery[Any]:
    return SharedWindowDelivery(limits)


def _create_rounds(definition: TaskDefinition, limits: BufferLimits | None) -> RoundDelivery[Any]:
    return RoundDelivery(definition.num_consumers or 1, limits)


_DELIVERY_POLICIES: dict[
    str, Callable[[TaskDefinition, BufferLimits | None], DeliveryPolicy[Any]]
] = {
    "fifo": _create_fifo,
    "shared": _create_shared_window,
    "files": _create_file_delivery,
    "rounds": _create_rounds,
}
