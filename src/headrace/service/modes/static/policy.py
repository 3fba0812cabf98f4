"""Static sharding: each slot of a fixed list of workers has its own shard (FILE, DATA, HINT).

Shard i of n is read completely by the worker in slot i of n (`slots`). If that worker is lost or
leaves before the end, the next worker in the slot reads the shard again from the start: each
element is delivered at least once. A shard whose worker dies three times in a row, within a minute
each, is abandoned, and so is the iteration once the other shards are read: a function that kills
every worker soon would yield the same elements repeatedly. An iteration is complete when every
shard was read, failed or was abandoned; it waits while a slot is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.errors import NotFoundError
from headrace.service.dispatcher.policy import IterationPolicy, TaskAssignment, eligible_workers
from headrace.service.dispatcher.state import (
    WORKER_LEFT,
    DispatcherState,
    DispatcherTask,
    JobIteration,
    RegisteredDataset,
    TaskPhase,
)
from headrace.service.messages import LostSplits, OpenIteration, TaskDefinition
from headrace.service.modes.static.records import DatasetShard, shard_of

__all__ = ["StaticSharding"]

_MAX_ATTEMPTS = 3
_ENDED = (TaskPhase.FINISHED, TaskPhase.FAILED)


class StaticSharding(IterationPolicy):
    """Assigns no splits: each task reads a fixed shard.

    Args:
        shard_kind: How the shard is taken from the plan (`messages.TaskDefinition.shard_kind`).
    """

    assigns_splits = False

    def __init__(self, shard_kind: str) -> None:
        self.shard_kind = shard_kind

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Reject a dataset if the dispatcher has no list of workers.

        Raises:
            NotFoundError: If the dispatcher has no list of workers.
        """
        if not state.slots:
            raise NotFoundError(
                "Worker is not in the workers list: the static sharding policies (FILE, DATA, "
                "FILE_OR_DATA, HINT) divide a dataset among a fixed list of workers, and this "
                "dispatcher has none. Set `worker_addresses` in the DispatcherConfig "
                '(--worker-address, once for each), as in ["host1:%port%", "host2:%port%"], or use '
                "ShardingPolicy.DYNAMIC"
            )

    def extend_definition(
        self, definition: TaskDefinition, state: DispatcherState, task: DispatcherTask
    ) -> TaskDefinition:
        """Add the shard to the definition."""
        assert isinstance(task.mode_state, DatasetShard), task
        return msgspec.structs.replace(
            definition, shard_index=task.mode_state.index, num_shards=task.mode_state.num_shards
        )

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return a task for each shard that is unread and whose slot has an eligible worker."""
        tasks = state.tasks_of(iteration)
        unavailable_shards = {
            _shard_index(task)
            for task in tasks
            if task.phase is TaskPhase.RUNNING or _is_read(task)
        }
        unavailable_shards.update(_abandoned_shards(tasks))
        eligible = eligible_workers(state, iteration)
        return [
            TaskAssignment(
                worker_id=slot.worker_id,
                mode_state=DatasetShard(index, len(state.slots)),
                attempt=_count_attempts(tasks, index),
            )
            for index, slot in enumerate(state.slots)
            if slot.worker_id in eligible and index not in unavailable_shards
        ]

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return whether every shard was read, failed or was abandoned."""
        tasks = state.tasks_of(iteration)
        if any(task.phase is TaskPhase.RUNNING for task in tasks):
            return False
        read_shards = {_shard_index(task) for task in tasks if _is_read(task)}
        return len(read_shards.union(_abandoned_shards(tasks))) == len(state.slots)

    def failure_reason(self, state: DispatcherState, iteration: JobIteration) -> str:
        """Return an error about the abandoned shards; empty if there are none."""
        return " ".join(
            f"Shard {shard} was abandoned: its worker was lost {_MAX_ATTEMPTS} times in a row, "
            "each time within a minute of its start, most recently worker "
            f"{last.address} ({last.reason}). A function of the dataset may terminate or block its "
            "process; see the workers' logs."
            for shard, last in _abandoned_shards(state.tasks_of(iteration)).items()
        )

    def lost_splits(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[LostSplits, ...]:
        """Return nothing: `failure_reason` describes the abandoned shards."""
        return ()

    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Return whether the task ended on its worker, which can redeliver its last batches."""
        return task.phase in _ENDED


def _shard_index(task: DispatcherTask) -> int:
    shard = shard_of(task.mode_state)
    assert shard is not None, task
    return shard.index


def _is_read(task: DispatcherTask) -> bool:
    """Return whether a task read its shard as far as it can be read."""
    return task.phase in _ENDED and not task.cut_short


def _abandoned_shards(tasks: Sequence[DispatcherTask]) -> dict[int, DispatcherTask]:
    """Return the shards whose workers died repeatedly, each with its last task."""
    deaths: dict[int, list[DispatcherTask]] = {}
    for task in tasks:
        if task.phase is not TaskPhase.LOST or task.is_stable:
            deaths[_shard_index(task)] = []
        elif task.reason != WORKER_LEFT:
            deaths.setdefault(_shard_index(task), []).append(task)
    return {shard: lost[-1] for shard, lost in deaths.items() if len(lost) >= _MAX_ATTEMPTS}


def _count_attempts(tasks: Sequence[DispatcherTask], shard: int) -> int:
    return sum(_shard_index(task) == shard for task in tasks)
