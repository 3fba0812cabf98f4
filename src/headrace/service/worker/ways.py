"""What a task's definition says by name, and what that means to a worker: two tables.

Rule. A name that is not in its table is one of a later version: the task cannot be started, and the
      error says which name it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.errors import FailedPreconditionError
from headrace.service.config import ShardingPolicy
from headrace.service.messages import TaskDefinition
from headrace.service.worker.first_come import FirstCome
from headrace.service.worker.hand_out import Bounds, HandOut

__all__ = ["Mode", "hand_out_of", "mode_of"]

V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What a processing mode means to a worker."""

    deals: bool
    """A task reads units, which it asks for; else it reads the plan whole."""
    seed: Callable[[TaskDefinition, str], int]
    """Return what random steps of a task draw from, which have no seed of their own, given the
    worker's id."""


def mode_of(definition: TaskDefinition) -> Mode:
    """Return what a task's processing mode means.

    Raises:
        FailedPreconditionError: It is not known here.
    """
    return _found(_MODES, definition.processing_mode, definition, "processing mode")


def hand_out_of(definition: TaskDefinition, bounds: Bounds | None) -> HandOut[Any]:
    """Return what hands out a task's elements.

    Raises:
        FailedPreconditionError: The way that the definition names is not known here.
    """
    make = _found(_HAND_OUTS, definition.hand_out, definition, "way to hand out elements")
    return make(bounds)


def _found(table: dict[Any, V], name: object, definition: TaskDefinition, what: str) -> V:
    found = table.get(name)
    if found is None:
        known = ", ".join(str(each) for each in table)
        raise FailedPreconditionError(
            f"task {definition.task_id} has the {what} {name!r}, which this worker does not know "
            f"(it knows {known}): is the dispatcher of another version of Headrace?"
        )
    return found


def _of_all(definition: TaskDefinition, worker_id: str) -> int:
    """Units mean the same on every worker, and so do shards."""
    return definition.seed


def _of_worker(definition: TaskDefinition, worker_id: str) -> int:
    """Whole copies are shuffled differently."""
    digest = hashlib.sha256(f"{definition.seed} {worker_id}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 12


_MODES = {
    int(ShardingPolicy.OFF): Mode(deals=False, seed=_of_worker),
    int(ShardingPolicy.DYNAMIC): Mode(deals=True, seed=_of_all),
    int(ShardingPolicy.FILE): Mode(deals=False, seed=_of_all),
    int(ShardingPolicy.DATA): Mode(deals=False, seed=_of_all),
    int(ShardingPolicy.FILE_OR_DATA): Mode(deals=False, seed=_of_all),
    int(ShardingPolicy.HINT): Mode(deals=False, seed=_of_all),
}

_HAND_OUTS: dict[str, Callable[[Bounds | None], HandOut[Any]]] = {"first_come": FirstCome}
